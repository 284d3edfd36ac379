"""65,536 tokens in bfloat16 by every recipe whose state does not grow, through weak gates and through strong ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.context import Context
from attnlab.testing.contract.narrow import BOUND, is_constant
from attnlab.testing.contract.subject import Subject
from attnlab.testing.noise import noise, perturbed
from attnlab.zoo import ZOO
from tests.test_contract import make

LENGTH = 65_536
DIM = 16
WEAK, STRONG = 0.1, 3.0
"""How large inputs are in the first half, whose gates hardly depend on them, and in the second, which they saturate."""

WINDOW = 1024
"""Tokens whose error is measured together."""

ROUNDING = float(jnp.finfo(jnp.bfloat16).eps) / 2
"""How much rounding changes a number, relatively."""

STREAMING = [name for name, recipe in ZOO.items() if recipe.causal and recipe.streaming and len(recipe.pattern) == 1]


@pytest.mark.slow
@pytest.mark.parametrize('name', STREAMING)
def test_a_long_sequence_in_bfloat16_stays_near_float32(name):
    mixer = perturbed(make(ZOO[name], DIM, rngs=nnx.Rngs(0)), 0.02)
    if not is_constant(Subject(lambda dim, rngs: mixer, DIM)):
        pytest.skip('its state grows with the sequence')
    size = np.where(np.arange(LENGTH) < LENGTH // 2, WEAK, STRONG)[None, :, None]
    x = (noise(1, LENGTH, DIM) * size).astype(jnp.bfloat16)
    run = jax.jit(lambda x: mixer(x, Context.full(1, LENGTH))[0])
    nudged = x.astype(jnp.float32) * (1 + ROUNDING * noise(1, LENGTH, DIM, seed=1))
    with jax.default_matmul_precision('highest'):
        narrow, wide, moved = (np.asarray(run(each), np.float32) for each in (x, x.astype(jnp.float32), nudged))
    jax.clear_caches()
    assert np.isfinite(narrow).all()
    error, owed = (by_window(each, wide) for each in (narrow, moved))
    # A layer that is not much moved by what rounding does to its input has no excuse.
    bound = BOUND + 4 * owed.max()
    assert error.max() <= bound, f'{error.max():.1%} in window {error.argmax()} of {len(error)}; bound {bound:.1%}'


def by_window(actual, expected):
    """Relative errors of windows, since a norm of what is read makes that of a read near zero as large as it likes."""
    parts = (np.linalg.norm(each.reshape(-1, WINDOW * DIM), axis=1) for each in (actual - expected, expected))
    error, size = parts
    return error / size
