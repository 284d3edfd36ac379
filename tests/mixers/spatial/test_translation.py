"""What windows forbid has no influence at all, and what is moved is answered moved."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.context import Context
from attnlab.mixers.spatial.windows import NeighbourhoodAttention, WindowAttention
from attnlab.testing.noise import noise, perturbed

GRID, DIM, SIDE = (6, 9), 4, 3
COUNT = GRID[0] * GRID[1]
CTX = dataclasses.replace(Context.full(1, COUNT), grid=GRID)
PLACES = np.stack(np.unravel_index(np.arange(COUNT), GRID), axis=-1)
KINDS = {
    'windows': functools.partial(WindowAttention, side=SIDE),
    'shifted windows': functools.partial(WindowAttention, side=SIDE, shifted=True),
    'neighbourhoods': functools.partial(NeighbourhoodAttention, side=SIDE),
}


def mixer(name):
    return perturbed(KINDS[name](DIM, heads=2, rngs=nnx.Rngs(0)))


def allowed(name):
    """Which token may see which, by the papers' rules: windows that are not cut together, neighbourhoods moved in."""
    if name == 'neighbourhoods':
        starts = np.clip(PLACES - SIDE // 2, 0, np.array(GRID) - SIDE)
        inside = (PLACES[None] >= starts[:, None]) & (PLACES[None] < starts[:, None] + SIDE)
        return inside.all(axis=-1)
    shift = SIDE // 2 if name == 'shifted windows' else 0
    number = (PLACES - shift) // SIDE
    return (number[:, None] == number[None]).all(axis=-1)


@pytest.mark.parametrize('name', KINDS)
def test_nothing_that_is_forbidden_has_any_influence(name):
    """Derivatives are exactly zero there, and nowhere else."""
    made, reach = mixer(name), np.zeros((COUNT, COUNT))
    weights = noise(1, COUNT, DIM, seed=9)

    @jax.jit
    def influence(x):
        def summed(x):
            return jnp.sum(weights * made(x, CTX)[0], axis=(0, 2))

        outputs, pull = jax.vjp(summed, x)
        (found,) = jax.vmap(pull)(jnp.eye(COUNT, dtype=outputs.dtype))
        return jnp.abs(found).sum(axis=(1, 3))

    for seed in range(2):
        reach += np.asarray(influence(noise(1, COUNT, DIM, seed=seed)))
    np.testing.assert_array_equal(reach > 0, allowed(name))


@pytest.mark.parametrize('name', ['windows', 'neighbourhoods'])
def test_an_image_that_is_moved_is_answered_moved(name):
    """By whole windows everywhere; by any step where a neighbourhood lies inside the grid before and after."""
    made, steps = mixer(name), SIDE if name == 'windows' else 1
    image = np.asarray(noise(*GRID, DIM))
    moved = np.roll(image, steps, axis=1)
    before, after = (
        np.asarray(made(jnp.asarray(each.reshape(1, COUNT, DIM)), CTX)[0]).reshape(*GRID, DIM)
        for each in (image, moved)
    )
    kept = slice(None) if name == 'windows' else slice(SIDE // 2 + steps, -(SIDE // 2))
    np.testing.assert_allclose(after[:, kept], np.roll(before, steps, axis=1)[:, kept], rtol=1e-4, atol=1e-5)
    assert not np.allclose(after, before, atol=1e-3)
