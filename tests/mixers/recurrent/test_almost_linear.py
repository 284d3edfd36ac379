"""AL-RNN against a loop over tokens in numpy float64, and what it is with none and with all of its units rectified."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.mixers.recurrent.almost_linear import AlmostLinearRNN
from attnlab.testing.noise import noise, perturbed

DIM, WIDTH = 4, 6


def numbers(mixer: AlmostLinearRNN) -> list[np.ndarray]:
    found = (mixer.diagonal, mixer.recurrent, mixer.input.weight, mixer.input.bias, mixer.output.weight)
    return [np.asarray(each[...], np.float64) for each in found]


def by_hand(mixer: AlmostLinearRNN, x: np.ndarray, rectified: int) -> np.ndarray:
    a, W, C, h, B = numbers(mixer)
    z, rows = np.zeros(WIDTH), []
    for each in x:
        kept = z.copy()
        for unit in range(WIDTH - rectified, WIDTH):
            kept[unit] = max(z[unit], 0)
        z = a * z + kept @ W + h + each @ C
        rows.append(z)
    return np.asarray(rows) @ B


@pytest.mark.parametrize('rectified', [2, pytest.param(WIDTH, marks=pytest.mark.slow)])
def test_the_layer_is_a_loop_over_tokens_and_documents_start_anew(rectified):
    with jax.enable_x64(True):
        mixer = perturbed(AlmostLinearRNN(DIM, width=WIDTH, rectified=rectified, rngs=nnx.Rngs(0)), 0.3)
        x = noise(1, 12, DIM, dtype=jnp.float64)
        segments = jnp.asarray([[1] * 5 + [2] * 7], jnp.int32)
        y, _ = jax.jit(mixer)(x, Context(jnp.zeros((1, 12), jnp.int32), segments))
        for start, stop in ((0, 5), (5, 12)):
            expected = by_hand(mixer, np.asarray(x[0, start:stop]), rectified)
            np.testing.assert_allclose(y[0, start:stop], expected, rtol=1e-9, atol=1e-9)


def test_the_jacobian_of_a_step_is_linear_in_every_region():
    """`diag(a) + W diag(1, .., 1, [z > 0])`, which is all that the units to rectify tell about a state."""
    with jax.enable_x64(True):
        mixer = perturbed(AlmostLinearRNN(DIM, width=WIDTH, rectified=2, rngs=nnx.Rngs(0)), 0.3)
        a, W, *_ = numbers(mixer)
        x, ctx = noise(1, 1, DIM, dtype=jnp.float64), Context.full(1, 1)
        rest = mixer.init_state(1, 1, jnp.float64)._replace(segment=jnp.ones(1, jnp.int32))

        @jax.jit
        @jax.jacobian
        def jacobian(hidden):
            return mixer(x, ctx, rest._replace(hidden=hidden[None]))[1].hidden[0]

        for signs in ((1, 1), (1, -1), (-1, 1), (-1, -1)):
            hidden = jnp.asarray([0.3, -0.2, 0.5, -0.7, *(0.4 * sign for sign in signs)])
            regions = np.asarray([1, 1, 1, 1, *(sign > 0 for sign in signs)], float)
            np.testing.assert_allclose(jacobian(hidden), np.diag(a) + (regions[:, None] * W).T, rtol=1e-9, atol=1e-12)


def test_it_starts_stable():
    mixer = AlmostLinearRNN(32, rngs=nnx.Rngs(0))
    diagonal, recurrent = np.asarray(mixer.diagonal[...]), np.asarray(mixer.recurrent[...])
    assert mixer.linear == 28 and diagonal.min() > 0 and diagonal.max() <= 1
    assert 0.008 < recurrent.std() < 0.012
    assert np.abs(np.linalg.eigvals(np.diag(diagonal) + recurrent)).max() < 1.1
    assert {p.get_metadata()['group'] for p in (mixer.diagonal, mixer.recurrent)} == {'dynamics'}
    with pytest.raises(UserError, match='rectified is 9; it must be at most the width of the state, 8'):
        AlmostLinearRNN(8, rectified=9, rngs=nnx.Rngs(0))
