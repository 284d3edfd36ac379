"""Selective attention against numbers worked out by hand, and where it is softmax attention."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.functional.attend import look
from attnlab.functional.cache import Entries
from attnlab.functional.reach import Reach
from attnlab.mixers.softmax.attention import Attention
from attnlab.mixers.softmax.selective import SelectiveAttention, accumulated, selections
from attnlab.nn.positions import Rope
from attnlab.testing.contract import context
from attnlab.testing.noise import noise
from attnlab.testing.tolerances import assert_close


def selective(dim=16, heads=4, **kwargs) -> SelectiveAttention:
    return SelectiveAttention(dim, heads=heads, rngs=nnx.Rngs(0), **kwargs)


def transparent() -> SelectiveAttention:
    """One head of one channel: a token is its own query, key and value, so that scores are products of tokens."""
    mixer = selective(1, 1)
    for linear in (mixer.query, mixer.key, mixer.value, mixer.output):
        linear.weight[...] = jnp.ones((1, 1))
    return mixer


def column(*tokens: float) -> jax.Array:
    return jnp.asarray(tokens, jnp.float32)[None, :, None]


@functools.partial(jax.jit, static_argnums=0)
def apply(graphdef, params, x, ctx, state=None):
    return nnx.merge(graphdef, params)(x, ctx, state)


@functools.partial(jax.jit, static_argnums=0)
def read_mask(graphdef, params, x, ctx):
    mixer = nnx.merge(graphdef, params)
    q, k = (linear(x).reshape(*x.shape[:2], -1, mixer.key_dim) for linear in (mixer.query, mixer.key))
    view = look(Entries(k, k, ctx.segments_or_ones()), ctx, Reach())
    return accumulated(selections(q[:, :, 0], k[:, :, 0], view.queries, view.keys), jnp.zeros(x.shape[:2]))[0]


def run(mixer: nnx.Module, x: jax.Array) -> np.ndarray:
    return np.asarray(apply(*nnx.split(mixer), x, Context.full(*x.shape[:2]))[0])


def mask(mixer: SelectiveAttention, x: jax.Array, ctx: Context | None = None) -> np.ndarray:
    ctx = Context.full(*x.shape[:2]) if ctx is None else ctx
    return np.asarray(read_mask(*nnx.split(mixer), x, ctx))


def test_the_mask_by_hand():
    # Tokens select earlier ones with their product where positive: never the first, never themselves, and not at once.
    found = mask(transparent(), column(1, 2, 3, -1, 0.5))[0]
    expected = np.zeros((5, 5))
    expected[3, 1] = expected[4, 1] = 2 * 3
    # Token 3 is negative and selects none of the two; token 4 would select both, were there a token after it.
    np.testing.assert_allclose(found, expected)
    longer = mask(transparent(), column(1, 2, 3, -1, 0.5, 7))[0]
    np.testing.assert_allclose(longer[5], [0, 6 + 1, 1.5, 0, 0, 0])


def test_the_output_by_hand():
    x = column(0.5, 1, 2, 1)
    y = run(transparent(), x)[0, :, 0]
    # The last token's scores are 0.5, 1, 2 and 1; token 2 has masked token 1 by 2.
    weights = np.exp([0.5, 1 - 2, 2, 1])
    np.testing.assert_allclose(y[3], weights @ [0.5, 1, 2, 1] / weights.sum(), rtol=1e-6)
    # Token 2 itself still sees token 1 whole.
    weights = np.exp([1, 2, 4])
    np.testing.assert_allclose(y[2], weights @ [0.5, 1, 2] / weights.sum(), rtol=1e-6)


def test_the_first_head_masks_for_all():
    mixer = selective(kv_heads=2)
    x = np.asarray(noise(1, 7, 16), np.float64)[0]
    q, k, v = (
        (x @ np.asarray(linear.weight[...], np.float64)).reshape(7, -1, 4)
        for linear in (mixer.query, mixer.key, mixer.value)
    )
    scores = np.einsum('thk,shk->hts', q, np.repeat(k, 2, axis=1)) / 2
    below = np.tril(np.ones((7, 7)), -1)
    below[:, 0] = 0
    selected = np.maximum(scores[0], 0) * below
    masked = np.cumsum(selected, axis=0) - selected
    assert masked.max() > 0.5
    weights = np.exp(scores - masked) * np.tril(np.ones((7, 7)))
    weights /= weights.sum(axis=2, keepdims=True)
    read = np.einsum('hts,shv->thv', weights, np.repeat(v, 2, axis=1)).reshape(7, 16)
    expected = read @ np.asarray(mixer.output.weight[...], np.float64)
    actual = run(mixer, jnp.asarray(x[None], jnp.float32))
    assert_close(actual[0], expected, dtype=jnp.float32, reduction=16 * 7, what='y')


def test_where_the_first_head_selects_nothing_it_is_softmax_attention():
    mixer, plain = selective(position=Rope()), Attention(16, heads=4, position=Rope(), rngs=nnx.Rngs(0))
    for name in ('query', 'key', 'value', 'output'):
        getattr(plain, name).weight = getattr(mixer, name).weight
    x = jnp.abs(noise(2, 9, 16))
    assert np.abs(run(mixer, x) - run(plain, x)).max() > 1e-2
    # The first head's queries are positive and its keys negative, in the one pair of channels that does not turn much.
    slow = jnp.array([0.0, 1.0, 0.0, 0.0])
    mixer.query.weight[...] = mixer.query.weight[...].at[:, :4].set(jnp.ones((16, 1)) * slow[None])
    mixer.key.weight[...] = mixer.key.weight[...].at[:, :4].set(-jnp.ones((16, 1)) * slow[None])
    assert_close(run(mixer, x), run(plain, x), dtype=jnp.float32, reduction=16 * 9, what='y')


def test_documents_select_their_own_and_spare_their_first():
    mixer, x = selective(), noise(1, 12, 16)
    packed = context(((1, 5), (2, 7)))
    found = mask(mixer, x, packed)[0]
    assert not found[:, [0, 5]].any()
    np.testing.assert_allclose(found[:5, :5], mask(mixer, x[:, :5])[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found[5:, 5:], mask(mixer, x[:, 5:])[0], rtol=1e-5, atol=1e-6)
    # Keys of a document that is over are hidden; they keep the mask they had, to which other documents add nothing.
    np.testing.assert_array_equal(found[5:, :5], np.broadcast_to(found[5, :5], (7, 5)))
    assert not found[:5, 5:].any() and found[5:, 5:].any()


def test_the_state_holds_what_the_next_token_subtracts():
    mixer, x = selective(), noise(1, 8, 16)
    expected = mask(mixer, x)[0]
    state = mixer.init_state(1, 8, x.dtype)
    for start, stop in ((0, 3), (3, 4), (4, 7)):
        _, state = apply(*nnx.split(mixer), x[:, start:stop], Context.full(1, stop - start, start=start), state)
        np.testing.assert_allclose(state.mask[0], expected[stop], rtol=1e-5, atol=1e-6)
    assert state.cache.entries.keys.shape == state.cache.entries.values.shape == (1, 4, 8, 4)
    assert mixer.init_state(1, 8, jnp.bfloat16).mask.dtype == jnp.float32


def test_going_beyond_the_length_gives_nan():
    mixer, x = selective(), noise(1, 3, 16)
    state = mixer.init_state(1, 5, x.dtype)
    for start, finite in ((0, True), (3, False)):
        y, state = apply(*nnx.split(mixer), x, Context.full(1, 3, start=start), state)
        assert np.isfinite(y).all() == finite


def test_sizes_that_do_not_fit_are_named():
    with pytest.raises(UserError, match='heads is 5; it must divide dim, which is 16'):
        selective(heads=5)
    with pytest.raises(UserError, match='kv_heads is 3; it must divide heads, which is 4'):
        selective(kv_heads=3)
