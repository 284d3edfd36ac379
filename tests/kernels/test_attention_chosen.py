"""Words and lists of chosen blocks against their definition, key by key."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import tiling
from pallas_kernels.attention import chosen, maps, problem
from pallas_kernels.attention.problem import Rule

DOCUMENTS = {
    'one document': None,
    'packed': ((30, 1, 2, 3, 14, 20), (5, 40, 25), (70,)),
    'of one token': ((1,) * 70, (64, 6), (35, 35)),
}
ROWS, LENGTH, GROUPS = 3, 70, 2


def made(documents, block):
    """A call that chooses among the blocks of a document, and which keys its queries may read, `b g t s`."""
    rows = DOCUMENTS[documents] or ((LENGTH,),) * ROWS
    # Numbers of documents come again, of which two runs are two.
    runs = np.array([np.repeat(np.arange(len(row)), row) for row in rows])
    firsts = np.array([np.repeat(np.cumsum(row) - row, row) for row in rows])
    numbers = (np.arange(LENGTH) - firsts) // block
    draw = np.random.default_rng(block)
    choices = draw.random((ROWS, LENGTH, GROUPS, -(-LENGTH // block))) < 0.3
    most = np.array([np.repeat((np.array(row) - 1) // block, row) for row in rows])
    choices &= np.arange(choices.shape[3]) <= most[:, :, None, None]
    x = jnp.zeros((ROWS, LENGTH, GROUPS, 8))
    segments = None if DOCUMENTS[documents] is None else (jnp.asarray(runs % 2, jnp.int32),) * 2
    operands = problem.canonical(x, x, x, None, None, None, segments, jnp.asarray(choices), block)
    read = np.take_along_axis(np.moveaxis(choices, 1, 2), numbers[:, None, None], axis=3)
    return operands, read & (runs[:, :, None] == runs[:, None])[:, None]


def in_tiles(array, axis, size):
    """An axis as tiles, padded with zeros."""
    widths = [(0, -n % size if place == axis else 0) for place, n in enumerate(array.shape)]
    padded = np.pad(array, widths)
    return padded.reshape(*array.shape[:axis], -1, size, *array.shape[axis + 1 :])


def together(operands):
    """Which keys are in a query's document, `b 1 s t`."""
    if operands.query_segments is None:
        return np.ones((1, 1, 1, 1), bool)
    return np.asarray(operands.query_segments == operands.key_segments)[:, :, 0].swapaxes(2, 3)


@pytest.mark.parametrize('block', [3, 8])
@pytest.mark.parametrize('tile', [8, 16, 32])
@pytest.mark.parametrize('documents', DOCUMENTS)
def test_a_key_is_seen_where_word_and_bit_have_one_in_common(documents, tile, block):
    operands, read = made(documents, block)
    words, bits, _ = (np.asarray(array) for array in chosen.words_of(operands, tile))
    assert (words >= 0).all()
    common = np.repeat(words, tile, axis=2)[:, :, :LENGTH] & bits[:, None, :, None]
    same = together(operands)
    np.testing.assert_array_equal((common != 0) & same, read.swapaxes(2, 3) & same)
    # A word is zero where its tile has nothing for the query, or its tile would be gone over for nothing.
    np.testing.assert_array_equal(words != 0, in_tiles(read, 3, tile).any(axis=4).swapaxes(2, 3))


@pytest.mark.parametrize('keys', [8, 16])
@pytest.mark.parametrize('window', [None, 20])
@pytest.mark.parametrize('documents', ['one document', 'packed'])
def test_lists_name_the_tiles_with_a_chosen_key_in_order(documents, window, keys):
    operands, read = made(documents, 8)
    rule = Rule(maps.Softmax(), 1.0, True, window, 0, 8)
    distance = np.arange(LENGTH)[:, None] - np.arange(LENGTH)
    words, tile = chosen.words_of(operands, 16), tiling.AttentionTile(queries=32, keys=keys)
    # By position, whole tiles are hidden or not.
    hidden = (distance < 0) if window is None else (distance < 0) | (distance >= window)
    some = in_tiles(in_tiles(~hidden, 0, 32), 2, keys).any(axis=(1, 3))
    expected = in_tiles(in_tiles(read, 2, 32), 4, keys).any(axis=(3, 5)) & some
    for by, visited in ((0, expected), (1, expected.swapaxes(2, 3))):
        count, tiles = (np.asarray(each) for each in chosen.lists_of(rule, words, (LENGTH,) * 2, tile, by=by))
        for place in np.ndindex(visited.shape[:3]):
            listed = tiles[place][: count[place]]
            wanted = np.flatnonzero(visited[place])
            if documents == 'one document':
                assert list(listed) == list(wanted)
            else:
                # Blocks of two documents in one tile may have the same bit.
                assert set(wanted) <= set(listed)
                assert list(listed) == sorted(listed)


def test_blocks_of_which_a_tile_has_too_many_are_refused():
    assert chosen.refusal(Rule(maps.Softmax(), 1.0, True, None, 0), 512) is None
    for block in (18, 19, 64):
        assert chosen.refusal(Rule(maps.Softmax(), 1.0, True, None, 0, block), 512) is None
    message = 'blocks have 17 keys; expected at least 18, of which a tile of 512 keys meets 30 or fewer'
    assert chosen.refusal(Rule(maps.Softmax(), 1.0, True, None, 0, 17), 512) == message
    # A tile that begins with the last key of a block meets the most blocks.
    assert len(np.unique((17 + np.arange(512)) // 18)) == 30
    assert len(np.unique((16 + np.arange(512)) // 17)) == 32
