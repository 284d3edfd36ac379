"""Patches of images against their written definitions, and the context that blocks are given."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.blocks.block import Block
from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.functional.grids import coordinates, required_grid
from attnlab.models.heads.classification import ClassificationHead
from attnlab.models.inputs.patches import ConvStem, OverlappingMap, Patches
from attnlab.models.model import Model
from attnlab.models.stack import Stack
from attnlab.nn.convolutions import PatchMap
from attnlab.nn.pools import MeanPool, OneToken
from attnlab.nn.positions import GridRope, GridSinusoids, LearnedPlaces
from attnlab.testing.noise import noise, perturbed
from tests.models.test_model import Reader

SIZE = (4, 6)


def patches(patch=2, **options):
    made = Patches(1, 8, **({'size': SIZE, 'channels': 3, 'patch': patch, 'rngs': nnx.Rngs(0)} | options))
    return perturbed(made)


def test_a_patch_is_mapped_with_all_of_its_pixels():
    inputs, x = patches(positions=None), noise(2, 24, 3)
    weight, bias = (np.asarray(each[...]) for each in (inputs.stem.linear.weight, inputs.stem.linear.bias))
    image = np.asarray(x).reshape(2, *SIZE, 3)
    expected = [
        image[:, i : i + 2, j : j + 2].reshape(2, -1) @ weight + bias for i in range(0, 4, 2) for j in range(0, 6, 2)
    ]
    np.testing.assert_allclose(inputs(x), np.stack(expected, axis=1), rtol=1e-5, atol=1e-6)
    assert inputs.grid == (2, 3)


def test_an_overlapping_patch_reads_pixels_around_it():
    inputs, x = patches(positions=None, stem=OverlappingMap), noise(1, 24, 3)
    taps, bias = (np.asarray(each[...], np.float64) for each in (inputs.stem.conv.taps, inputs.stem.conv.bias))
    image = np.pad(np.asarray(x, np.float64).reshape(*SIZE, 3), ((1, 1), (1, 1), (0, 0)))
    rows = [
        np.einsum('yxc,yxcd->d', image[i : i + 3, j : j + 3], taps) + bias for i in range(0, 4, 2) for j in (0, 2, 4)
    ]
    apart = np.stack(rows) - np.mean(rows, axis=1, keepdims=True)
    unit = apart / np.sqrt(np.mean(apart**2, axis=1, keepdims=True) + 1e-5)
    scale, shift = (np.asarray(each[...]) for each in (inputs.stem.norm.scale, inputs.stem.norm.bias))
    np.testing.assert_allclose(inputs(x)[0], unit * scale + shift, rtol=2e-4, atol=2e-5)


def test_a_stem_of_convolutions_gives_the_grid_of_patches():
    made = patches(patch=4, size=(8, 12), stem=ConvStem)
    assert jax.eval_shape(lambda x: made(x), jax.ShapeDtypeStruct((2, 96, 3), jnp.bfloat16)).shape == (2, 6, 8)
    assert [conv.taps.shape[3] for conv in made.stem.convs] == [4, 8] and made.grid == (2, 3)
    with pytest.raises(UserError, match='patch is 3; ConvStem halves an image several times'):
        ConvStem(3, 8, patch=3, rngs=nnx.Rngs(0))


def test_a_stem_of_convolutions_is_its_equation():
    """3 x 3 in steps of 2, a norm over channels and GELU, twice; then a linear map."""
    made, x = patches(patch=4, size=(8, 12), stem=ConvStem, positions=None), noise(1, 96, 3)
    y = np.asarray(x, np.float64).reshape(8, 12, 3)
    for conv, norm in zip(made.stem.convs, made.stem.norms, strict=True):
        taps, bias = (np.asarray(each[...], np.float64) for each in (conv.taps, conv.bias))
        around, (height, width) = np.pad(y, ((1, 1), (1, 1), (0, 0))), (y.shape[0] // 2, y.shape[1] // 2)
        y = np.stack(
            [
                [np.einsum('yxc,yxcd->d', around[2 * i : 2 * i + 3, 2 * j : 2 * j + 3], taps) for j in range(width)]
                for i in range(height)
            ]
        )
        y = y + bias - np.mean(y + bias, axis=-1, keepdims=True)
        y = y / np.sqrt(np.mean(y**2, axis=-1, keepdims=True) + 1e-5) * np.asarray(norm.scale[...])
        y = np.asarray(jax.nn.gelu(jnp.asarray(y + np.asarray(norm.bias[...]))), np.float64)
    weight, bias = (np.asarray(each[...], np.float64) for each in (made.stem.linear.weight, made.stem.linear.bias))
    np.testing.assert_allclose(made(x)[0], y.reshape(6, -1) @ weight + bias, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize('grid', [(4, 6), (2, 3, 2)])
def test_sinusoids_hold_the_place_on_every_axis(grid):
    width = 4 * len(grid)
    found = np.asarray(GridSinusoids(base=100.0).encode(grid, width))
    places = coordinates(grid)
    frequencies = np.array([1.0, 100.0**-0.5])
    angles = np.concatenate([places[:, axis, None] * frequencies for axis in range(len(grid))], axis=1)
    np.testing.assert_allclose(found, np.concatenate([np.sin(angles), np.cos(angles)], axis=1), atol=1e-6)
    with pytest.raises(
        UserError, match=f'need a multiple of {2 * len(grid)} channels, twice its axes; got {width + 1}'
    ):
        GridSinusoids().encode(grid, width + 1)


def test_rotated_products_depend_on_the_offsets_on_both_axes():
    q, k = (jnp.broadcast_to(noise(1, 1, 1, 8, seed=seed), (1, 24, 1, 8)) for seed in (0, 1))
    rotated = [np.asarray(GridRope().rotate(x, SIZE))[0, :, 0] for x in (q, k)]
    products = (rotated[0] @ rotated[1].T).reshape(*SIZE, *SIZE)
    np.testing.assert_allclose(products[1, 1, 2, 4], products[2, 2, 3, 5], rtol=1e-5)
    assert abs(products[1, 1, 2, 4] - products[1, 1, 1, 4]) > 1e-3
    assert abs(products[1, 1, 2, 4] - products[1, 1, 2, 3]) > 1e-3
    np.testing.assert_allclose(products[1, 1, 1, 1], float(jnp.vdot(q[0, 0, 0], k[0, 0, 0])), rtol=1e-5)


@pytest.mark.parametrize('grid', [(8, 12), (3, 5)])
def test_places_with_a_span_are_those_of_a_grid_of_that_span(grid):
    """Rows of pixels of any number lie where as many of the span's do; at the span itself nothing changes."""
    channels, span = 8, 4
    scaled = np.asarray(GridSinusoids(span=span).encode(grid, channels))
    centres = [(np.arange(size) + 0.5) * span / size - 0.5 for size in grid]
    places = np.stack(np.meshgrid(*centres, indexing='ij'), axis=-1).reshape(-1, 2)
    angles = np.concatenate([places[:, axis, None] * np.array([1.0, 0.01]) for axis in range(2)], axis=1)
    np.testing.assert_allclose(scaled, np.concatenate([np.sin(angles), np.cos(angles)], axis=1), atol=1e-6)
    x = noise(1, 16, 1, 8)
    for part in (GridRope, GridSinusoids):
        options = [part(), part(span=span)]
        plain, same = (
            each.rotate(x, (4, 4)) if isinstance(each, GridRope) else each.encode((4, 4), 8) for each in options
        )
        np.testing.assert_array_equal(plain, same)
    assert not np.allclose(
        GridRope().rotate(noise(1, 96, 1, 8), (8, 12)), GridRope(span=4).rotate(noise(1, 96, 1, 8), (8, 12))
    )


