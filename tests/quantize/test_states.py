"""States of few bits against their definition, written as a loop in numpy; and what they cost in accuracy."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.blocks.block import Block
from attnlab.blocks.unified import UnifiedBlocks
from attnlab.config import build
from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.mixers.softmax.attention import Attention
from attnlab.models.stack import Stack
from attnlab.nn.positions import Rope
from attnlab.quantize.formats import NAMES, Affine, Format, MinMax, Symmetric, format_called
from attnlab.quantize.layers import Quantization
from attnlab.quantize.states import KIVI, StoredCache, StoredState, state_called
from attnlab.testing.contract import cast_parameters
from attnlab.zoo import ZOO

LENGTH, DIM = 11, 16


def made(name):
    (config,) = ZOO[name].reduced(heads=2)
    return cast_parameters(build(config)(DIM, rngs=nnx.Rngs(0)), jnp.float64)


def draw(length=LENGTH):
    return jnp.asarray(np.random.default_rng(1).standard_normal((2, length, DIM)))


def in_pieces(mixer, x, pieces):
    """What a mixer makes of pieces of a sequence, one program for those of one length."""
    graphdef, params = nnx.split(mixer)
    run = jax.jit(lambda params, *inputs: nnx.merge(graphdef, params)(*inputs))
    state, found, start = mixer.init_state(len(x), x.shape[1], x.dtype), [], 0
    for steps in pieces:
        ctx = Context.full(len(x), steps, start=jnp.int32(start))
        y, state = run(params, x[:, start : start + steps], ctx, state)
        found.append(y)
        start += steps
    return np.concatenate(found, axis=1), state


@pytest.mark.parametrize(
    'name', ['retnet', *(pytest.param(each, marks=pytest.mark.slow) for each in ('mingru', 's4d', 'kda', 'mamba2'))]
)
def test_a_state_is_rounded_after_every_token(name):
    with jax.enable_x64(True):
        mixer, x, form = made(name), draw(), Symmetric(4)
        step = jax.jit(lambda x, ctx, state: mixer(x, ctx, state))
        state, expected = mixer.init_state(2, LENGTH, x.dtype), []
        for place in range(LENGTH):
            y, state = step(x[:, place : place + 1], Context.full(2, 1, start=jnp.int32(place)), state)
            expected.append(y)

            def rounded(leaf):
                if leaf.ndim < 2 or not leaf.size or not jnp.issubdtype(leaf.dtype, jnp.inexact):
                    return leaf
                if jnp.iscomplexobj(leaf):
                    return form.rounded(leaf.real) + 1j * form.rounded(leaf.imag)
                return form.rounded(leaf)

            state = jax.tree.map(rounded, state)
        expected = np.concatenate(expected, axis=1)
        stored = StoredState(mixer, form)
        found, kept = in_pieces(stored, x, (4, 1, 6))
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(stored(x, Context.full(2, LENGTH))[0], expected, rtol=1e-9, atol=1e-12)
        plain = mixer(x, Context.full(2, LENGTH))[0]
        assert np.abs(expected - plain).max() > 1e-3 * np.abs(plain).max()
        assert any(leaf.dtype == np.uint8 for leaf in jax.tree.leaves(kept))


def test_bits_of_a_state_and_what_they_cost():
    (config,) = ZOO['retnet'].reduced(heads=2)
    mixer = build(config)(DIM, rngs=nnx.Rngs(0))
    x = jnp.asarray(draw(24), jnp.float32)
    plain = mixer(x, Context.full(2, 24))[0]
    errors, sizes = [], []
    for bits in (2, 4, 8):
        stored = StoredState(mixer, Affine(bits))
        sizes.append(sum(leaf.nbytes for leaf in jax.tree.leaves(stored.init_state(1, 24, jnp.float32))))
        y = jax.jit(lambda x, stored=stored: stored(x, Context.full(2, 24))[0])(x)
        errors.append(float(jnp.linalg.norm(y - plain) / jnp.linalg.norm(plain)))
    assert sizes[0] < sizes[1] < sizes[2]
    # A bit halves the step. Errors are those of every step, which the state adds up.
    assert errors[2] < 0.05 and 4 * errors[2] < errors[1] and 1.2 * errors[1] < errors[0]


def softmax(scores):
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def by_definition(attention, x, how):
    """KIVI, from the keys and values that a plain cache holds at the end."""
    _, state = attention(x, Context.full(len(x), x.shape[1]), attention.init_state(len(x), x.shape[1], x.dtype))
    keys, values = (np.asarray(each) for each in state.cache.entries[:2])
    q = attention.query(x).reshape(*x.shape[:2], attention.heads, attention.key_dim)
    q = np.asarray(attention.position.rotate(q, Context.full(*x.shape[:2]).positions))
    few = MinMax(how.bits, scales=how.scales)
    outputs = []
    for now in range(x.shape[1]):
        k, v = keys[:, :, : now + 1].copy(), values[:, :, : now + 1].copy()
        for start in range(0, now // how.window * how.window, how.group):
            tokens = slice(start, start + how.group)
            k[:, :, tokens] = np.swapaxes(few.rounded(jnp.asarray(np.swapaxes(k[:, :, tokens], 2, 3))), 2, 3)
        for token in range(max(now - how.window, 0)):
            for start in range(0, v.shape[3], how.group):
                part = slice(start, start + how.group)
                v[:, :, token, part] = few.rounded(jnp.asarray(v[:, :, token, part]))
        k, v = (np.repeat(each, attention.heads // attention.kv_heads, axis=1) for each in (k, v))
        weights = softmax(np.einsum('bhk,bhsk->bhs', q[:, now], k) / np.sqrt(attention.key_dim))
        outputs.append(np.einsum('bhs,bhsv->bhv', weights, v).reshape(len(x), -1))
    return np.asarray(attention.output(jnp.asarray(np.stack(outputs, axis=1))))


def test_a_cache_of_keys_by_channel_and_values_by_token():
    with jax.enable_x64(True):
        how = KIVI(2, group=4, window=4, scales='float32')
        attention = Attention(DIM, heads=4, kv_heads=2, position=Rope(), rngs=nnx.Rngs(0))
        attention = cast_parameters(attention, jnp.float64)
        x = draw(14)
        expected = by_definition(attention, x, how)
        stored = StoredCache(attention, how)
        found, _ = in_pieces(stored, x, (6, 1, 1, 6))
        np.testing.assert_allclose(found, expected, rtol=1e-7, atol=1e-9)
        plain = np.asarray(attention(x, Context.full(2, 14))[0])
        # Whole until the window is full, and not afterwards.
        np.testing.assert_allclose(found[:, :4], plain[:, :4], rtol=1e-7, atol=1e-9)
        assert np.abs(found[:, 5:] - plain[:, 5:]).max() > 1e-2
        beyond, _ = stored(x[:, :1], Context.full(2, 1), in_pieces(stored, x, (14,))[1])
        assert np.all(np.isnan(beyond))


def test_a_cache_of_two_bits_takes_a_fraction():
    attention = Attention(64, heads=1, rngs=nnx.Rngs(0))

    def size(mixer):
        state = jax.eval_shape(lambda: mixer.init_state(1, 4096, jnp.bfloat16))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))

    whole, stored = size(attention), size(StoredCache(attention, KIVI(2)))
    # Of 128 numbers a token in 16 bits: 2 bits, and 32 bits a group of 32, make 3; with a window of 128 of 4096.
    assert whole == 4096 * (128 * 2 + 4) + 4
    assert stored == 4096 * (128 * 3 // 8 + 4) + 128 * 128 * 2 + 4


def test_formats_of_states_have_names_and_refuse_what_they_cannot_store():
    assert state_called('kivi4') == KIVI(4) and state_called('kivi2@64') == KIVI(2, group=64)
    assert state_called('int8') == Symmetric(8)
    with pytest.raises(UserError, match='must have 2 to 8 bits and a window that is a multiple of the group'):
        KIVI(2, group=32, window=40)
    with pytest.raises(UserError, match='KIVI stores that of full attention'):
        StoredCache(Attention(DIM, heads=2, window=4, rngs=nnx.Rngs(0)), KIVI())
    with pytest.raises(UserError, match='no block of this model has a state that KIVI stores'):
        Quantization(state=KIVI())(Attention(DIM, heads=2, rngs=nnx.Rngs(0)))
    block = functools.partial(Block, mixer=functools.partial(Attention, heads=2))
    unified = functools.partial(UnifiedBlocks, heads=2, layers=2)
    stack = Stack(DIM, depth=2, blocks=(block, unified), rngs=nnx.Rngs(0))
    for how in (KIVI(), Symmetric(8)):
        with pytest.raises(UserError, match='layers of this model are UnifiedBlocks, whose states are not stored'):
            Quantization(state=how)(stack)


OF_FAMILIES = (
    *('int4', 'int8@32', 'affine4', 'minmax3', 'log4', 'logsqrt4', 'adalog4', 'e4m3', 'e2m1@tensor', 'adae4m3'),
    *('mxe2m1', 'higgs4', 'higgs3x2', 'higgs2x4'),
)
"""A format or two of every family of names that something is stored in."""


@pytest.mark.parametrize('name', OF_FAMILIES)
def test_states_are_stored_in_formats_that_give_again_what_they_gave(name):
    """As after every token a state is stored again."""
    x = jnp.asarray(np.random.default_rng(3).standard_normal((8, 96)), jnp.float32)
    rounded = jax.jit(format_called(name).rounded)
    once = again = rounded(x)
    for _ in range(64):
        again = rounded(again)
    apart = float(jnp.max(jnp.abs(again - once)))
    if format_called(name).stable:
        assert isinstance(state_called(name), Format) and apart < 1e-5
    else:
        assert apart > 0.1
        with pytest.raises(
            UserError, match=f"'{name}' is no format of states: its codes change when a state is stored"
        ):
            state_called(name)


def test_every_family_of_formats_is_tried():
    for pattern in NAMES:
        # What rounds activations alone is refused before.
        found = [name for name in OF_FAMILIES if re.fullmatch(pattern, name.partition('@')[0])]
        assert found or pattern.startswith('cross')


def test_numbers_of_half_the_bits_are_rounded_in_float32():
    x = jnp.asarray(np.random.default_rng(2).standard_normal((4, 64)) + 3, jnp.bfloat16)
    for form in (Affine(8), MinMax(8), Symmetric(8)):
        expected = form.rounded(x.astype(jnp.float32)).astype(jnp.bfloat16)
        np.testing.assert_array_equal(form.rounded(x), expected)
        # Half a step, and half of the last bit that bfloat16 has near 6.
        limit = float(jnp.max(jnp.abs(x))) / 127 / 2 + 2.0**-6
        assert float(jnp.max(jnp.abs(form.rounded(x) - x).astype(jnp.float32))) <= limit
