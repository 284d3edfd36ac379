"""Pyramids: resolutions one after another, against their parts run by hand."""

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
from attnlab.mixers.spatial.windows import WindowAttention
from attnlab.models.heads.classification import ClassificationHead
from attnlab.models.inputs.embedding import Embedding
from attnlab.models.inputs.patches import Patches
from attnlab.models.model import Model
from attnlab.models.predictor import one_stack
from attnlab.models.pyramid import Pyramid, Resolution
from attnlab.models.stack import Stack
from attnlab.nn.convolutions import NormedPatchMap, PatchMerging
from attnlab.nn.pools import MeanPool
from attnlab.nn.positions import GridSinusoids, LearnedPlaces
from attnlab.testing.noise import noise

stack = functools.partial(
    Stack, depth=1, blocks=(functools.partial(Block, mixer=functools.partial(WindowAttention, heads=2, side=3)),)
)
CTX = dataclasses.replace(Context.full(1, 35), grid=(5, 7))


@functools.cache
def pyramid():
    """Three resolutions: 5 x 7, as it is; 3 x 4, filled up; 1 x 2, cut, with positions."""
    resolutions = (
        functools.partial(Resolution, stack=stack),
        functools.partial(Resolution, width=2, stack=stack, merge=PatchMerging),
        functools.partial(
            Resolution,
            width=3,
            stack=stack,
            merge=NormedPatchMap,
            positions=functools.partial(LearnedPlaces, grid=(1, 2)),
        ),
    )
    return Pyramid(8, resolutions=resolutions, rngs=nnx.Rngs(0))


def test_resolutions_follow_one_another():
    subject, x = pyramid(), noise(1, 35, 8)
    whole, middle, last = subject.resolutions
    x, _ = whole.stack(x, CTX)
    for resolution, grid, cut in ((middle, (3, 4), (5, 7)), (last, (1, 2), (3, 4))):
        image = x.reshape(1, *cut, -1)
        merged = resolution.merge(image).reshape(1, grid[0] * grid[1], -1)
        if resolution is last:
            merged = merged + resolution.positions()[None]
        x, _ = resolution.stack(merged, dataclasses.replace(Context.full(1, merged.shape[1]), grid=grid))
    found, state = subject(noise(1, 35, 8), CTX)
    np.testing.assert_allclose(found, x, rtol=1e-5, atol=1e-6)
    assert state is None and found.shape == (1, 2, 24) and subject.dim == 24
    assert subject.context(CTX).grid == (1, 2)
    *_, stage = subject.stages(noise(1, 35, 8), CTX)
    np.testing.assert_array_equal(stage.value, found)
    assert stage.name == 'resolutions[2].output'


def test_merging_joins_blocks():
    merge = PatchMerging(2, 3, patch=2, rngs=nnx.Rngs(0))
    image = noise(1, 3, 4, 2)
    full = np.pad(np.asarray(image)[0], ((0, 1), (0, 0), (0, 0)))
    joined = np.stack([[full[2 * y : 2 * y + 2, 2 * x : 2 * x + 2].reshape(-1) for x in range(2)] for y in range(2)])
    apart = joined - joined.mean(axis=-1, keepdims=True)
    normed = apart / np.sqrt((apart**2).mean(axis=-1, keepdims=True) + 1e-5)
    expected = normed @ np.asarray(merge.linear.weight[...])
    with jax.default_matmul_precision('highest'):
        np.testing.assert_allclose(merge(image)[0], expected, rtol=1e-5, atol=1e-6)
    assert merge.linear.bias is None


def test_sinusoids_are_of_the_own_grid():
    resolution = Resolution(8, before=8, stack=stack, merge=PatchMerging, positions=GridSinusoids(), rngs=nnx.Rngs(0))
    after, x = resolution.context(CTX), noise(1, 35, 8)
    plain = resolution.merge(x.reshape(1, 5, 7, 8)).reshape(1, 12, 8)
    added = resolution.merged(x, CTX, after) - plain
    np.testing.assert_allclose(added[0], GridSinusoids().encode((3, 4), 8), rtol=1e-5, atol=1e-5)


