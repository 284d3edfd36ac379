"""Sparse activation against its equations, in numpy float64, and what a capacity leaves active."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy.special import expit, softmax

from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.functional.rotary import rotate
from attnlab.mixers.softmax.sparse_unit import SparseGatedUnit
from attnlab.testing.noise import noise, perturbed
from pallas_kernels import Softmax, SquaredRelu

DIM, LENGTH, WINDOW = 4, 23, 3


def make(**sizes) -> SparseGatedUnit:
    sizes = {'key_dim': 6, 'value_dim': 5, 'state': 3, 'window': WINDOW, **sizes}
    return perturbed(SparseGatedUnit(DIM, **sizes, rngs=nnx.Rngs(0)))


def numbers(parameter) -> np.ndarray:
    return np.asarray(parameter[...], np.float64)


def linear(module, x: np.ndarray) -> np.ndarray:
    return x @ numbers(module.weight) + numbers(module.bias)


def silu(x: np.ndarray) -> np.ndarray:
    return x * expit(x)


def averaged(mixer: SparseGatedUnit, x: np.ndarray) -> np.ndarray:
    """What the unit reads: the moving average, and the token itself."""
    taken, damped = expit(numbers(mixer.average.decay)), expit(numbers(mixer.average.damping))
    h, found = np.zeros((DIM, 3)), []
    for token in x:
        h = taken * numbers(mixer.average.input) * token[:, None] + (1 - taken * damped) * h
        found.append((numbers(mixer.average.output) * h).sum(-1) / np.sqrt(3))
    return silu(np.asarray(found) + numbers(mixer.direct) * x)


def local_unit(mixer: SparseGatedUnit, m: np.ndarray, places: np.ndarray) -> np.ndarray:
    """A gated attention unit of all of its tokens, each of which sees itself and a window before."""
    z, r, v = np.split(silu(linear(mixer.mixed, m)), (6, 11), axis=-1)
    both = z[None] * numbers(mixer.heads.gain)[:, None] + numbers(mixer.heads.offset)[:, None]
    q, k = (np.asarray(rotate(jnp.asarray(e)[None, :, None], jnp.asarray(places)[None], base=10000.0)) for e in both)
    order = np.arange(len(m))
    distance = order[:, None] - order
    seen, products = (distance >= 0) & (distance <= WINDOW), q[0, :, 0] @ k[0, :, 0].T
    if mixer.weights == Softmax():
        weights = softmax(np.where(seen, products / np.sqrt(6), -np.inf), axis=-1)
    else:
        weights = np.where(seen, np.maximum(products / WINDOW, 0) ** 2, 0)
    return linear(mixer.output, r * (weights @ v))


def by_hand(mixer: SparseGatedUnit, x: np.ndarray, capacity: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """One document: outputs, and which tokens are active."""
    m = averaged(mixer, x)
    logits = linear(mixer.choice, m)
    confidence = softmax(logits / np.exp(numbers(mixer.log_temperature)), axis=-1).max(-1)
    active = np.flatnonzero(logits[:, 1] > logits[:, 0])[:capacity]
    given = np.zeros(x.shape)
    given[active] = confidence[active, None] * local_unit(mixer, m[active], active)
    return silu(linear(mixer.own, m) + given + x) - x, active


@pytest.mark.parametrize(('capacity', 'weights'), [(None, Softmax()), (4, Softmax()), (None, SquaredRelu())])
def test_the_layer_is_that_of_the_paper(capacity, weights):
    """And its squared rectifier that of the released code, whose products are divided by the window."""
    with jax.enable_x64(True):
        mixer = make(capacity=capacity, weights=weights)
        x = noise(1, LENGTH, DIM, dtype=jnp.float64)
        expected, active = by_hand(mixer, np.asarray(x[0]), capacity)
        assert WINDOW < len(active) < LENGTH
        y, _ = jax.jit(mixer)(x, Context.full(1, LENGTH))
        np.testing.assert_allclose(y[0], expected, rtol=1e-9, atol=1e-9)


def test_with_every_token_active_it_is_a_local_unit_scaled_by_the_confidence():
    with jax.enable_x64(True):
        mixer = make()
        choice, x = numbers(mixer.choice.weight), np.asarray(noise(1, LENGTH, DIM, dtype=jnp.float64))
        m = averaged(mixer, x[0])
        logits = (m @ choice + [-30.0, 30.0]) / np.exp(numbers(mixer.log_temperature))
        unit = expit(logits[:, 1] - logits[:, 0])[:, None] * local_unit(mixer, m, np.arange(LENGTH))
        # With every token active, and with none.
        for bias, given in (([-30.0, 30.0], unit), ([30.0, -30.0], np.zeros(m.shape))):
            mixer.choice.bias[...] = jnp.asarray(bias, jnp.float32)
            y = jax.jit(lambda x: mixer(x, Context.full(1, LENGTH))[0])(jnp.asarray(x))
            np.testing.assert_allclose(y[0], silu(linear(mixer.own, m) + given + x[0]) - x[0], rtol=1e-9, atol=1e-9)


def test_a_capacity_is_that_of_every_document_in_one_pass_and_in_pieces():
    """The first row is two documents, the second one that goes on from piece to piece."""
    with jax.enable_x64(True):
        mixer = make(capacity=4)
        x = noise(2, LENGTH, DIM, dtype=jnp.float64)
        lengths = [(9, LENGTH - 9), (LENGTH,)]
        segments = np.stack([np.repeat(np.arange(len(each)) + 1, each) for each in lengths]).astype(np.int32)
        positions = np.stack([np.concatenate([np.arange(n) for n in each]) for each in lengths]).astype(np.int32)
        ctx = dataclasses.replace(
            Context.full(2, LENGTH), positions=jnp.asarray(positions), segments=jnp.asarray(segments)
        )
        expected = np.zeros(x.shape)
        for row, each in enumerate(lengths):
            ends = np.cumsum((0, *each))
            for start, stop in itertools.pairwise(ends.tolist()):
                expected[row, start:stop] = by_hand(mixer, np.asarray(x[row, start:stop]), 4)[0]
        run = jax.jit(mixer)
        np.testing.assert_allclose(run(x, ctx)[0], expected, rtol=1e-9, atol=1e-9)
        state, pieces = mixer.init_state(2, LENGTH, x.dtype), []
        for start in range(0, LENGTH - 3, 5):
            part = slice(start, start + 5)
            here = dataclasses.replace(ctx, positions=ctx.positions[:, part], segments=ctx.segments[:, part])
            y, state = run(x[:, part], here, state)
            pieces.append(y)
        np.testing.assert_allclose(np.concatenate(pieces, 1), expected[:, :20], rtol=1e-9, atol=1e-9)


def test_the_temperature_starts_as_in_the_released_code():
    mixer = SparseGatedUnit(64, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(np.exp(numbers(mixer.log_temperature)), 0.3 * 8, rtol=1e-6)
    assert mixer.init_state(1, 1000, jnp.bfloat16).keys.shape == (1, 128, 64)


def test_a_temperature_is_positive():
    for temperature in (0.0, -1.0):
        with pytest.raises(UserError, match=f'temperature of SparseGatedUnit is {temperature}; it must be positive'):
            make(temperature=temperature)
