"""Factorised attention: every token reads a smaller map of the image, and what windows have in common."""

import itertools
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.functional import cores
from attnlab.functional.grids import flatten, required_grid, unflatten
from attnlab.functional.precision import wide_dtype
from attnlab.mixers.mixer import TwoSided
from attnlab.module import Module
from attnlab.nn.convolutions import DepthwiseConv, Image, InnerNormedPatchMap, TokenGrid
from attnlab.nn.projections import Linear
from attnlab.typing import Sequence


class WindowFactors(Module):
    """Keys and values that are means over windows: one for every place in a window, `side` x `side` of them.

        z = mean_n window_n    k, v = split((z W_1 + c) W_2 + e)    v = v + conv(v)

    A window takes every `dilation`-th token of `(side - 1) dilation + 1` rows and columns. Windows do not overlap;
    grids are filled up to whole ones by reflection, on the right and at the bottom. The maps are shared by all heads;
    `conv` is depthwise, 3 x 3, on the places.

    Raises `UserError` for a grid that a reflection does not fill up.
    """

    def __init__(self, dim: int, *, heads: int, side: int, dilation: int, rngs: nnx.Rngs):
        self.heads, self.side, self.dilation = heads, side, dilation
        self.first = Linear(dim // heads, dim // heads, bias=True, axes=(None, None), rngs=rngs)
        self.key_value = Linear(dim // heads, 2 * dim // heads, bias=True, axes=(None, None), rngs=rngs)
        self.conv = DepthwiseConv(dim, rngs=rngs)

    def __call__(self, image: Image) -> tuple[Float[Array, 'b n h k'], Float[Array, 'b n h k']]:
        means = self._means(image).astype(image.dtype)
        heads = means.reshape(*means.shape[:3], self.heads, -1)
        k, v = jnp.split(self.key_value(self.first(heads)), 2, axis=-1)
        v = v + self.conv(v.reshape(means.shape)).reshape(v.shape)
        return flatten(k, (self.side, self.side)), flatten(v, (self.side, self.side))

    def _means(self, image: Image) -> TokenGrid:
        span, grid = (self.side - 1) * self.dilation + 1, image.shape[1:3]
        missing = [-size % span for size in grid]
        if any(fill >= size for fill, size in zip(missing, grid, strict=True)):
            raise UserError(
                f'windows of {span} x {span} tokens cannot be filled up by reflection on a grid of {tuple(grid)}; '
                'use a smaller side or ratio'
            )
        wide = image.astype(wide_dtype(image.dtype))
        filled = jnp.pad(wide, ((0, 0), *((0, fill) for fill in missing), (0, 0)), mode='reflect')
        rows, columns = (size // span for size in filled.shape[1:3])
        windows = filled.reshape(image.shape[0], rows, span, columns, span, -1)
        return jnp.mean(windows[:, :, :: self.dilation, :, :: self.dilation], axis=(1, 3))


class FactorisedAttention(TwoSided):
    """Attention of one head to a smaller map of the image, and of `heads` to what windows have in common.

        y = W_o [softmax(q_0 k_0^T) v_0 | softmax(q_1 k_1^T) v_1 | softmax(q_2 k_2^T) v_2]    q = x W_q

    Channels are in three parts, an eighth, and twice seven sixteenths. Keys and values of the first are a
    `NormedPatchMap` of `ratio` x `ratio` tokens, mapped, the values with a depthwise convolution, 3 x 3, added; those
    of the others are `WindowFactors` of `x W`, convolved depthwise, 3 x 3, before `W`: without dilation, and with
    dilation `ratio`. A `ratio` of 1 has an eighth and seven eighths, without dilation. Scores are divided by the root
    of the channels.
    Qin et al. 2023, https://arxiv.org/abs/2312.08614.

    Raises `UserError` for a width whose parts do not divide by heads, and without a grid of two axes.

    Args:
      dim: model width.
      heads: of the second and third part, each.
      ratio: see above.
      side: of the windows, in tokens that are read.
      implementation: of the core; `None`: the default of the platform.
      rngs: draws the parameters.
    """

    convolves = True

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        ratio: int = 2,
        side: int = 7,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        shares = (1, 7) if ratio == 1 else (2, 7, 7)
        unit = dim // sum(shares)
        if dim % sum(shares) or 7 * unit % heads:
            raise UserError(
                f'FactorisedAttention has dim {dim} and {heads} heads; dim must be a multiple of {sum(shares)}, and '
                f'heads divide {7 * dim / sum(shares):g}, seven {sum(shares)}ths of it'
            )
        self.heads, self.implementation = heads, implementation
        self.parts = tuple(share * unit for share in shares)
        whole, local = self.parts[0], dim - self.parts[0]
        self.query = Linear(dim, dim, bias=True, rngs=rngs)
        self.reduction = InnerNormedPatchMap(whole, whole, patch=ratio, rngs=rngs)
        self.key_value = Linear(whole, 2 * whole, bias=True, rngs=rngs)
        self.value_conv = DepthwiseConv(whole, rngs=rngs)
        self.conv = DepthwiseConv(local, rngs=rngs)
        self.local = Linear(local, local, bias=True, rngs=rngs)
        self.factors: Any = nnx.List(
            [
                WindowFactors(part, heads=heads, side=side, dilation=dilation, rngs=rngs)
                for part, dilation in zip(self.parts[1:], (1, ratio), strict=False)
            ]
        )
        self.output = Linear(dim, dim, bias=True, axes=('heads', 'embed'), rngs=rngs)

    def __call__(self, x: Sequence, ctx: Context, state: None = None) -> tuple[Sequence, None]:
        grid = required_grid(ctx, type(self).__name__, axes=2)
        whole, image, (b, t, _) = self.parts[0], unflatten(x, grid), x.shape
        q = self.query(x)
        reads = [self._read(q[:, :, None, :whole], *self._reduced(image[..., :whole]))]
        source = self.local(self.conv(image[..., whole:]))
        rest = q[..., whole:].reshape(b, t, self.heads, -1)
        ends = list(itertools.accumulate(self.parts[1:], initial=0))
        for factors, (first, end) in zip(self.factors, itertools.pairwise(ends), strict=True):
            # Queries are divided inside of every head, keys and values before heads are.
            own = rest[..., first // self.heads : end // self.heads]
            reads.append(self._read(own, *factors(source[..., first:end])))
        return self.output(jnp.concatenate(reads, axis=-1)), None

    def _reduced(self, image: Image) -> tuple[Float[Array, 'b n 1 k'], Float[Array, 'b n 1 k']]:
        reduced = self.reduction(image)
        k, v = jnp.split(self.key_value(reduced), 2, axis=-1)
        k, v = (each.reshape(each.shape[0], -1, 1, each.shape[-1]) for each in (k, v + self.value_conv(v)))
        return k, v

    def _read(self, q: Float[Array, 'b t h k'], k: Float[Array, 'b n h k'], v: Float[Array, 'b n h k']) -> Sequence:
        y = cores.attention(q, k, v, causal=False, implementation=self.implementation)
        return y.reshape(*y.shape[:2], -1)
