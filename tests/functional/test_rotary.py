"""Rotation against angles worked out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.errors import UserError
from attnlab.functional.grids import axial_angles
from attnlab.functional.rotary import rotate, rotated_channels


def rotated(x: list[float], position: int, **kwargs) -> np.ndarray:
    array = jnp.asarray(x, jnp.float32)[None, None, None]
    return np.asarray(rotate(array, jnp.full((1, 1), position, jnp.int32), **kwargs))[0, 0, 0]


def test_pairs_turn_by_position_times_frequency():
    # Frequencies base^0 and base^(-2/4): angles 3 and 0.3.
    x, angles = [1.0, 2.0, 3.0, 4.0], np.array([3.0, 0.3])
    cos, sin = np.cos(angles), np.sin(angles)
    first, second = np.array([1.0, 2.0]), np.array([3.0, 4.0])
    halves = [*(first * cos - second * sin), *(second * cos + first * sin)]
    np.testing.assert_allclose(rotated(x, 3, base=100.0), halves, rtol=1e-5)


def test_interleaved_pairs_are_neighbours():
    x = [1.0, 2.0, 3.0, 4.0]
    halves = rotated([x[0], x[2], x[1], x[3]], 5)
    np.testing.assert_allclose(rotated(x, 5, interleaved=True), halves[[0, 2, 1, 3]], rtol=1e-6)


def test_a_fraction_leaves_the_other_channels_alone():
    x = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    y = rotated(x, 7, fraction=0.5)
    np.testing.assert_array_equal(y[4:], x[4:])
    np.testing.assert_allclose(y[:4], rotated(x[:4], 7), rtol=1e-6)


def test_position_zero_turns_nothing():
    np.testing.assert_array_equal(rotated([1.0, 2.0, 3.0, 4.0], 0), [1.0, 2.0, 3.0, 4.0])


def test_far_positions_are_told_apart_in_bfloat16():
    x = jnp.asarray([1.0, 0.0], jnp.bfloat16)[None, None, None]
    far = np.array([[100_001]])
    y = rotate(x, jnp.asarray(far, jnp.int32))[0, 0, 0]
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(y, np.float32), [np.cos(100_001.0), np.sin(100_001.0)], atol=1e-2)


@pytest.mark.parametrize(('channels', 'fraction'), [(3, 1.0), (6, 0.5), (8, 0.3)])
def test_only_a_whole_number_of_pairs_can_turn(channels: int, fraction: float):
    turned = f'a head has {channels} channels, of which rotary positions turn {channels * fraction:g} '
    with pytest.raises(UserError, match=f'{turned}.*; that must be an even whole number: choose dim'):
        rotated_channels(channels, fraction)


@pytest.mark.parametrize('fraction', [0.0, 1.5])
def test_a_share_of_the_channels_turns(fraction: float):
    with pytest.raises(UserError, match=f'fraction is {fraction}; rotary positions turn a share'):
        rotated_channels(8, fraction)


def test_rounding_of_the_fraction_is_forgiven():
    assert rotated_channels(25, 0.56) == 14


@pytest.mark.parametrize('base', [0.0, -1.0])
def test_a_base_is_positive(base: float):
    with pytest.raises(UserError, match=f'base is {base}; positions are turned at powers of it'):
        rotate(jnp.ones((1, 1, 1, 4)), jnp.zeros((1, 1), jnp.int32), base=base)
    with pytest.raises(UserError, match=f'base is {base}; positions are turned at powers of it'):
        axial_angles((2, 2), 4, base, jnp.float32)


def test_sines_are_computed_once_for_all_that_is_rotated():
    x, positions = jnp.zeros((1, 2, 3, 4)), jnp.zeros((1, 2), jnp.int32)
    assert str(jax.make_jaxpr(rotate)(x, positions)).count('optimization_barrier') == 1
