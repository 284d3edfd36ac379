"""Elite frequencies: found where they were put, and a conversion that changes nothing when nothing is left out."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.config import build, spec
from attnlab.context import Context
from attnlab.convert.elite import elite_chunks, score_distance, to_elite
from attnlab.errors import UserError
from attnlab.functional.rotary import rotary_angles
from attnlab.mixers.softmax.attention import Attention
from attnlab.nn.positions import Alibi, Rope
from attnlab.nn.preludes import ShortConv
from attnlab.quantize.formats import Symmetric
from attnlab.quantize.layers import Quantization
from attnlab.quantize.training import rounding_called
from attnlab.testing.contract import context
from attnlab.testing.noise import noise
from attnlab.testing.tolerances import assert_close

DIM, HEADS, KEY = 12, 2, 8
ALL = ((2, 0, 3, 1), (0, 1, 2, 3))


def attention(**kwargs) -> Attention:
    arguments = {'heads': HEADS, 'key_dim': KEY, 'position': Rope()} | kwargs
    return build(spec(Attention, **arguments))(DIM, rngs=nnx.Rngs(0))


def with_energy_in(chunks) -> Attention:
    """Attention whose queries have only these pairs of channels."""
    mixer = attention()
    kept = np.zeros((HEADS, KEY), np.float32)
    for head, pairs in enumerate(chunks):
        kept[head, list(pairs)] = kept[head, [pair + KEY // 2 for pair in pairs]] = 1
    mixer.query.weight[...] = mixer.query.weight[...] * kept.reshape(1, -1)
    return mixer


def distances(mixer: Attention, x, chosen, head: int) -> float:
    """How far off the scores are when only `chosen` pairs turn, pairs taken as complex numbers."""
    q, k = (
        np.asarray(linear(x), np.float64).reshape(*x.shape[:2], HEADS, KEY)[0, :, head]
        for linear in (mixer.query, mixer.key)
    )
    q, k = (each[:, : KEY // 2] + 1j * each[:, KEY // 2 :] for each in (q, k))
    positions = jnp.arange(x.shape[1], dtype=jnp.int32)[None]
    angles = np.asarray(rotary_angles(positions, KEY), np.float64)[0]
    some = np.where(np.isin(np.arange(KEY // 2), chosen), angles, 0)
    scores, partial = (
        ((q * np.exp(1j * a)) @ np.conj(k * np.exp(1j * a)).T).real / np.sqrt(KEY) for a in (angles, some)
    )
    return float(np.mean(np.abs(partial - scores)[np.tril_indices(x.shape[1])]))


@pytest.mark.parametrize('interleaved', [False, True])
def test_with_all_pairs_and_the_full_rank_nothing_changes(interleaved: bool):
    mixer = attention(position=Rope(base=100.0, interleaved=interleaved), value_dim=5)
    x, ctx = noise(2, 7, DIM), context(((1, 7),), ((1, 3), (2, 4)))
    converted = to_elite(mixer, ALL)
    assert (converted.rank, converted.key_dim, converted.rotated_dim) == (2 * 5, 0, KEY)
    assert_close(converted(x, ctx)[0], mixer(x, ctx)[0], dtype=x.dtype, reduction=DIM * 7, what='y')


def test_where_positions_are_equal_few_pairs_do():
    mixer, x = attention(), noise(1, 7, DIM)
    converted = to_elite(mixer, ((2,), (0,)))
    assert converted.rank == DIM
    ctx = Context(positions=jnp.zeros((1, 7), jnp.int32))
    assert_close(converted(x, ctx)[0], mixer(x, ctx)[0], dtype=x.dtype, reduction=DIM * 7, what='y')


def test_pairs_without_energy_need_not_turn():
    mixer, x = with_energy_in(((1, 2), (0, 3))), noise(1, 7, DIM)
    ctx = Context.full(1, 7)
    converted = to_elite(mixer, ((1, 2), (0, 3)))
    assert_close(converted(x, ctx)[0], mixer(x, ctx)[0], dtype=x.dtype, reduction=DIM * 7, what='y')


def test_the_joint_map_is_the_best_of_its_rank():
    mixer, chunks = attention(), ((2,), (0,))
    others = np.array([[0, 1, 3, 4, 5, 7], [1, 2, 3, 5, 6, 7]])
    key, value = (np.asarray(each.weight[...]).reshape(DIM, HEADS, KEY) for each in (mixer.key, mixer.value))
    joint = np.concatenate([np.take_along_axis(key, others[None], axis=2), value], axis=2).reshape(DIM, -1)
    dropped = np.linalg.svd(joint, compute_uv=False)[5:]
    converted = to_elite(mixer, chunks, rank=5)
    product = np.asarray(converted.down.weight[...] @ converted.up.weight[...])
    np.testing.assert_allclose(np.sum((joint - product) ** 2), np.sum(dropped**2), rtol=1e-4)


def test_the_search_finds_where_the_energy_is():
    mixer, x, ctx = with_energy_in(((1, 2), (0, 3))), noise(1, 16, DIM), Context.full(1, 16)
    found = elite_chunks(mixer, x, ctx, kept=2)
    assert [set(pairs) for pairs in found] == [{1, 2}, {0, 3}]
    uniform = ((0, 3), (0, 3))
    greedy, spread = score_distance(mixer, x, ctx, found), score_distance(mixer, x, ctx, uniform)
    np.testing.assert_allclose(greedy, 0, atol=1e-5)
    assert spread[0] > 1e-2 and spread[1] < 1e-5


def test_each_round_takes_the_best_of_all_that_are_left():
    mixer, x, ctx = attention(), noise(1, 16, DIM), Context.full(1, 16)
    found = elite_chunks(mixer, x, ctx, kept=4)
    for head in range(HEADS):
        for rounds in range(4):
            before = found[head][:rounds]
            left = [pair for pair in range(4) if pair not in before]
            best = min(left, key=lambda pair: distances(mixer, x, [*before, pair], head))
            assert found[head][rounds] == best
    assert elite_chunks(mixer, x, ctx, kept=2) == tuple(pairs[:2] for pairs in found)
    two = tuple(pairs[:2] for pairs in found)
    expected = [distances(mixer, x, two[head], head) for head in range(HEADS)]
    np.testing.assert_allclose(score_distance(mixer, x, ctx, two), expected, rtol=1e-4)


def test_padding_does_not_count():
    mixer, x = attention(), noise(1, 12, DIM)
    padded = context(((1, 8), (0, 4)))
    alone = score_distance(mixer, x[:, :8], Context.full(1, 8), ((1,), (2,)))
    np.testing.assert_allclose(score_distance(mixer, x, padded, ((1,), (2,))), alone, rtol=1e-5)


@pytest.mark.parametrize(
    'kwargs',
    [
        {'kv_heads': 1},
        {'position': Alibi()},
        {'window': 4},
        {'bias': True},
        {'position': Rope(fraction=0.5)},
        {'prelude': spec(ShortConv)},
    ],
)
def test_other_attention_is_refused(kwargs: dict):
    with pytest.raises(UserError, match='elite frequencies need'):
        to_elite(attention(**kwargs), ALL)


@pytest.mark.parametrize(
    'how',
    [rounding_called('int3'), rounding_called('+int8'), Quantization(Symmetric(3))],
    ids=('weights', 'inputs', 'stored'),
)
def test_maps_that_are_rounded_are_refused(how):
    mixer = how(nnx.Dict(mixer=attention())).mixer
    with pytest.raises(UserError, match='not a Linear that computes with its weights as they are'):
        to_elite(mixer, ALL)


def test_more_than_there_is_is_refused():
    with pytest.raises(UserError, match='kept is 5; a head has 4 pairs'):
        elite_chunks(attention(), noise(1, 3, DIM), Context.full(1, 3), kept=5)
    with pytest.raises(UserError, match='rank is 13; the map to keys and values has rank 12 at most'):
        to_elite(attention(), ((0,), (1,)), rank=13)
