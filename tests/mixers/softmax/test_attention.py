"""Attention against numbers worked out by hand, and its cache against the parallel form."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.functional.cache import empty_cache
from attnlab.mixers.softmax.attention import Attention, AttentionState
from attnlab.nn.positions import Alibi, Rope
from attnlab.testing.contract import context
from attnlab.testing.noise import noise
from attnlab.testing.tolerances import assert_close


def attention(dim=16, heads=4, **kwargs) -> Attention:
    return Attention(dim, heads=heads, rngs=nnx.Rngs(0), **kwargs)


def transparent(dim: int, *, uniform: bool = False, **kwargs) -> Attention:
    """One head whose projections are identities; when `uniform`, whose queries are zero, so that scores are equal."""
    mixer = attention(dim, heads=1, **kwargs)
    for linear in (mixer.query, mixer.key, mixer.value, mixer.output):
        linear.weight[...] = jnp.eye(dim)
    if uniform:
        mixer.query.weight[...] = jnp.zeros((dim, dim))
    return mixer


@functools.partial(jax.jit, static_argnums=0)
def apply(graphdef, params, x, ctx, state=None):
    return nnx.merge(graphdef, params)(x, ctx, state)


def run(mixer: Attention, x, ctx: Context | None = None) -> np.ndarray:
    x = jnp.asarray(x, jnp.float32)
    return np.asarray(apply(*nnx.split(mixer), x, Context.full(*x.shape[:2]) if ctx is None else ctx)[0])


def stream(mixer: Attention, x: jax.Array, pieces, state, ctx: Context | None = None):
    """The outputs of a stream cut into pieces, and the last state."""
    ctx = Context.full(*x.shape[:2]) if ctx is None else ctx
    outputs, start = [], 0
    for steps in pieces:
        part = slice(start, start + steps)
        segments = None if ctx.segments is None else ctx.segments[:, part]
        piece = dataclasses.replace(ctx, positions=ctx.positions[:, part], segments=segments)
        y, state = apply(*nnx.split(mixer), x[:, part], piece, state)
        outputs.append(y)
        start += steps
    return jnp.concatenate(outputs, axis=1), state


def test_two_tokens_by_hand():
    y = run(transparent(2), [[[1.0, 0.0], [0.0, 1.0]]])
    # The second token's scores are 0 and 1 / sqrt(2).
    own = math.exp(2**-0.5) / (1 + math.exp(2**-0.5))
    np.testing.assert_allclose(y, [[[1.0, 0.0], [1 - own, own]]], rtol=1e-6)


def test_rows_with_equal_scores_are_running_means():
    x = noise(2, 6, 3)
    expected = np.cumsum(x, axis=1) / np.arange(1, 7)[None, :, None]
    np.testing.assert_allclose(run(transparent(3, uniform=True), x), expected, rtol=1e-5, atol=1e-6)


def test_a_window_counts_the_query_itself():
    x = noise(1, 6, 3)
    np.testing.assert_allclose(run(transparent(3, uniform=True, window=1), x), x, rtol=1e-5)
    pairs = (x + jnp.pad(x, ((0, 0), (1, 0), (0, 0)))[:, :-1])[:, 1:] / 2
    np.testing.assert_allclose(run(transparent(3, uniform=True, window=2), x)[:, 1:], pairs, rtol=1e-5, atol=1e-6)


def test_sinks_stay_visible_outside_the_window():
    x = noise(1, 6, 3)
    y = run(transparent(3, uniform=True, window=2, sinks=1), x)
    np.testing.assert_allclose(y[0, 5], np.mean(x[0, [0, 4, 5]], axis=0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(y[0, 1], np.mean(x[0, [0, 1]], axis=0), rtol=1e-5, atol=1e-6)


def test_a_bidirectional_window_reaches_as_far_forward():
    x = noise(1, 6, 3)
    y = run(transparent(3, uniform=True, window=2, causal=False), x)
    np.testing.assert_allclose(y[0, 2], np.mean(x[0, 1:4], axis=0), rtol=1e-5, atol=1e-6)


def test_alibi_by_hand():
    y = run(transparent(3, uniform=True, position=Alibi()), x := noise(1, 4, 3))
    weights = np.exp(-(2.0**-8) * np.array([3, 2, 1, 0]))
    np.testing.assert_allclose(y[0, 3], weights @ x[0] / weights.sum(), rtol=1e-5, atol=1e-6)


def test_query_heads_read_neighbouring_groups():
    grouped = attention(kv_heads=2, position=Rope())
    full = attention(position=Rope())
    full.query.weight, full.output.weight = grouped.query.weight, grouped.output.weight
    for name in ('key', 'value'):
        heads = getattr(grouped, name).weight[...].reshape(16, 2, 4)
        getattr(full, name).weight[...] = jnp.repeat(heads, 2, axis=1).reshape(16, 16)
    x = noise(2, 9, 16)
    assert_close(run(grouped, x), run(full, x), dtype=jnp.float32, reduction=16 * 9, what='y')


def test_rotated_scores_depend_on_relative_positions_alone():
    mixer, x = attention(position=Rope()), noise(1, 9, 16)
    shifted = run(mixer, x, Context.full(1, 9, start=37))
    assert_close(shifted, run(mixer, x), dtype=jnp.float32, reduction=16 * 37, what='y')
    stretched = run(mixer, x, Context(positions=2 * jnp.arange(9, dtype=jnp.int32)[None]))
    assert np.abs(stretched - run(mixer, x)).max() > 1e-2


def test_without_positions_or_mask_the_order_of_tokens_is_lost():
    mixer, x = attention(causal=False), noise(1, 9, 16)
    order = np.random.default_rng(1).permutation(9)
    assert_close(run(mixer, x[:, order]), run(mixer, x)[:, order], dtype=jnp.float32, reduction=16 * 9, what='y')


@pytest.mark.parametrize(
    ('position', 'sinks'),
    [
        (None, 0),
        (Rope(), 2),
        *(pytest.param(*rest, marks=pytest.mark.slow) for rest in ((None, 2), (Rope(), 0), (Alibi(), 0), (Alibi(), 2))),
    ],
    ids=str,
)
def test_a_ring_gives_what_a_cache_that_forgets_nothing_gives(position: Rope | Alibi | None, sinks: int):
    mixer = attention(window=5, sinks=sinks, position=position)
    x = noise(2, 23, 16)
    ring = mixer.init_state(2, 23, x.dtype)
    whole = AttentionState(empty_cache(2, 23, kv_heads=4, key_dim=4, value_dim=4, dtype=x.dtype), ())
    assert ring.cache.entries.segments.shape == (2, 5 + sinks) and whole.cache.entries.segments.shape == (2, 23)
    for pieces in ((1,) * 23, (9, 1, 1, 9, 3), (3, 3, 1, 9, 3, 3, 1)):
        y, _ = stream(mixer, x, pieces, ring)
        expected, _ = stream(mixer, x, pieces, whole)
        assert_close(y, expected, dtype=x.dtype, reduction=16 * 23, what=f'{pieces}')
        assert_close(y, run(mixer, x), dtype=x.dtype, reduction=16 * 23, what=f'{pieces}')


def test_a_ring_remembers_documents():
    mixer, x = attention(window=5, position=Rope()), noise(1, 20, 16)
    ctx = context(((1, 7), (2, 2), (3, 11)))
    y, state = stream(mixer, x, (1, 3, 3, 1, 3, 9), mixer.init_state(1, 20, x.dtype), ctx)
    assert_close(y, run(mixer, x, ctx), dtype=x.dtype, reduction=16 * 20, what='y')
    assert int(state.cache.consumed) == 20


def test_a_window_bounds_the_state():
    def slots(length: int, **kwargs) -> int:
        return attention(**kwargs).init_state(1, length, jnp.float32).cache.entries.keys.shape[2]

    assert [slots(n) for n in (8, 80)] == [8, 80]
    assert [slots(n, window=20, sinks=4) for n in (8, 80, 800)] == [8, 24, 24]


def test_keys_and_values_are_as_wide_as_asked_and_in_the_type_asked_for():
    state = attention(kv_heads=2, key_dim=6, value_dim=3).init_state(2, 8, jnp.bfloat16)
    keys, values, segments = state.cache.entries
    assert keys.shape == (2, 2, 8, 6) and values.shape == (2, 2, 8, 3)
    assert keys.dtype == values.dtype == jnp.bfloat16
    assert segments.dtype == state.cache.consumed.dtype == jnp.int32


@pytest.mark.parametrize('kwargs', [{}, {'window': 20}], ids=['no_window', 'window_longer_than_the_cache'])
def test_going_beyond_the_length_gives_nan_from_there_on(kwargs: dict):
    mixer, x = attention(**kwargs), noise(1, 8, 16)
    y, state = stream(mixer, x, (3, 1, 1, 1, 1), mixer.init_state(1, 5, x.dtype))
    assert np.isfinite(y[:, :5]).all() and np.isnan(y[:, 5:]).all()
    y, _ = stream(mixer, x, (4, 3), mixer.init_state(1, 5, x.dtype))
    assert np.isfinite(y[:, :4]).all() and np.isnan(y[:, 4:]).all()
    with pytest.raises(UserError, match='8 tokens do not fit in a state of length 5'):
        mixer(x, Context.full(1, 8), state)


def test_a_ring_never_fills_up():
    mixer, x = attention(window=5), noise(1, 40, 16)
    y, _ = stream(mixer, x, (20, *(1,) * 20), mixer.init_state(1, 5, x.dtype))
    assert_close(y, run(mixer, x), dtype=x.dtype, reduction=16 * 40, what='y')


@pytest.mark.parametrize(
    ('kwargs', 'message'),
    [
        ({'heads': 5}, 'heads is 5; it must divide dim, which is 16'),
        ({'kv_heads': 3}, 'kv_heads is 3; it must divide heads, which is 4'),
        ({'sinks': 1}, 'sinks is 1 without a window'),
    ],
)
def test_sizes_that_do_not_fit_are_named(kwargs: dict, message: str):
    with pytest.raises(UserError, match=message):
        attention(**kwargs)


def test_an_odd_number_of_channels_cannot_be_rotated():
    with pytest.raises(UserError, match='3 channels'):
        attention(key_dim=3, position=Rope())


def test_bidirectional_attention_has_no_state():
    with pytest.raises(UserError, match='Attention was made with causal=False; a bidirectional mixer cannot be'):
        attention(causal=False).init_state(1, 8, jnp.float32)


def test_sinks_and_documents_exclude_each_other():
    with pytest.raises(UserError, match='sinks'):
        run(attention(window=5, sinks=1), noise(1, 8, 16), context(((1, 5), (2, 3))))
