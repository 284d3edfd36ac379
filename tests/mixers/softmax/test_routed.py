"""Native sparse attention against its equations, block by block."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import pallas_kernels
from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.functional import block_sparse
from attnlab.functional.attend import look
from attnlab.functional.block_sparse import (
    Blocks,
    Compressed,
    Located,
    attend_chosen,
    attend_in_stream,
    attend_selected,
    scored,
    weighed,
)
from attnlab.functional.cache import Entries
from attnlab.functional.reach import Reach
from attnlab.mixers.softmax.routed import NativeSparseAttention
from attnlab.nn.gates import OutputGate
from attnlab.nn.positions import Rope
from attnlab.testing.contract import cast_parameters, context
from attnlab.testing.noise import noise as float32_noise
from attnlab.testing.tolerances import assert_close

LENGTH = 23
SIZES = {'compressed_block': 4, 'compressed_stride': 2, 'selected_block': 6, 'selected_blocks': 3, 'initial': 1}


def sparse(dim: int = 16, **kwargs) -> NativeSparseAttention:
    """Four query heads on two, in float64."""
    settings = {**SIZES, 'local': 1, 'window': 5, **kwargs}
    return cast_parameters(NativeSparseAttention(dim, heads=4, kv_heads=2, rngs=nnx.Rngs(0), **settings), jnp.float64)


noise = functools.partial(float32_noise, dtype=float)


def run(mixer: NativeSparseAttention, x: jax.Array, ctx: Context) -> jax.Array:
    graphdef, params = nnx.split(mixer)
    return jax.jit(lambda params, x, ctx: nnx.merge(graphdef, params)(x, ctx)[0])(params, x, ctx)


def softmax_read(q: np.ndarray, keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What one query reads, and its weights; zero from no keys."""
    if not len(keys):
        return np.zeros(values.shape[-1]), np.zeros(0)
    weights = np.exp(keys @ q / math.sqrt(len(q)))
    weights /= weights.sum()
    return weights @ values, weights


