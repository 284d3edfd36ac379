"""Differential attention against its equations written out, and where it is softmax attention or nothing."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.mixers.softmax.attention import Attention
from attnlab.mixers.softmax.differential import DifferentialAttention
from attnlab.nn.norms import RMSNorm
from attnlab.nn.positions import Rope
from attnlab.testing.noise import noise
from attnlab.testing.tolerances import assert_close


def differential(dim=16, heads=4, **kwargs) -> DifferentialAttention:
    return DifferentialAttention(dim, heads=heads, rngs=nnx.Rngs(0), **kwargs)


@functools.partial(jax.jit, static_argnums=0)
def apply(graphdef, params, x, ctx, state=None):
    return nnx.merge(graphdef, params)(x, ctx, state)


def run(mixer: nnx.Module, x) -> np.ndarray:
    x = jnp.asarray(x, jnp.float32)
    return np.asarray(apply(*nnx.split(mixer), x, Context.full(*x.shape[:2]))[0])


def set_mix(mixer: DifferentialAttention, mix: float) -> None:
    """Sets the vectors so that `mix` times the second map is subtracted."""
    exponent = math.log(1 + mixer.lambda_init - mix)
    mixer.lambdas[...] = jnp.zeros((4, mixer.key_dim)).at[2:, 0].set(jnp.array([1.0, exponent]))


def parameters(mixer: nnx.Module) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(mixer, nnx.Param)))


def test_the_equations_of_the_paper_written_out():
    # Two pairs of query heads read one pair of keys and one value, without positions.
    mixer = differential(kv_heads=2, norm=functools.partial(RMSNorm, eps=1e-5))
    mixer.norm.scale[...] = jnp.linspace(0.5, 1.5, 8)
    x = np.asarray(noise(1, 5, 16), np.float64)[0]
    weight = {name: np.asarray(getattr(mixer, name).weight[...], np.float64) for name in ('query', 'key', 'value')}
    q, k = (x @ weight['query']).reshape(5, 4, 4), (x @ weight['key']).reshape(5, 2, 4)
    a, b, c, d = np.asarray(mixer.lambdas[...], np.float64)
    mix = np.exp(a @ b) - np.exp(c @ d) + 0.8
    heads = []
    for pair in range(2):
        maps = []
        for which in range(2):
            weights = np.exp(q[:, 2 * pair + which] @ k[:, which].T / 2) * np.tril(np.ones((5, 5)))
            maps.append(weights / weights.sum(axis=1, keepdims=True))
        read = (maps[0] - mix * maps[1]) @ (x @ weight['value'])
        normed = read / np.sqrt(np.mean(read**2, axis=1, keepdims=True) + 1e-5) * np.linspace(0.5, 1.5, 8)
        heads.append(0.2 * normed)
    expected = np.concatenate(heads, axis=1) @ np.asarray(mixer.output.weight[...], np.float64)
    assert_close(run(mixer, x[None])[0], expected, dtype=jnp.float32, reduction=16 * 5, what='y')


def test_two_tokens_by_hand():
    mixer = differential(2, 2)
    # One pair of one channel: the first head's scores are the products of the tokens' first channels, the second's 0.
    for linear in (mixer.query, mixer.key):
        linear.weight[...] = jnp.diag(jnp.array([1.0, 0.0]))
    mixer.value.weight[...] = mixer.output.weight[...] = jnp.eye(2)
    set_mix(mixer, 0.5)
    y = run(mixer, [[[1.0, 0.0], [2.0, 1.0]]])
    first = 1 / (1 + math.exp(2))  # exp(2) against exp(4)
    weights = np.array([first - 0.25, 1 - first - 0.25])
    np.testing.assert_allclose(y[0], [[0.5, 0.0], weights @ [[1.0, 0.0], [2.0, 1.0]]], rtol=1e-5)


def test_with_nothing_subtracted_it_is_softmax_attention_with_the_first_heads():
    mixer, x = differential(position=Rope(interleaved=True)), noise(2, 9, 16)
    set_mix(mixer, 0.0)
    plain = Attention(16, heads=2, key_dim=4, value_dim=8, position=Rope(interleaved=True), rngs=nnx.Rngs(0))
    plain.value.weight, plain.output.weight = mixer.value.weight, mixer.output.weight
    for name in ('query', 'key'):
        firsts = getattr(mixer, name).weight[...].reshape(16, 2, 2, 4)[:, :, 0]
        getattr(plain, name).weight[...] = firsts.reshape(16, 8)
    assert_close(run(mixer, x), run(plain, x), dtype=jnp.float32, reduction=16 * 9, what='y')


def test_what_two_equal_maps_have_in_common_cancels():
    mixer = differential()
    set_mix(mixer, 1.0)
    for linear in (mixer.query, mixer.key):
        pairs = linear.weight[...].reshape(16, 2, 2, 4)
        linear.weight[...] = pairs.at[:, :, 1].set(pairs[:, :, 0]).reshape(16, 16)
    np.testing.assert_allclose(run(mixer, noise(1, 6, 16)), 0, atol=1e-6)


def test_the_factor_starts_near_lambda_init():
    # The vectors are small: each product of two has a standard deviation of 0.01 sqrt(64).
    mixer = differential(256, 4, lambda_init=0.35)
    assert abs(float(mixer.mix()) - 0.35) < 0.5
    assert 0.09 < float(jnp.std(mixer.lambdas[...])) < 0.11
    mixer.lambdas[...] = jnp.zeros((4, 64))
    np.testing.assert_allclose(float(mixer.mix()), 0.35, rtol=1e-6)


def test_every_pair_has_the_size_the_norm_gives_it():
    mixer = differential(norm=RMSNorm, lambda_init=0.3)
    mixer.output.weight[...] = jnp.eye(16)
    pairs = run(mixer, noise(1, 6, 16)).reshape(6, 2, 8)
    np.testing.assert_allclose(np.sqrt(np.mean(pairs**2, axis=-1)), 0.7, rtol=1e-4)


def test_parameters_and_cache_are_those_of_softmax_attention_but_for_the_vectors():
    mixer, plain = differential(norm=RMSNorm), Attention(16, heads=4, rngs=nnx.Rngs(0))
    assert parameters(mixer) == parameters(plain) + 4 * 4 + 8
    state = mixer.init_state(2, 3, jnp.bfloat16)
    assert state.entries.keys.size == state.entries.values.size == 2 * 3 * 16
    assert state.entries.keys.dtype == jnp.bfloat16


def test_going_beyond_the_length_gives_nan():
    mixer, x = differential(), noise(1, 3, 16)
    y, state = apply(*nnx.split(mixer), x, Context.full(1, 3), mixer.init_state(1, 5, x.dtype))
    assert np.isfinite(y).all()
    y, _ = apply(*nnx.split(mixer), x, Context.full(1, 3, start=3), state)
    assert np.isnan(y).all()


@pytest.mark.parametrize(
    ('kwargs', 'message'),
    [
        ({'heads': 3}, 'heads is 3; they come in pairs'),
        ({'kv_heads': 1}, 'kv_heads is 1; they come in pairs, so it must be even'),
        ({'kv_heads': 6}, 'kv_heads is 6; it must divide heads, which is 4'),
        ({'heads': 6}, 'heads is 6; it must divide dim, which is 16'),
    ],
)
def test_sizes_that_do_not_fit_are_named(kwargs: dict, message: str):
    with pytest.raises(UserError, match=message):
        differential(**kwargs)


def test_bidirectional_attention_has_no_state():
    with pytest.raises(UserError, match='cannot be streamed'):
        differential(causal=False).init_state(1, 8, jnp.float32)
