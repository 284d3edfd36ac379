"""HiPPO's matrices against their identities, and their states against the projections they are named for."""

import numpy as np
import pytest
import scipy.linalg
from numpy.polynomial import legendre

from attnlab.errors import UserError
from attnlab.functional import hippo


def polynomial(n: int, x: np.ndarray) -> np.ndarray:
    return np.sqrt(2 * n + 1) * legendre.legval(x, np.eye(n + 1)[n])


def basis(name: str, states: int, ago: np.ndarray) -> np.ndarray:
    """The orthonormal functions of the past that a system projects on, `states times`."""
    if name == 'legs':
        return np.stack([polynomial(n, 2 * np.exp(-ago) - 1) for n in range(states)])
    if name == 'legt':
        return np.stack([polynomial(n, 1 - ago) for n in range(states)])
    waves = [wave(np.pi * k * ago) for k in range(states // 2) for wave in (np.cos, np.sin)]
    return np.stack(waves) * np.sqrt(2) * np.where(np.arange(states) < 2, np.sqrt(0.5), 1)[:, None]


@pytest.mark.parametrize('name', hippo.BASES)
def test_with_its_correction_a_system_decays_evenly_and_turns(name):
    A, _ = hippo.transition(name, 10)
    P = hippo.correction(name, 10)
    rate = -0.5 if name == 'legs' else 0
    turning = A + P.T @ P - rate * np.eye(10)
    np.testing.assert_allclose(turning, -turning.T, atol=1e-12)
    assert len(P) == {'legs': 1, 'legt': 2, 'fout': 1}[name]


@pytest.mark.parametrize('name', hippo.BASES)
def test_modes_are_the_system_in_another_basis(name):
    A, inputs = hippo.transition(name, 8)
    modes = hippo.modes(name, 8)
    both = [np.concatenate([each, each.conj()], axis=-1) for each in modes[:3]]
    matrix = np.diag(both[0]) - both[2].T @ both[2].conj()
    state = scipy.linalg.expm(0.3 * matrix) @ both[1]
    np.testing.assert_allclose(2 * (modes.vectors @ state[:4]).real, scipy.linalg.expm(0.3 * A) @ inputs, atol=1e-12)
    assert (modes.eigenvalues.imag <= 1e-12).all()


def test_legs_is_legendre_in_warped_time():
    A, inputs = hippo.transition('legs', 6)
    for ago in (0.0, 0.4, 2.0):
        kernel = scipy.linalg.expm(ago * A) @ inputs
        np.testing.assert_allclose(kernel, np.exp(-ago) * basis('legs', 6, np.array([ago]))[:, 0], atol=1e-12)


@pytest.mark.parametrize(
    ('name', 'within', 'error'), [('legs', 0.005, 0.02), ('legt', 0.005, 0.005), ('fout', 0.02, 0.04)]
)
def test_the_state_reconstructs_the_input(name, within, error):
    """The first coefficients are the projections, and their sum the input, where the step is that for its length."""
    states, steps = 32, 2000
    step = hippo.step_for(name, steps)
    A, inputs = hippo.transition(name, states)
    whole = np.eye(states) - step / 2 * A
    matrix = np.linalg.solve(whole, np.eye(states) + step / 2 * A)
    written = np.linalg.solve(whole, step * inputs)
    time = step * np.arange(3 * steps)
    signal = np.sin(2 * time) + 0.5 * np.cos(3 * time + 1)
    state = np.zeros(states)
    for value in signal:
        state = matrix @ state + written * value
    ago = step * np.arange(len(signal))[::-1]
    weight = np.exp(-ago) if name == 'legs' else np.where(ago <= 2, 0.5, 0)
    functions = basis(name, states, ago)
    projections = step * (functions * weight) @ signal
    alive = [n for n in range(8) if not (name == 'fout' and n == 1)]
    np.testing.assert_allclose(state[alive], projections[alive], atol=within)
    # Sines at the ends of a window jump, and warped time is coarse far back.
    inside = (ago > 0.2) & (ago < (1.5 if name == 'legs' else 1.8))
    reconstruction = state @ functions
    assert np.sqrt(np.mean((reconstruction - signal)[inside] ** 2)) < error


def test_a_window_forgets_what_is_older():
    for name, oldest in (('legt', 2.0), ('fout', 2.0)):
        A, inputs = hippo.transition(name, 64)
        size = [np.linalg.norm(scipy.linalg.expm(ago * A) @ inputs) for ago in (0.5, 1.5, 1.3 * oldest)]
        assert size[2] < 0.3 * min(size[:2])
        assert hippo.step_for(name, 100) == oldest / 100


def test_diagonals_in_closed_form():
    np.testing.assert_allclose(hippo.diagonal('lin', 6).eigenvalues, [-0.5, -0.5 - 1j * np.pi, -0.5 - 2j * np.pi])
    inv = hippo.diagonal('inv', 64).eigenvalues
    np.testing.assert_allclose(inv[[0, -1]].imag, [-64 / np.pi * 63, -64 / np.pi * (64 / 63 - 1)])
    np.testing.assert_allclose(hippo.diagonal('real', 4).eigenvalues, [-1, -2, -3, -4])
    legs = hippo.diagonal('legs', 64).eigenvalues
    np.testing.assert_allclose(legs.real, -0.5)
    assert 1250 < -legs[0].imag < 1350


@pytest.mark.parametrize(
    ('name', 'states', 'message'), [('legz', 4, "'legz'; did you mean"), ('legs', 5, 'state is 5')]
)
def test_mistakes_are_named(name, states, message):
    for make in (hippo.modes, hippo.diagonal):
        with pytest.raises(UserError, match=message):
            make(name, states)
