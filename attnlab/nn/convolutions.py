"""Convolutions of images, volumes, rows and their documents, channels last."""

import itertools
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from attnlab.errors import UserError
from attnlab.functional.documents import local_sum
from attnlab.functional.precision import wide_dtype
from attnlab.functional.recomputed import recomputed_method
from attnlab.module import Module
from attnlab.nn.initialization import Gaussian, Scaled
from attnlab.nn.norms import LayerNorm
from attnlab.nn.parameter import param
from attnlab.nn.projections import Linear, fan_in_normal
from attnlab.typing import Segments, Sequence

Image = Float[Array, 'b height width channels']
TokenGrid = Float[Array, 'b y x d']


class PatchMap(Module):
    """A learned linear map of patches that do not overlap: a convolution of `patch` x `patch` pixels with that stride.

    Rows and columns beyond the last whole patch are dropped. `start` is what the map starts from; `None`: attnlab's.
    Dosovitskiy et al. 2021, https://arxiv.org/abs/2010.11929.
    """

    axes: ClassVar[tuple[str | None, str | None]] = (None, 'embed')

    def __init__(self, channels: int, dim: int, *, patch: int, start: Scaled | Gaussian | None = None, rngs: nnx.Rngs):
        self.patch, initializer = patch, fan_in_normal if start is None else start.initializer()
        joined = patch * patch * channels
        self.linear = Linear(joined, dim, bias=True, initializer=initializer, axes=self.axes, rngs=rngs)

    def __call__(self, image: Image) -> TokenGrid:
        return self.linear(joined_blocks(image, self.patch))


class InnerPatchMap(PatchMap):
    """`PatchMap` within a mixer: it ends no residual branch, so that it is no map to `embed`."""

    axes = (None, None)


