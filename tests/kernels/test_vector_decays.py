"""Decays for every key channel: the ways of computing them are chosen for every row of the batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels.matrix_state.chunks import MODERATE


def drawn(*shape: int, place: int) -> jax.Array:
    return jax.random.normal(jax.random.key(place), shape) / 4


@pytest.mark.parametrize('core', ['linear_attention', 'delta_rule', 'diagonal_low_rank'])
def test_strong_decays_of_one_row_change_no_bit_of_another(core):
    b, t, h, k = 2, 24, 1, 8
    q, keys, v, a = (drawn(b, t, h, k, place=place) for place in range(4))
    further = {'linear_attention': (), 'delta_rule': (jnp.full((b, t, h), 0.5),), 'diagonal_low_rank': (a,)}[core]
    weights = drawn(b, t, h, k, place=4)

    @jax.jit
    def measured(log_decay: jax.Array) -> list[jax.Array]:
        def loss(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
            y, _ = getattr(pallas_kernels, core)(*arrays, *further, log_decay=log_decay, implementation='xla')
            return jnp.vdot(weights, y), y

        (_, y), gradients = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(q, keys, v)
        return [y, *gradients]

    gentle = jnp.full((b, t, h, k), -0.1)
    strong = gentle.at[1].set(-MODERATE)
    ours = measured(gentle), measured(strong)
    for one, other in zip(*ours, strict=True):
        np.testing.assert_array_equal(one[0], other[0])
        assert np.abs(one[1] - other[1]).max() > 1e-3 and np.isfinite(other).all()