def by_definition(mixer: NativeSparseAttention, x: jax.Array, positions: np.ndarray) -> np.ndarray:
    """The output for one document, `t d`, one query at a time; equations 5 to 12 with blocks numbered from 0."""
    t, blocks, window = len(x), mixer.blocks, mixer.reach.window

    def rotated(y: np.ndarray, where: np.ndarray) -> np.ndarray:
        return np.asarray(mixer.position.rotate(jnp.asarray(y)[None], jnp.asarray(where, jnp.int32)[None])[0])

    q = rotated((x @ mixer.query.weight[...]).reshape(t, 4, -1), positions)
    keys = [np.asarray(x @ linear.weight[...]).reshape(t, 2, -1) for linear in mixer.keys]
    values = [np.asarray(x @ linear.weight[...]).reshape(t, 2, -1) for linear in mixer.values]

    starts = range(0, t - blocks.block + 1, blocks.stride)

    def compressed(net, y: np.ndarray) -> np.ndarray:
        made = []
        for start in starts:
            block = y[start : start + blocks.block] + np.asarray(net.places[...])[:, None]
            flat = jnp.asarray(np.swapaxes(block, 0, 1).reshape(2, -1))
            made.append(np.asarray(jax.nn.gelu(flat @ net.up.weight[...]) @ net.down.weight[...]))
        return np.stack(made)

    block_keys = rotated(compressed(mixer.key_compressor, keys[0]), positions[list(starts)])
    block_values = compressed(mixer.value_compressor, values[0])
    keys[1:] = [rotated(k, positions) for k in keys[1:]]
    gates = np.asarray(mixer.gate(x[None])[0]).reshape(t, 3, 4)

    output = np.zeros((t, 4, values[0].shape[-1]))
    for i, group in np.ndindex(t, 2):
        over = [c for c, start in enumerate(starts) if start + blocks.block <= i + 1]
        mattering = np.zeros(i // blocks.size + 1)
        for head in (2 * group, 2 * group + 1):
            read, weights = softmax_read(q[i, head], block_keys[over, group], block_values[over, group])
            output[i, head] += gates[i, 0, head] * read
            for c, weight in zip(over, weights, strict=True):
                for m, n in np.ndindex(blocks.size // blocks.stride, blocks.block // blocks.stride):
                    # Equation 9, p_slc[j] = sum_mn p_cmp[(l' / d) j - m - n], counts both blocks from 1.
                    j, rest = divmod(c + 1 + m + n, blocks.size // blocks.stride)
                    if rest == 0 and j <= len(mattering):
                        mattering[j - 1] += weight
        mattering[: blocks.initial] = np.inf
        mattering[len(mattering) - blocks.local :] = np.inf
        chosen = np.argsort(-mattering, kind='stable')[: blocks.count]
        tokens = [j for j in range(i + 1) if j // blocks.size in chosen]
        recent = list(range(max(0, i - window + 1), i + 1))
        for head in (2 * group, 2 * group + 1):
            for branch, read_from in ((1, tokens), (2, recent)):
                read, _ = softmax_read(q[i, head], keys[branch][read_from, group], values[branch][read_from, group])
                output[i, head] += gates[i, branch, head] * read
    return output.reshape(t, -1) @ np.asarray(mixer.output.weight[...])


@pytest.mark.parametrize('gate', ['paper', 'linear'])
def test_three_branches_are_their_equations(gate: str):
    with jax.enable_x64(True):
        linear = functools.partial(OutputGate, activation='sigmoid')
        mixer = sparse(position=Rope(), **({'gate': linear} if gate == 'linear' else {}))
        x = noise(1, LENGTH, 16)
        expected = by_definition(mixer, x[0], np.arange(LENGTH))
        y = run(mixer, x, Context.full(1, LENGTH))[0]
        assert_close(y, expected, dtype=jnp.float64, reduction=16 * LENGTH, what='y')


def test_blocks_are_counted_from_the_start_of_the_document():
    with jax.enable_x64(True):
        mixer, x = sparse(position=Rope()), noise(1, LENGTH, 16)
        y = run(mixer, x, context(((1, 3), (2, 20))))[0]
        expected = by_definition(mixer, x[0, 3:], np.arange(20))
        assert_close(y[3:], expected, dtype=jnp.float64, reduction=16 * LENGTH, what='y')


def test_a_query_does_not_select_every_block():
    """Else what is tested here could not fail."""
    with jax.enable_x64(True):
        mixer, x, ctx = sparse(position=Rope()), noise(1, LENGTH, 16), Context.full(1, LENGTH)
        everything = sparse(position=Rope(), selected_blocks=4)
        difference = np.abs(run(mixer, x, ctx) - run(everything, x, ctx))[0].max(axis=-1)
        assert (difference[:18] < 1e-12).all() and (difference[18:] > 1e-3).all()


def test_with_every_block_selected_the_branch_is_full_attention(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(block_sparse, 'CHUNK', 5)
    with jax.enable_x64(True):
        q, k, v = noise(2, 13, 4, 8), noise(2, 13, 2, 8, seed=1), noise(2, 13, 2, 8, seed=2)
        tokens = jnp.arange(13, dtype=jnp.int32)
        none = Compressed(
            jnp.zeros((2, 2, 1, 8)), jnp.zeros((2, 2, 1, 8)), jnp.full((2, 1), -1), jnp.zeros((2, 1), jnp.int32)
        )

        def selected(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return attend_in_stream(
                q,
                jnp.swapaxes(k, 1, 2),
                jnp.swapaxes(v, 1, 2),
                queries=Located(tokens, jnp.zeros((2, 13), jnp.int32)),
                compressed=none,
                blocks=Blocks(block=2, stride=2, size=4, count=4, initial=1, local=1),
            )

        weights = noise(2, 13, 4, 8, seed=3)

        def measured(attend) -> list[jax.Array]:
            loss = jax.value_and_grad(lambda *arrays: jnp.vdot(weights, attend(*arrays)), (0, 1, 2))
            value, gradients = jax.jit(loss)(q, k, v)
            return [value, *gradients]

        for actual, expected in zip(measured(selected), measured(pallas_kernels.attention), strict=True):
            assert_close(actual, expected, dtype=jnp.float64, reduction=13 * 13, what='value and gradients')


@pytest.mark.parametrize('importance', [weighed, scored])
@pytest.mark.parametrize('documents', [None, ((1, 5), (2, 18))])
def test_the_core_reads_what_is_read_in_a_stream(documents, importance, monkeypatch: pytest.MonkeyPatch):
    """The same blocks for every query, whatever part of them is chosen at a time; gradients too."""
    monkeypatch.setattr(block_sparse, 'CHOOSING', 7)
    with jax.enable_x64(True):
        ctx = Context.full(1, LENGTH) if documents is None else context(documents)
        q, k, v = noise(1, LENGTH, 4, 8), noise(1, LENGTH, 2, 8, seed=1), noise(1, LENGTH, 2, 6, seed=2)
        firsts = jnp.asarray([[0] * 5 + [5] * 18 if documents else [0] * LENGTH], jnp.int32)
        blocks = Blocks(block=4, stride=4, size=4, count=3, initial=0, local=1)
        ended, numbers = blocks.ends(jnp.arange(LENGTH, dtype=jnp.int32)[None] - firsts)
        ends = jnp.where(ended, jnp.arange(LENGTH, dtype=jnp.int32)[None], -1)
        summaries = noise(1, 2, LENGTH, 8, seed=3)
        compressed = Compressed(summaries, summaries, ends, numbers)
        view = look(Entries(k, v, ctx.segments_or_ones()), ctx, Reach())
        options = {'compressed': compressed, 'blocks': blocks, 'importance': importance}
        weights = noise(1, LENGTH, 4, 6, seed=4)

        def measured(read) -> list[jax.Array]:
            loss = jax.value_and_grad(lambda *arrays: jnp.vdot(weights, read(*arrays)), (0, 1, 2))
            value, gradients = jax.jit(loss)(q, k, v)
            return [value, *gradients]

        def in_stream(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            return attend_in_stream(
                q, jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2), queries=Located(view.queries.places, firsts), **options
            )

        by_core = measured(lambda q, k, v: attend_selected(q, k, v, view, firsts=firsts, **options))
        for actual, expected in zip(by_core, measured(in_stream), strict=True):
            assert_close(actual, expected, dtype=jnp.float64, reduction=LENGTH * LENGTH, what='value and gradients')


@pytest.mark.parametrize('tokens', [range(13), range(9, 13)])
def test_tokens_that_are_gathered_are_those_that_are_not_hidden(tokens):
    """For documents that start amid a block, and for queries at the end of longer streams; gradients too."""
    with jax.enable_x64(True):
        t = len(tokens)
        q, k, v = noise(2, t, 2, 3, 8), noise(2, 2, 13, 8, seed=1), noise(2, 2, 13, 4, seed=2)
        firsts = jnp.array([[0] * 13, [0] * 3 + [3] * 10], jnp.int32)[:, tokens.start :]
        here = Located(jnp.arange(tokens.start, 13, dtype=jnp.int32), firsts)
        blocks = Blocks(block=2, stride=2, size=4, count=2, initial=0, local=1)
        own = (here.tokens[None] - here.firsts)[:, None] // 4
        # The own block and one before it, or a later one where there is none.
        other = jnp.array([1, 2])[None, :, None]
        chosen = jnp.stack(jnp.broadcast_arrays(own, jnp.where(own >= other, own - other, own + 1)), axis=-1)
        weights = noise(2, t, 6, 4, seed=3)

        def measured(gathered: bool) -> list[jax.Array]:
            def loss(*arrays: jax.Array) -> jax.Array:
                return jnp.vdot(weights, attend_chosen(*arrays, here, chosen, blocks, gathered=gathered))

            value, gradients = jax.value_and_grad(loss, (0, 1, 2))(q, k, v)
            return [value, *gradients]

        for actual, expected in zip(measured(True), measured(False), strict=True):
            assert_close(actual, expected, dtype=jnp.float64, reduction=13 * 13, what='value and gradients')


def test_overlaps_are_those_of_equation_9():
    blocks = Blocks(block=32, stride=16, size=64, count=16, initial=1, local=2)
    overlap = np.asarray(blocks.overlap(jnp.arange(9, dtype=jnp.int32)[None], 2))[0]
    np.testing.assert_array_equal(overlap[:, 0], [2, 2, 2, 1, 0, 0, 0, 0, 0])
    np.testing.assert_array_equal(overlap[:, 1], [0, 0, 0, 1, 2, 2, 2, 1, 0])


def test_the_state_keeps_a_block_for_every_stride():
    mixer = NativeSparseAttention(16, heads=4, kv_heads=2, window=5, **SIZES, local=1, rngs=nnx.Rngs(0))
    state = mixer.init_state(2, 40, jnp.float32)
    assert state.selected.entries.keys.shape == (2, 2, 40, 4)
    assert state.window.entries.keys.shape == (2, 2, 5, 4)
    assert state.compressed.keys.shape == (2, 2, 20, 4)
    assert state.recent.keys.shape == (2, 3, 2, 4)


def test_going_beyond_the_length_gives_nan_from_there_on():
    mixer = NativeSparseAttention(16, heads=4, kv_heads=2, window=5, **SIZES, local=1, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(mixer)
    step = jax.jit(lambda x, ctx, state: nnx.merge(graphdef, params)(x, ctx, state))
    state, finite = mixer.init_state(1, 3, jnp.float32), []
    for i in range(5):
        y, state = step(jnp.ones((1, 1, 16)), Context.full(1, 1, start=jnp.int32(i)), state)
        finite.append(bool(np.isfinite(y).all()))
    assert finite == [True, True, True, False, False]


@pytest.mark.parametrize(
    ('kwargs', 'message'),
    [
        ({'heads': 3}, 'heads is 3; it must divide dim, which is 16'),
        ({'heads': 4, 'kv_heads': 3}, 'kv_heads is 3; it must divide heads, which is 4'),
        ({'heads': 4, 'compressed_stride': 5}, 'compressed_stride is 5; it must divide compressed_block, which is 32'),
        ({'heads': 4, 'selected_block': 16}, 'selected_block is 16; expected at least compressed_block, which is 32'),
        ({'heads': 4, 'selected_blocks': 2}, 'selected_blocks is 2; expected at least initial [+] local'),
        ({'heads': 4, 'window': 0}, 'window of NativeSparseAttention is 0'),
    ],
)
def test_sizes_that_do_not_fit_are_named(kwargs: dict, message: str):
    with pytest.raises(UserError, match=message):
        NativeSparseAttention(16, **kwargs, rngs=nnx.Rngs(0))
