"""Attention in planes of a volume, against a mask of all pairs of tokens in float64 with numpy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.mixers.spatial.planes import PlaneAttention
from attnlab.testing.contract import cast_parameters
from attnlab.testing.noise import noise, perturbed
from tests.mixers.spatial.test_equations import mapped, normed, softmax

DIM, HEADS, SIDE = 16, 4, 3


def gelu(x):
    with jax.enable_x64(True):
        return np.asarray(jax.nn.gelu(jnp.asarray(x), approximate=False))


def enhanced(part, x, grid):
    taps = np.asarray(part.conv.taps[...])
    around, near = np.pad(x.reshape(*grid, -1), [(1, 1)] * 3 + [(0, 0)]), np.zeros((*grid, x.shape[1]))
    for z, y, c in np.ndindex(grid):
        near[z, y, c] = (around[z : z + 3, y : y + 3, c : c + 3] * taps).sum(axis=(0, 1, 2))
    near = gelu(normed(part.inner, near.reshape(x.shape) + np.asarray(part.conv.bias[...])))
    return np.concatenate(
        [normed(part.first, mapped(part.plain, x)), normed(part.second, mapped(part.around, near))], 1
    )


@pytest.mark.parametrize(
    ('grid', 'shifted'), [((3, 4, 5), False), ((3, 4, 5), True), ((4, 6), True)], ids=['volume', 'shifted', 'image']
)
def test_planes_of_a_volume(grid, shifted):
    volume = (1, *grid) if len(grid) == 2 else grid
    count = int(np.prod(grid))
    x = np.random.default_rng(0).standard_normal((count, DIM))
    with jax.enable_x64(True):
        made = PlaneAttention(DIM, heads=HEADS, side=SIDE, shifted=shifted, rngs=nnx.Rngs(0))
        mixer = cast_parameters(perturbed(made), jnp.float64)
        graphdef, variables = nnx.split(mixer)
        ctx = dataclasses.replace(Context.full(1, count), grid=grid)
        call = jax.jit(lambda variables, x: nnx.merge(graphdef, variables)(x, ctx)[0])
        found = np.asarray(call(variables, jnp.asarray(x)[None]))[0]
    places = np.stack(np.unravel_index(np.arange(count), volume), axis=-1)
    offsets = places[:, None] - places[None]
    q, k, v = (
        part.reshape(count, HEADS, -1) for part in np.split(mapped(mixer.qkv, enhanced(mixer.before, x, volume)), 3, 1)
    )
    read = np.zeros_like(q)
    # Four heads: two across the first axis, one across each of the others.
    for head, (across, own) in enumerate([(0, 0), (0, 1), (1, 0), (2, 0)]):
        window = np.where(np.arange(3) == across, 1, SIDE)
        number = (places + np.where(window == 1, 0, SIDE // 2 if shifted else 0)) // window
        seen = (number[:, None] == number[None]).all(axis=-1)
        moved = []
        for table in (mixer.of_queries, mixer.of_keys, mixer.of_values):
            by_axis = np.asarray(table[...])[:, :, own]
            index = np.where(seen[..., None], offsets + SIDE - 1, 0)
            moved.append(sum(by_axis[axis, index[..., axis]] for axis in range(3)))
        a, b = q[:, head] / np.sqrt(DIM // HEADS), k[:, head]
        scores = a @ b.T + np.einsum('ik,ijk->ij', a, moved[0]) + np.einsum('jk,ijk->ij', b, moved[1])
        weights = softmax(np.where(seen, scores, -np.inf))
        read[:, head] = weights @ v[:, head] + np.einsum('ij,ijk->ik', weights, moved[2])
    expected = mapped(mixer.output, enhanced(mixer.after, read.reshape(count, DIM), volume))
    np.testing.assert_allclose(found, expected, rtol=1e-8, atol=1e-10)


def test_mistakes_are_named():
    with pytest.raises(UserError, match='heads of PlaneAttention is 2; it must be at least 3'):
        PlaneAttention(DIM, heads=2, rngs=nnx.Rngs(0))
    with pytest.raises(UserError, match=r'ctx.grid is None'):
        PlaneAttention(DIM, heads=4, rngs=nnx.Rngs(0))(noise(1, 6, DIM), Context.full(1, 6))


@pytest.mark.parametrize('shifted', [False, True])
def test_empty_places_are_as_if_they_were_not_there(shifted):
    """Against attention and sparse convolutions over the occupied places alone, in float64 with numpy."""
    grid, rng = (3, 4, 5), np.random.default_rng(3)
    count = int(np.prod(grid))
    x, there = rng.standard_normal((count, DIM)), rng.random(count) < 0.5
    with jax.enable_x64(True):
        made = PlaneAttention(DIM, heads=HEADS, side=SIDE, shifted=shifted, rngs=nnx.Rngs(0))
        mixer = cast_parameters(perturbed(made), jnp.float64)
        ctx = dataclasses.replace(Context.full(1, count), grid=grid, segments=jnp.asarray(there, jnp.int32)[None])
        found = np.asarray(mixer(jnp.asarray(x)[None], ctx)[0])[0]
    zeros = np.where(there[:, None], x, 0.0)
    near = enhanced(mixer.before, zeros, grid)
    # At occupied places a convolution of zeros elsewhere is one over occupied neighbours.
    places = np.stack(np.unravel_index(np.flatnonzero(there), grid), axis=-1)
    q, k, v = (part.reshape(len(places), HEADS, -1) for part in np.split(mapped(mixer.qkv, near[there]), 3, 1))
    read = np.zeros_like(q)
    for head, (across, own) in enumerate([(0, 0), (0, 1), (1, 0), (2, 0)]):
        window = np.where(np.arange(3) == across, 1, SIDE)
        number = (places + np.where(window == 1, 0, SIDE // 2 if shifted else 0)) // window
        for i in range(len(places)):
            seen = np.flatnonzero((number == number[i]).all(axis=1))
            moved = []
            for table in (mixer.of_queries, mixer.of_keys, mixer.of_values):
                offsets = places[i] - places[seen] + SIDE - 1
                moved.append(sum(np.asarray(table[...])[axis, offsets[:, axis], own] for axis in range(3)))
            a, b = q[i, head] / np.sqrt(DIM // HEADS), k[seen, head]
            weights = softmax(b @ a + moved[0] @ a + (b * moved[1]).sum(axis=1))
            read[i, head] = weights @ (v[seen, head] + moved[2])
    scattered = np.zeros((count, DIM))
    scattered[there] = read.reshape(len(places), DIM)
    expected = mapped(mixer.output, enhanced(mixer.after, scattered, grid))
    np.testing.assert_allclose(found[there], expected[there], rtol=1e-8, atol=1e-10)
