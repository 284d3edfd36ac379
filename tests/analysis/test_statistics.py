"""Statistics of attention, activations and rounding, on constructed cases with known answers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.analysis import statistics
from attnlab.context import Context
from attnlab.mixers.softmax.attention import Attention
from attnlab.testing.contract import context

UNIFORM = jnp.tril(jnp.ones((4, 4))) / jnp.arange(1, 5)[:, None]


def masses(weights, segments):
    segments = jnp.array([segments])
    causal = jnp.tril(jnp.ones((1, segments.shape[1], segments.shape[1]), bool))
    return statistics.sink_mass(weights, (segments[:, :, None] == segments[:, None, :]) & causal, segments)[0]


def test_sink_mass_and_rate():
    on_first = jnp.zeros((4, 4)).at[:, 0].set(1)
    mass = masses(jnp.stack([on_first, UNIFORM, jnp.eye(4)])[None], [1, 1, 1, 1])
    uniform = 1 + 1 / 2 + 1 / 3 + 1 / 4
    np.testing.assert_allclose(mass, [1, 0, (1 - uniform) / (4 - uniform)], atol=1e-6)
    np.testing.assert_allclose(statistics.sink_rate(mass), 1 / 3, rtol=1e-6)
    np.testing.assert_allclose(statistics.sink_rate(jnp.array([0.5, jnp.nan])), 1)


def test_a_sink_is_counted_by_document_and_without_padding():
    """Uniform weights are no sink however short the documents; what padding attends to says nothing."""
    segments = [1] * 6 + [2] * 2 + [3] + [0] * 5
    same = np.equal.outer(segments, segments) & np.tri(14, dtype=bool)
    uniform = jnp.asarray(same / same.sum(1, keepdims=True), jnp.float32)
    np.testing.assert_allclose(masses(uniform[None, None], segments), [0], atol=1e-6)
    # The first document sinks, the second does not, the third is one token: the mean over the two, not over tokens.
    sinking = uniform.at[:6].set(0).at[:6, 0].set(1)
    np.testing.assert_allclose(masses(sinking[None, None], segments), [0.5], atol=1e-6)
    np.testing.assert_allclose(masses(sinking.at[9:, 9].set(7.0)[None, None], segments), [0.5], atol=1e-6)


def test_entropy():
    np.testing.assert_allclose(statistics.entropy(UNIFORM), np.log([1, 2, 3, 4]), rtol=1e-6, atol=1e-7)
    # Weights need not add up to one, nor be positive; a row of zeros has none.
    np.testing.assert_allclose(statistics.entropy(jnp.array([[3.0, -3.0], [0.0, 0.0]])), [np.log(2), 0], atol=1e-6)


def test_sparsity_counts_visible_keys_alone():
    visible = jnp.tril(jnp.ones((4, 4), bool))
    assert statistics.sparsity(UNIFORM, visible) == 0
    np.testing.assert_allclose(statistics.sparsity(jnp.eye(4), visible), 6 / 10)


def test_kurtosis():
    # Plus and minus one in equal parts: fourth moment 1, unbiased variance n / (n - 1).
    coin = jnp.tile(jnp.array([1.0, -1.0]), 8)
    np.testing.assert_allclose(statistics.kurtosis(coin), (15 / 16) ** 2, rtol=1e-5)
    gaussian = jax.random.normal(jax.random.key(0), (100_000,))
    np.testing.assert_allclose(statistics.kurtosis(gaussian), 3, rtol=0.05)
    outlier = jnp.zeros(100).at[3].set(50.0)
    np.testing.assert_allclose(statistics.kurtosis(outlier), statistics.kurtosis(-3 * outlier), rtol=1e-4)
    assert statistics.kurtosis(outlier) > 90


@pytest.mark.parametrize(
    'options', [{}, {'window': 3, 'sinks': 1}, {'causal': False}, {'causal': False, 'window': 2}], ids=str
)
def test_the_weights_of_attention_are_those_it_mixes_with(options):
    mixer = Attention(16, heads=4, kv_heads=2, rngs=nnx.Rngs(0), **options)
    x = jax.random.normal(jax.random.key(2), (2, 6, 16))
    ctx = Context.full(2, 6) if 'sinks' in options else context(((1, 3), (2, 3)), ((1, 1), (2, 5)))
    weights, visible = mixer.read_weights(x, ctx)
    values = jnp.repeat(mixer.value(x).reshape(2, 6, 2, 4), 2, axis=2)
    y = mixer.output(jnp.einsum('b h t s, b s h v -> b t h v', weights, values).reshape(2, 6, 16))
    np.testing.assert_allclose(y, mixer(x, ctx)[0], atol=1e-5)
    np.testing.assert_array_equal(weights > 0, jnp.broadcast_to(visible[:, None], weights.shape))
    np.testing.assert_allclose(jnp.sum(weights, axis=-1), 1, rtol=1e-5)
