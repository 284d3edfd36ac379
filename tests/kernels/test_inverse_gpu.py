"""The kernels for Hopper that invert the triangular matrices of chunks, interpreted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import target
from pallas_kernels.matrix_state.mosaic_gpu.inverse import inverse


def matrices(most):
    """Where powers of a matrix grow: of keys that have much in common, and of keys that have not; betas up to 2."""
    random = np.random.default_rng(0)
    keys = random.standard_normal((2, 64, 32)) + np.array([2.0, 0.0])[:, None, None]
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    return np.tril(most * keys @ keys.swapaxes(1, 2), -1)[None, None]


@pytest.mark.parametrize('most', [1.0, 2.0])
def test_it_is_the_inverse_and_so_are_gradients(most):
    """To less than the rounding to tf32 of what multiplies it then."""
    strict = matrices(most)
    expected = np.linalg.inv(np.eye(64) + strict)
    cotangent = np.random.default_rng(1).standard_normal(strict.shape)
    transposed = expected.swapaxes(3, 4)
    gradient = np.tril(-transposed @ cotangent @ transposed, -1)
    with target.compiling_for(target.interpreted('mosaic_gpu')):
        found, pull = jax.vjp(lambda strict: inverse(target.current(), strict), jnp.asarray(strict, jnp.float32))
        (dstrict,) = pull(jnp.asarray(cotangent, jnp.float32))
    for ours, right in ((found, expected), (dstrict, gradient)):
        worst = np.abs(ours - right).max(axis=(3, 4)) / np.abs(right).max(axis=(3, 4))
        assert worst.max() < 2**-12, worst
    assert not np.triu(found, 1).any() and not np.triu(dstrict).any()
