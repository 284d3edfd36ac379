"""Gated attention units against their equations, in numpy float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy.special import expit, softmax

import attnlab
from attnlab.context import Context
from attnlab.functional.rotary import rotate
from attnlab.mixers.softmax.gated_unit import GatedAttentionUnit, Mega
from attnlab.testing.noise import noise, perturbed
from pallas_kernels import Softmax, SquaredRelu

DIM, LENGTH = 4, 9


def numbers(parameter) -> np.ndarray:
    return np.asarray(parameter[...], np.float64)


def linear(module, x: np.ndarray) -> np.ndarray:
    return x @ numbers(module.weight) + (0 if module.bias is None else numbers(module.bias))


def silu(x: np.ndarray) -> np.ndarray:
    return x * expit(x)


def heads(module, z: np.ndarray) -> np.ndarray:
    """Queries and keys, rotated."""
    both = z[None] * numbers(module.gain)[:, None] + numbers(module.offset)[:, None]
    places = jnp.arange(len(z))[None]
    return np.stack([np.asarray(rotate(jnp.asarray(x)[None, :, None], places, base=10000.0))[0, :, 0] for x in both])


@pytest.mark.parametrize('causal', [True, False])
def test_gau_is_that_of_the_paper(causal):
    with jax.enable_x64(True):
        mixer = perturbed(attnlab.make_mixer('gau', DIM, key_dim=6, length=3, causal=causal, rngs=nnx.Rngs(0)))
        assert isinstance(mixer, GatedAttentionUnit)
        assert all(linear.bias is not None for linear in (mixer.input, mixer.output))
        x = noise(1, LENGTH, DIM, dtype=jnp.float64)
        y, _ = jax.jit(mixer)(x, Context.full(1, LENGTH))
        gate, v, z = np.split(silu(linear(mixer.input, np.asarray(x[0]))), (2 * DIM, 4 * DIM), axis=-1)
        q, k = heads(mixer.heads, z)
        weights = np.maximum(q @ k.T / 3, 0) ** 2
        weights = np.tril(weights) if causal else weights
        np.testing.assert_allclose(y[0], linear(mixer.output, gate * (weights @ v)), rtol=1e-9, atol=1e-9)


def start(name: str, length: int, seed: int, **arguments) -> tuple[float, float]:
    """The root mean square of the first outputs, and the least of those of gradients of gains, offsets and maps."""
    mixer = attnlab.make_mixer(name, 64, rngs=nnx.Rngs(seed), **arguments)
    x, ctx, wanted = noise(1, length, 64), Context.full(1, length), noise(1, length, 64, seed=1) / 8

    @jax.jit
    def found(mixer):
        gradients = jax.grad(lambda mixer: jnp.mean(jnp.sum(mixer(x, ctx)[0] * wanted, axis=-1)))(mixer)
        leaves = (mixer(x, ctx)[0], *(leaf for leaf in jax.tree.leaves(nnx.state(gradients)) if leaf.ndim == 2))
        output, *sizes = (jnp.sqrt(jnp.mean(jnp.square(leaf))) for leaf in leaves)
        return output, jnp.min(jnp.stack(sizes))

    return tuple(map(float, found(mixer)))


@pytest.mark.parametrize(
    ('name', 'arguments', 'least'),
    [
        ('gau', {}, 1e-7),
        ('gau', {'position': None}, 1e-7),
        ('flash', {}, 1e-7),
        ('flash', {'position': None}, 1e-7),
        ('mega', {'weights': SquaredRelu()}, 1e-7),
        ('seqboat', {'weights': SquaredRelu()}, 1e-8),
    ],
)
def test_products_of_offsets_are_a_bias_that_units_start_with(name, arguments, least):
    """Without it weights were 1e-12, outputs of gau 1e-10 and gradients 1e-12, where Adam adds 1e-8 to their size."""
    outputs, gradients = np.array([start(name, 1024, seed, **arguments) for seed in range(3)]).T
    assert np.median(outputs) > 1e-4 and np.median(gradients) > least


def test_no_unit_starts_silent_on_short_rows():
    """The product of a token with itself is positive; of free draws one in twelve was below zero at all distances."""
    for seed in range(20):
        mixer = GatedAttentionUnit(DIM, length=64, rngs=nnx.Rngs(seed))
        q, k = numbers(mixer.heads.offset)
        assert q @ k > 0 and 0.1 < q.std() < 0.22 and 0.1 < k.std() < 0.22  # 0.02 sqrt(64)
    assert not np.any(numbers(Mega(DIM, rngs=nnx.Rngs(0)).heads.offset))


@pytest.mark.parametrize('weights', [Softmax(), SquaredRelu()])
@pytest.mark.parametrize('chunk', [4, pytest.param(None, marks=pytest.mark.slow)])
def test_mega_is_that_of_the_paper(chunk, weights):
    """And its squared rectifier that of the released code, whose products are divided by the number of visible keys."""
    with jax.enable_x64(True):
        mixer = perturbed(Mega(DIM, key_dim=6, value_dim=5, state=3, chunk=chunk, weights=weights, rngs=nnx.Rngs(0)))
        x = noise(1, LENGTH, DIM, dtype=jnp.float64)
        y, _ = jax.jit(mixer)(x, Context.full(1, LENGTH))
        u = np.asarray(x[0])
        taken, damped = expit(numbers(mixer.average.decay)), expit(numbers(mixer.average.damping))
        h, average = np.zeros((DIM, 3)), []
        for t in range(LENGTH):
            h = taken * numbers(mixer.average.input) * u[t][:, None] + (1 - taken * damped) * h
            average.append((numbers(mixer.average.output) * h).sum(-1) / np.sqrt(3))
        m = silu(np.asarray(average) + numbers(mixer.direct) * u)
        update, z, r, own = np.split(linear(mixer.mixed, m), (DIM, DIM + 6, DIM + 11), axis=-1)
        q, k = heads(mixer.heads, silu(z))
        places = np.arange(LENGTH)
        seen = places[:, None] >= places
        if chunk is not None:
            seen &= places[:, None] // chunk == places // chunk
        if weights == Softmax():
            weighed = softmax(np.where(seen, q @ k.T / np.sqrt(6), -np.inf), axis=-1)
        else:
            weighed = np.where(seen, np.maximum(q @ k.T / seen.sum(axis=1, keepdims=True), 0) ** 2, 0)
        read = linear(mixer.output, silu(r) * (weighed @ silu(linear(mixer.value, u))))
        np.testing.assert_allclose(y[0], expit(update) * (silu(own + read) - u), rtol=1e-9, atol=1e-9)


def test_what_sets_the_average_is_of_the_group_dynamics_and_starts_as_in_the_paper():
    mixer = Mega(64, rngs=nnx.Rngs(0))
    assert {p.get_metadata()['group'] for p in (mixer.average.decay, mixer.average.damping)} == {'dynamics'}
    assert 0.15 < np.std(numbers(mixer.average.decay)) < 0.25
    np.testing.assert_allclose(numbers(mixer.average.input)[:, :2].mean(0), [1, -1], atol=0.02)
    assert mixer.init_state(1, 1000, jnp.float32).cache.entries.keys.shape == (1, 1, 128, 64)