def images_of(size):
    """A model of images, and the grids of its three resolutions, two of which have positions of their own."""
    grids = [tuple(side // 2**count for side in size) for count in (1, 2, 3)]
    resolutions = [functools.partial(Resolution, stack=stack)]
    for width, grid in enumerate(grids[1:], start=2):
        places = functools.partial(LearnedPlaces, grid=grid)
        resolutions.append(
            functools.partial(Resolution, width=width, stack=stack, merge=NormedPatchMap, positions=places)
        )
    model = Model(
        3,
        dim=8,
        stack=functools.partial(Pyramid, resolutions=tuple(resolutions)),
        head=functools.partial(ClassificationHead, classes=3),
        inputs=functools.partial(Patches, size=size, channels=1, patch=2),
        pool=MeanPool(),
        streaming=False,
        dtype=jnp.float32,
        rngs=nnx.Rngs(0),
    )
    return model, grids


def smooth(grid, dim):
    """Numbers by where a place lies in an image, another for every channel."""
    y, x = np.meshgrid(*((np.arange(side) + 0.5) / side for side in grid), indexing='ij')
    return np.sin(y.reshape(-1, 1) + np.arange(dim)) + x.reshape(-1, 1)


@pytest.mark.parametrize('size', [(64, 64), (16, 48)])
def test_a_model_is_resized_with_the_positions_of_every_resolution(size):
    """It has the shapes of one made at that size, and positions that say where in an image they lie still do."""
    (model, grids), (other, wanted) = images_of((32, 32)), images_of(size)
    parts = (model.embedding, *model.stack.resolutions[1:])
    for part, grid in zip(parts, grids, strict=True):
        part.positions.weight[...] = jnp.asarray(smooth(grid, part.positions.weight.shape[1]))
    model.resize(size)
    shapes = [jax.tree.map(jnp.shape, nnx.state(each, nnx.Param)) for each in (model, other)]
    assert shapes[0] == shapes[1]
    for part, grid in zip(parts, wanted, strict=True):
        found = np.asarray(part.positions()).reshape(*grid, -1)
        expected = smooth(grid, found.shape[-1]).reshape(found.shape)
        # Beyond the outermost places positions are theirs.
        inside = (slice(1, -1), slice(1, -1))
        np.testing.assert_allclose(found[inside], expected[inside], atol=0.02)
    pixels = jnp.zeros((1, size[0] * size[1], 1))
    hidden = jax.eval_shape(lambda: model.hidden(pixels, Context.full(1, pixels.shape[1]))[0])
    assert hidden.shape == (1, size[0] * size[1] // 64, 24)


def test_a_model_that_cannot_be_resized_says_why():
    model, _ = images_of((32, 32))
    with pytest.raises(UserError, match='images of 4 x 7 pixels hold no whole patches of 2 pixels'):
        model.resize((4, 7))
    with pytest.raises(UserError, match=r'a grid of \(1, 2\) has no blocks of 2 x 2; use fewer resolutions'):
        model.resize((4, 8))
    assert model.embedding.size == (32, 32) and model.stack.resolutions[1].positions.weight.shape == (64, 16)
    model.embedding.resize((64, 64))
    with pytest.raises(UserError, match=r'positions of a resolution are for 64 places; its grid is \(16, 16\)'):
        jax.eval_shape(lambda: model.hidden(jnp.zeros((1, 64 * 64, 1)), Context.full(1, 64 * 64))[0])
    model.embedding = Embedding(3, 8, rngs=nnx.Rngs(0))
    with pytest.raises(UserError, match='the inputs of the model are Embedding, not Patches of images'):
        model.resize((8, 8))


def test_mistakes_are_named():
    with pytest.raises(UserError, match='a pyramid needs at least one resolution'):
        Pyramid(8, resolutions=(), rngs=nnx.Rngs(0))
    with pytest.raises(UserError, match='a resolution of width 16 behind one of 8 needs merge, such as PatchMerging'):
        Resolution(8, before=8, width=2, stack=stack, rngs=nnx.Rngs(0))
    with pytest.raises(UserError, match=r'a grid of \(1, 2\) has no blocks of 2 x 2; use fewer resolutions'):
        pyramid().resolutions[2].context(dataclasses.replace(Context.full(1, 2), grid=(1, 2)))
    with pytest.raises(UserError, match='cannot be streamed'):
        pyramid()(noise(1, 35, 8), CTX, ())
    with pytest.raises(UserError, match='cannot be streamed'):
        pyramid().init_state(1, 35, jnp.float32)
    with pytest.raises(UserError, match='the model is a Pyramid; only the layers of one Stack can be'):
        one_stack(pyramid())