@pytest.mark.parametrize('size', [(8, 6), (2, 6), (4, 10)])
def test_images_of_another_size_have_positions_between_the_learned_ones(size):
    inputs = patches()
    before, x = np.asarray(inputs.positions()), noise(2, size[0] * size[1], 3)
    inputs.resize(size)
    grid = (size[0] // 2, size[1] // 2)
    resized = jax.image.resize(before.reshape(2, 3, 8), (*grid, 8), 'linear', antialias=True)
    expected = np.asarray(resized).reshape(-1, 8)
    np.testing.assert_allclose(inputs.positions(), expected, rtol=1e-5, atol=1e-6)
    assert inputs.grid == grid and inputs.context(Context.full(2, size[0] * size[1])).grid == grid
    weight, bias = (np.asarray(each[...]) for each in (inputs.stem.linear.weight, inputs.stem.linear.bias))
    first = np.asarray(x).reshape(2, *size, 3)[:, :2, :2].reshape(2, -1) @ weight + bias
    np.testing.assert_allclose(inputs(x)[:, 0], first + expected[0], rtol=1e-4, atol=1e-5)
    assert inputs.positions.weight.axes == (None, 'embed')


def test_what_cannot_be_resized_is_named():
    with pytest.raises(UserError, match='images of 4 x 7 pixels hold no whole patches of 2 pixels'):
        patches().resize((4, 7))
    with pytest.raises(UserError, match='Patches with a class token cannot be resized'):
        patches(class_token='first').resize((8, 8))
    with pytest.raises(UserError, match=r'LearnedPlaces has 6 vectors; a grid of \(3, 3\) has others'):
        patches().positions.resample((3, 3), (4, 4))


def test_positions_are_added_to_patches_and_not_to_the_class_token():
    x = noise(1, 24, 3)
    plain = patches(positions=None, rngs=nnx.Rngs(1), class_token='middle')
    learned = patches(positions=LearnedPlaces, rngs=nnx.Rngs(1), class_token='middle')
    for name in ('stem', 'class_token'):
        setattr(learned, name, getattr(plain, name))
    difference = np.asarray(learned(x) - plain(x))[0]
    np.testing.assert_allclose(np.delete(difference, 3, axis=0), learned.positions(), rtol=1e-4, atol=1e-5)
    assert not difference[3].any() and plain.grid is None


def model(inputs, pool, seen=Reader):
    stack = functools.partial(Stack, depth=1, blocks=(functools.partial(Block, mixer=seen),), loop='unroll')
    head = functools.partial(ClassificationHead, classes=3)
    options = {'dim': 8, 'stack': stack, 'pool': pool, 'head': head, 'streaming': False, 'dtype': jnp.float32}
    return Model(1, inputs=inputs, rngs=nnx.Rngs(0), **options)


def test_blocks_are_given_the_context_of_patches():
    x, ctx = noise(2, 24, 3), Context.full(2, 24)
    ctx = dataclasses.replace(ctx, segments=jnp.ones_like(ctx.positions))
    made = model(lambda vocab, dim, rngs: patches(rngs=rngs), MeanPool())
    Reader.seen.clear()
    vectors, hidden = made.pooled(x, ctx), made.hidden(x, ctx)[0]
    assert Reader.seen == [(2, 3)] * 2 and hidden.shape == (2, 6, 8)
    np.testing.assert_allclose(vectors, hidden.mean(axis=1), rtol=1e-5)
    here = made.context(ctx, x)
    assert here.grid == (2, 3) and here.segments is None and here.positions.shape == (2, 6)
    assert made.context(here, x).positions.shape == (2, 6)
    assert [stage.value.shape[1] for stage in made.stages(x, ctx)] == [6] * len(list(made.stages(x, ctx)))


def test_a_class_token_is_read_by_its_place():
    x, ctx = noise(2, 24, 3), Context.full(2, 24)
    made = model(lambda vocab, dim, rngs: patches(rngs=rngs, class_token='first'), OneToken(0))
    hidden = made.hidden(x, ctx)[0]
    assert hidden.shape == (2, 7, 8)
    np.testing.assert_array_equal(made.pooled(x, ctx), hidden[:, 0])
    with pytest.raises(UserError, match='place of OneToken is 7; the rows have 7 tokens'):
        OneToken(7)(hidden, jnp.ones((2, 7), bool))


def test_wrong_sizes_are_named():
    with pytest.raises(UserError, match='patch is 4; it must divide both sides of an image, 4 x 6'):
        patches(patch=4)
    with pytest.raises(UserError, match='24 pixels; the inputs of the task are 24 of 1 numbers'):
        patches()(noise(1, 24, 1))
    with pytest.raises(UserError, match='24 pixels; the rows have 20 positions'):
        patches().context(Context.full(1, 20))
    with pytest.raises(UserError, match=r'Any mixes tokens on a grid, and ctx.grid is None; .*configs/images.py'):
        required_grid(Context.full(1, 4), 'Any')
    ctx = dataclasses.replace(Context.full(1, 6), grid=(2, 3))
    with pytest.raises(UserError, match='Any mixes tokens on a grid of 3 axes'):
        required_grid(ctx, 'Any', axes=3)
    with pytest.raises(UserError, match='12 positions; Any was given 6 tokens'):
        required_grid(dataclasses.replace(ctx, grid=(2, 6)), 'Any')


def test_a_map_of_patches_has_no_frame():
    assert PatchMap(3, 8, patch=2, rngs=nnx.Rngs(0)).linear.weight.shape == (12, 8)
