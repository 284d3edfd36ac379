"""The inverse of the triangular matrices of chunks in kernels for Hopper, interpreted."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import target
from pallas_kernels.diagonal_low_rank.chunk import Weights
from pallas_kernels.diagonal_low_rank.mosaic_gpu import chunks


def matrices(most):
    """Where powers of a matrix grow: of keys that have much in common, and of keys that have not; betas up to 2."""
    random = np.random.default_rng(0)
    keys = random.standard_normal((2, 64, 32)) + np.array([2.0, 0.0])[:, None, None]
    keys /= np.linalg.norm(keys, axis=-1, keepdims=True)
    return np.tril(most * keys @ keys.swapaxes(1, 2), -1)[None, None]


@pytest.mark.parametrize('dtype', [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize('most', [1.0, 2.0])
def test_it_is_the_inverse(most, dtype):
    """To less than the rounding to 16 bits of what multiplies it then; as two parts, and what these are applied to."""
    strict = matrices(most)
    b, h, l, c, _ = strict.shape
    of_steps, nothing = jnp.zeros((b, h, l * c, c), dtype), jnp.zeros((b, h, l, 1, 1))
    earlier = -jnp.asarray(strict, jnp.float32).reshape(b, h, l * c, c)
    identity = jnp.tile(jnp.eye(c, dtype=dtype), (l, 1))[None, :, None]
    with target.compiling_for(target.interpreted('mosaic_gpu')):
        does = Weights([of_steps], [earlier], of_steps, jnp.moveaxis(identity, 2, 1), [of_steps], nothing)
        found = chunks.solve(target.current(), does, identity, keep=True)
    coarse, fine = (np.asarray(part, np.float64).reshape(strict.shape) for part in found.inverse)
    expected = np.linalg.inv(np.eye(c) + strict)
    size = np.abs(expected).max(axis=(3, 4))
    assert (np.abs(coarse + fine - expected).max(axis=(3, 4)) / size).max() < 2**-12
    assert not np.triu(coarse + fine, 1).any()
    for applied in (found.written, found.reads):
        off = np.abs(np.asarray(applied, np.float64).reshape(strict.shape) - expected).max(axis=(3, 4))
        assert (off / size).max() < 2 * float(jnp.finfo(dtype).eps)
