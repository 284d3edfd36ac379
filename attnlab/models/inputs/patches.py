"""Images as tokens on a grid: patches, mapped by a linear map or convolutions, with positions of their own."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.functional.grids import Grid, flatten
from attnlab.models.inputs.inputs import Inputs
from attnlab.module import Module
from attnlab.nn.convolutions import Conv, Image, PatchMap, TokenGrid
from attnlab.nn.norms import LayerNorm
from attnlab.nn.parameter import param
from attnlab.nn.positions import GridSinusoids, LearnedPlaces
from attnlab.nn.projections import Linear
from attnlab.typing import Sequence

Pixels = Float[Array, 'b pixels channels']


class OverlappingMap(Module):
    """A convolution of `2 patch - 1` pixels in steps of `patch`, then a layer norm; pixels outside count as zero.

    Wang et al. 2022, https://arxiv.org/abs/2106.13797.
    """

    def __init__(self, channels: int, dim: int, *, patch: int, rngs: nnx.Rngs):
        self.conv = Conv(channels, dim, width=2 * patch - 1, step=patch, rngs=rngs)
        self.norm = LayerNorm(dim, rngs=rngs)

    def __call__(self, image: Image) -> TokenGrid:
        return self.norm(self.conv(image))


class ConvStem(Module):
    """Convolutions of 3 x 3 pixels in steps of 2, each doubling the channels up to `dim`, and a linear map.

        x <- gelu(norm(conv(x))) for every convolution,   y = x W + b

    Pixels outside count as zero. After every convolution the paper normalises over the batch and takes ReLU, where here
    are a layer norm and GELU, and its models have one layer less in return; the widths are those of its stem for
    patches of 16 pixels. Raises `UserError` unless `patch` is a power of two. Xiao et al. 2021,
    https://arxiv.org/abs/2106.14881.
    """

    def __init__(self, channels: int, dim: int, *, patch: int, rngs: nnx.Rngs):
        steps = patch.bit_length() - 1
        if patch != 2**steps or not steps:
            raise UserError(f'patch is {patch}; ConvStem halves an image several times: use 2, 4, 8 or 16')
        widths = [channels, *(max(1, dim >> (steps - step)) for step in range(1, steps)), dim]
        pairs = list(itertools.pairwise(widths))
        self.convs = nnx.List([Conv(before, after, width=3, step=2, rngs=rngs) for before, after in pairs])
        self.norms = nnx.List([LayerNorm(after, rngs=rngs) for _, after in pairs])
        self.linear = Linear(dim, dim, bias=True, axes=(None, 'embed'), rngs=rngs)

    def __call__(self, image: Image) -> TokenGrid:
        x = image
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = jax.nn.gelu(norm(conv(x)))
        return self.linear(x)


class Patches(Inputs):
    """Images as tokens: one for every patch, row by row, with positions added.

    Inputs are pixels, `b t channels`, row by row, `t` the height times the width. Blocks see a context of the tokens:
    positions along the rows, one document, and the grid of patches. With a class token among them they are no longer a
    grid. Dosovitskiy et al. 2021, https://arxiv.org/abs/2010.11929.

    Raises `UserError` for sides that are no multiples of `patch`, and for inputs of other sizes.

    Args:
      vocab: ignored; inputs share one signature.
      dim: model width.
      size: height and width in pixels.
      channels: numbers a pixel.
      patch: height and width of a patch in pixels.
      stem: maps an image to activations on the grid of patches, made as `stem(channels, dim, patch=, rngs=)`.
      positions: added to the patches: `GridSinusoids`, or made as `positions(dim, grid=, rngs=)`; `None`: none are.
      class_token: where a learned token is put, 'first' or 'middle' (after half of the patches, rounded down); `None`:
        there is none. `attnlab.nn.pools.OneToken` reads it.
      rngs: draws the parameters.
    """

    def __init__(
        self,
        vocab: int,
        dim: int,
        *,
        size: tuple[int, int],
        channels: int,
        patch: int = 1,
        stem: Callable[..., nnx.Module] = PatchMap,
        positions: GridSinusoids | Callable[..., nnx.Module] | None = LearnedPlaces,
        class_token: Literal['first', 'middle'] | None = None,
        rngs: nnx.Rngs,
    ):
        del vocab
        if size[0] % patch or size[1] % patch:
            raise UserError(f'patch is {patch}; it must divide both sides of an image, {size[0]} x {size[1]}')
        self.size, self.channels, self.patch = tuple(size), channels, patch
        self.patches = (size[0] // patch, size[1] // patch)
        self.stem: Any = stem(channels, dim, patch=patch, rngs=rngs)
        if positions is not None and not isinstance(positions, GridSinusoids):
            positions = positions(dim, grid=self.patches, rngs=rngs)
        self.positions: Any = positions
        self.class_place = class_place(self.patches, class_token)
        token = functools.partial(param, nnx.initializers.normal(0.02), axes=('embed',), group='embedding', rngs=rngs)
        self.class_token = None if class_token is None else token((dim,))
        self.grid = self.patches if class_token is None else None

    def __call__(self, tokens: Pixels, dtype: DTypeLike | None = None) -> Sequence:
        """Maps pixels, giving activations of type `dtype` (`None`: the inputs' own)."""
        pixels = math.prod(self.size)
        if tokens.shape[1:] != (pixels, self.channels):
            raise UserError(
                f'model.inputs.size is {self.size} and channels {self.channels}, {pixels} pixels; the inputs of the '
                f'task are {tokens.shape[1]} of {tokens.shape[2]} numbers'
            )
        image = tokens.reshape(tokens.shape[0], *self.size, self.channels)
        x = flatten(self.stem(image if dtype is None else image.astype(dtype)), self.patches)
        if self.positions is not None:
            here = self._places(x.shape[-1])
            x = x + jnp.broadcast_to(here.astype(x.dtype), x.shape)
        if self.class_token is None:
            return x
        token = jnp.broadcast_to(self.class_token[...].astype(x.dtype), (x.shape[0], 1, x.shape[2]))
        return jnp.concatenate([x[:, : self.class_place], token, x[:, self.class_place :]], axis=1)

    def context(self, ctx: Context) -> Context:
        """The context of the tokens; `ctx` may be that of the pixels, or of the tokens already."""
        tokens = math.prod(self.patches) + (self.class_token is not None)
        rows, length = ctx.positions.shape
        if length not in (tokens, math.prod(self.size)):
            raise UserError(
                f'model.inputs.size is {self.size}, {math.prod(self.size)} pixels; the rows have {length} positions'
            )
        positions = Context.full(rows, tokens).positions
        return dataclasses.replace(ctx, positions=positions, segments=None, grid=self.grid)

    def grid_of(self, size: tuple[int, int]) -> tuple[int, int]:
        """The grid of images of another size, in patches as large as before.

        Raises `UserError` for sides that are no multiples of a patch, and with a class token.
        """
        if self.class_token is not None:
            raise UserError('Patches with a class token cannot be resized; use token=mean')
        if size[0] % self.patch or size[1] % self.patch:
            raise UserError(f'images of {size[0]} x {size[1]} pixels hold no whole patches of {self.patch} pixels')
        return size[0] // self.patch, size[1] // self.patch

    def resize(self, size: tuple[int, int]) -> None:
        """Takes images of another size from now on, in patches as large as before.

        Learned positions are interpolated, by where places lie in an image (Dosovitskiy et al. 2021, section 3.2);
        others go on as they are. Raises `UserError` where `grid_of` does. `Model.resize` takes a whole model.
        """
        before, self.patches = self.patches, self.grid_of(size)
        self.size, self.grid = tuple(size), self.patches
        if isinstance(self.positions, LearnedPlaces):
            self.positions.resample(before, self.patches)

    def _places(self, dim: int) -> Float[Array, 't d']:
        if isinstance(self.positions, GridSinusoids):
            return self.positions.encode(self.patches, dim)
        return self.positions()


class ToldPatches(Patches):
    """Images whose layers are told what a row is about, by numbers that stand behind those of its pixels.

        c = silu(u W_1 + b_1) W_2 + b_2

    Inputs are `b t (channels + told)`; `u` is the last `told` numbers of the first pixel, and `c` the condition of the
    context, of the model's width, which `attnlab.blocks.adaptive.AdaptiveBlock` reads. Pixels are mapped without them.

    Args:
      vocab, dim, size, channels, patch, stem, positions, class_token, rngs: as in `Patches`.
      told: numbers behind those of a pixel.
    """

    def __init__(
        self,
        vocab: int,
        dim: int,
        *,
        size: tuple[int, int],
        channels: int,
        told: int,
        patch: int = 1,
        stem: Callable[..., nnx.Module] = PatchMap,
        positions: GridSinusoids | Callable[..., nnx.Module] | None = LearnedPlaces,
        class_token: Literal['first', 'middle'] | None = None,
        rngs: nnx.Rngs,
    ):
        super().__init__(
            vocab,
            dim,
            size=size,
            channels=channels,
            patch=patch,
            stem=stem,
            positions=positions,
            class_token=class_token,
            rngs=rngs,
        )
        self.told = told
        self.first = Linear(told, dim, bias=True, axes=(None, 'embed'), rngs=rngs)
        self.second = Linear(dim, dim, bias=True, axes=('embed', None), rngs=rngs)

    def __call__(self, tokens: Pixels, dtype: DTypeLike | None = None) -> Sequence:
        """Maps pixels, giving activations of type `dtype` (`None`: the inputs' own)."""
        return super().__call__(tokens[..., : -self.told], dtype)

    def condition(self, tokens: Pixels) -> Float[Array, 'b m']:
        """The condition of every row, in float32."""
        return self.second(jax.nn.silu(self.first(tokens[:, 0, -self.told :].astype(jnp.float32))))


def class_place(grid: Grid, where: Literal['first', 'middle'] | None) -> int:
    """The index of the class token among the tokens of a grid of patches."""
    return math.prod(grid) // 2 if where == 'middle' else 0