class Conv(Module):
    """A convolution of `width` x `width` pixels in steps of `step`, centred; pixels outside count as zero."""

    def __init__(self, channels: int, dim: int, *, width: int, step: int, rngs: nnx.Rngs):
        self.step = step
        fan_in = nnx.initializers.variance_scaling(1.0, 'fan_in', 'normal')
        taps = (width, width, channels, dim)
        self.taps = param(fan_in, taps, axes=(None, None, None, 'embed'), rngs=rngs)
        self.bias = param(nnx.initializers.zeros, (dim,), axes=('embed',), group='vector', rngs=rngs)

    def __call__(self, image: Image) -> TokenGrid:
        around = (self.taps.shape[0] // 2,) * 2
        y = jax.lax.conv_general_dilated(
            image,
            self.taps[...].astype(image.dtype),
            (self.step, self.step),
            (around, around),
            dimension_numbers=('NHWC', 'HWIO', 'NHWC'),
        )
        # Wide, so that the gradient of the bias is summed over places in float32.
        wide = y.astype(wide_dtype(y.dtype))
        return (wide + jnp.broadcast_to(self.bias[...].astype(wide.dtype), wide.shape)).astype(y.dtype)


class DepthwiseConv(Module):
    """A convolution of every channel by itself, `y_p = c + sum_o a_o x_{p+o}`, `o` less than half of `width` away.

    On `axes` axes, 2 or 3; what lies outside of the grid counts as zero. Sums are in float32 or better. Taps start as
    PyTorch's convolutions, uniform with variance `1 / (3 width^axes)`. There are `kernels` kernels, each for as many
    neighbouring channels; `None`: one a channel.

    Raises `UserError` for an even width, and for kernels that do not divide the channels.
    """

    def __init__(
        self,
        dim: int,
        *,
        width: int = 3,
        axes: int = 2,
        kernels: int | None = None,
        bias: bool = True,
        rngs: nnx.Rngs,
    ):
        kernels = dim if kernels is None else kernels
        if kernels < 1 or dim % kernels:
            raise UserError(f'kernels of DepthwiseConv is {kernels}; it must divide dim, which is {dim}')
        if width % 2 == 0:
            raise UserError(f'width of DepthwiseConv is {width}; it must be odd, to be centred')
        taps = nnx.initializers.variance_scaling(1 / 3, 'fan_in', 'uniform')
        shape = ((width,) * axes, (None,) * axes)
        self.shared = dim // kernels
        self.taps = param(taps, (*shape[0], kernels), axes=(*shape[1], 'mlp'), group='vector', rngs=rngs)
        zeros = nnx.initializers.zeros
        self.bias = param(zeros, (dim,), axes=('mlp',), group='vector', rngs=rngs) if bias else None

    def __call__(self, x: Float[Array, 'b *grid d']) -> Float[Array, 'b *grid d']:
        self.check_width(x, self.taps.shape[-1] * self.shared)
        return self._convolved(x)

    @recomputed_method
    def _convolved(self, x: Float[Array, 'b *grid d']) -> Float[Array, 'b *grid d']:
        width, grid = self.taps.shape[0], x.shape[1:-1]
        # One rounding at the end, as in `ShortConv`.
        wide = x.astype(wide_dtype(x.dtype))
        taps = self.taps[...].astype(wide.dtype)
        taps = taps if self.shared == 1 else jnp.repeat(taps, self.shared, axis=-1)
        around = jnp.pad(wide, ((0, 0), *((width // 2,) * 2 for _ in grid), (0, 0)))
        y = jnp.zeros_like(wide)
        for offset in itertools.product(range(width), repeat=len(grid)):
            part = tuple(slice(first, first + size) for first, size in zip(offset, grid, strict=True))
            y = y + around[(slice(None), *part)] * jnp.broadcast_to(taps[offset], wide.shape)
        if self.bias is not None:
            y = y + jnp.broadcast_to(self.bias[...].astype(y.dtype), y.shape)
        return y.astype(x.dtype)


class CentredConv(Module):
    """A depthwise convolution, `y_t = c + sum_i a_i x_{t - w // 2 + i}`, `0 <= i < w`, within the document.

    `width` is `w`; there are `kernels` kernels, each for as many neighbouring channels, `None`: one a channel. Taps
    start uniform with variance `1 / (3 width)`, as those of PyTorch's Conv1d; sums are in float32 or better.

    Raises `UserError` for an even width, and unless `kernels` divides `dim`.
    """

    def __init__(self, dim: int, *, width: int = 3, kernels: int | None = None, bias: bool = False, rngs: nnx.Rngs):
        kernels = dim if kernels is None else kernels
        if width < 1 or width % 2 == 0:
            raise UserError(f'the width of CentredConv is {width}; it must be odd')
        if kernels < 1 or dim % kernels:
            raise UserError(f'kernels of CentredConv is {kernels}; it must divide dim, which is {dim}')
        self.shared = dim // kernels
        start = nnx.initializers.variance_scaling(1 / 3, 'fan_in', 'uniform')
        self.taps = param(start, (width, kernels), axes=(None, 'heads'), group='vector', rngs=rngs)
        zeros = nnx.initializers.zeros
        self.bias = param(zeros, (dim,), axes=('heads',), group='vector', rngs=rngs) if bias else None

    @recomputed_method
    def __call__(self, x: Sequence, segments: Segments | None) -> Sequence:
        wide = wide_dtype(x.dtype)
        taps = jnp.repeat(self.taps[...].astype(wide), self.shared, axis=1)
        y = local_sum(x.astype(wide), taps[:, None, None], segments)
        if self.bias is not None:
            y = y + jnp.broadcast_to(self.bias[...].astype(wide), y.shape)
        return y.astype(x.dtype)


class DilatedConv(Module):
    """A convolution of every channel by itself along time, whose taps are `dilation` steps apart, centred or causal.

        y_t = c + sum_i a_i x_{t + dilation (i - o)},   0 <= i < width;   o = width - 1, or half of it where centred

    What lies outside of the row counts as zero. Sums are in float32 or better. Taps start as `DepthwiseConv`'s.

    Raises `UserError` for an even width that is to be centred.
    """

    def __init__(self, dim: int, *, width: int = 3, dilation: int = 1, causal: bool = True, rngs: nnx.Rngs):
        if not causal and width % 2 == 0:
            raise UserError(f'width of DilatedConv is {width}; it must be odd, to be centred')
        self.dilation, self.before = dilation, dilation * (width - 1 if causal else width // 2)
        taps = nnx.initializers.variance_scaling(1 / 3, 'fan_in', 'uniform')
        self.taps = param(taps, (width, dim), axes=(None, 'mlp'), group='vector', rngs=rngs)
        self.bias = param(nnx.initializers.zeros, (dim,), axes=('mlp',), group='vector', rngs=rngs)

    def __call__(self, x: Float[Array, 'b t d']) -> Float[Array, 'b t d']:
        self.check_width(x, self.taps.shape[1])
        return self._convolved(x)

    @recomputed_method
    def _convolved(self, x: Float[Array, 'b t d']) -> Float[Array, 'b t d']:
        width, steps = self.taps.shape[0], x.shape[1]
        wide = x.astype(wide_dtype(x.dtype))
        taps = self.taps[...].astype(wide.dtype)
        reach = self.dilation * (width - 1)
        padded = jnp.pad(wide, ((0, 0), (self.before, reach - self.before), (0, 0)))
        y = jnp.broadcast_to(self.bias[...].astype(wide.dtype), wide.shape)
        for place in range(width):
            first = place * self.dilation
            y = y + padded[:, first : first + steps] * jnp.broadcast_to(taps[place], wide.shape)
        return y.astype(x.dtype)


class NormedPatchMap(Module):
    """`PatchMap`, then a layer norm. Wang et al. 2021, https://arxiv.org/abs/2102.12122."""

    kind: ClassVar[type[PatchMap]] = PatchMap

    def __init__(self, channels: int, dim: int, *, patch: int, start: Scaled | Gaussian | None = None, rngs: nnx.Rngs):
        self.map = self.kind(channels, dim, patch=patch, start=start, rngs=rngs)
        self.norm = LayerNorm(dim, rngs=rngs)

    def __call__(self, image: Image) -> TokenGrid:
        return self.norm(self.map(image))


class InnerNormedPatchMap(NormedPatchMap):
    """`NormedPatchMap` within a mixer."""

    kind = InnerPatchMap


class PatchMerging(Module):
    """A layer norm of the joined channels of every `patch` x `patch` tokens, then a linear map without bias.

    Grids are filled up to whole blocks with zeros. `start` is what the map starts from; `None`: attnlab's.
    Liu et al. 2021, https://arxiv.org/abs/2103.14030.
    """

    def __init__(self, channels: int, dim: int, *, patch: int, start: Scaled | Gaussian | None = None, rngs: nnx.Rngs):
        self.patch, joined = patch, patch * patch * channels
        initializer = fan_in_normal if start is None else start.initializer()
        self.norm = LayerNorm(joined, rngs=rngs)
        self.linear = Linear(joined, dim, initializer=initializer, axes=(None, 'embed'), rngs=rngs)

    def __call__(self, image: Image) -> TokenGrid:
        around = [(0, 0), *((0, -size % self.patch) for size in image.shape[1:3]), (0, 0)]
        return self.linear(self.norm(joined_blocks(jnp.pad(image, around), self.patch)))


def joined_blocks(image: Image, side: int) -> TokenGrid:
    """Returns the channels of every `side` x `side` tokens in a row; what is beyond whole blocks is dropped."""
    b, height, width, channels = image.shape
    y, x = height // side, width // side
    blocks = image[:, : y * side, : x * side].reshape(b, y, side, x, side, channels).swapaxes(2, 3)
    return blocks.reshape(b, y, x, side * side * channels)
