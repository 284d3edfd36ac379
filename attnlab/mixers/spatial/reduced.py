"""Attention of every token of a grid to a smaller map of it."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float

from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.functional import cores
from attnlab.functional.grids import flatten, required_grid, unflatten
from attnlab.functional.precision import wide_dtype
from attnlab.mixers.mixer import TwoSided
from attnlab.module import Module
from attnlab.nn.activations import gelu_exact
from attnlab.nn.convolutions import Image, InnerPatchMap, TokenGrid
from attnlab.nn.heads import head_channels
from attnlab.nn.initialization import Gaussian, Scaled
from attnlab.nn.norms import LayerNorm
from attnlab.nn.projections import Linear
from attnlab.typing import Sequence


class StridedReduction(Module):
    """A convolution of `ratio` x `ratio` tokens in steps of `ratio`, then a layer norm; a ratio of 1 does nothing.

    Rows and columns beyond the last whole block are dropped. `start` is what the convolution starts from; `None`:
    attnlab's. Wang et al. 2021, https://arxiv.org/abs/2102.12122.
    """

    def __init__(self, dim: int, *, ratio: int = 2, start: Scaled | Gaussian | None = None, rngs: nnx.Rngs):
        self.ratio = ratio
        self.conv: Any = None if ratio == 1 else InnerPatchMap(dim, dim, patch=ratio, start=start, rngs=rngs)
        self.norm: Any = None if ratio == 1 else LayerNorm(dim, rngs=rngs)

    def __call__(self, image: Image) -> TokenGrid:
        check_sides(image.shape[1:3], self.ratio)
        return image if self.conv is None else self.norm(self.conv(image))


class PooledReduction(Module):
    """Means over a grid of `side` x `side` bins, a linear map, a layer norm and GELU.

    Bin `i` of an axis of `L` tokens holds those from `floor(i L / side)` to `ceil((i + 1) L / side)`, so that bins may
    overlap, and a small grid is repeated. Wang et al. 2022, https://arxiv.org/abs/2106.13797.
    """

    def __init__(self, dim: int, *, side: int = 7, rngs: nnx.Rngs):
        self.side = side
        self.linear = Linear(dim, dim, bias=True, axes=('embed', None), rngs=rngs)
        self.norm = LayerNorm(dim, rngs=rngs)

    def __call__(self, image: Image) -> TokenGrid:
        wide = image.astype(wide_dtype(image.dtype))
        rows, columns = (jnp.asarray(adaptive_bins(size, self.side), wide.dtype) for size in image.shape[1:3])
        means = jnp.einsum('i y, b y x d, j x -> b i j d', rows, wide, columns).astype(image.dtype)
        return gelu_exact(self.norm(self.linear(means)))


def adaptive_bins(size: int, bins: int) -> Float[np.ndarray, 'i y']:
    """Returns the weights of the means of `PooledReduction` on one axis."""
    weights = np.zeros((bins, size))
    for i in range(bins):
        start, stop = i * size // bins, -(-(i + 1) * size // bins)
        weights[i, start:stop] = 1 / (stop - start)
    return weights


class ReducedAttention(TwoSided):
    """Softmax attention whose keys and values come from a smaller map of the grid.

        y = W_o softmax(q k^T / sqrt(key_dim)) v,   q = x W_q,   (k, v) = reduction(x) W_kv

    Maps of queries, keys and values have biases. Wang et al. 2021, https://arxiv.org/abs/2102.12122.

    Raises `UserError` for heads that do not divide `dim`, and without a grid of two axes.

    Args:
      dim: model width.
      heads: number of heads.
      reduction: makes the map of the grid to a smaller one, as `reduction(dim, rngs=rngs)`.
      implementation: of the core; `None`: the default of the platform.
      rngs: draws the parameters.
    """

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        reduction: Callable[..., nnx.Module] = StridedReduction,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        self.heads, self.key_dim = heads, head_channels(dim, heads)
        self.implementation = implementation
        self.query = Linear(dim, dim, bias=True, rngs=rngs)
        self.reduction: Any = reduction(dim, rngs=rngs)
        self.key_value = Linear(dim, 2 * dim, bias=True, rngs=rngs)
        self.output = Linear(dim, dim, bias=True, axes=('heads', 'embed'), rngs=rngs)

    def __call__(self, x: Sequence, ctx: Context, state: None = None) -> tuple[Sequence, None]:
        grid = required_grid(ctx, type(self).__name__, axes=2)
        reduced = self.reduction(unflatten(x, grid))
        k, v = jnp.split(self.key_value(flatten(reduced, reduced.shape[1:3])), 2, axis=-1)
        q, k, v = (y.reshape(*y.shape[:2], self.heads, self.key_dim) for y in (self.query(x), k, v))
        y = cores.attention(q, k, v, causal=False, implementation=self.implementation)
        return self.output(y.reshape(x.shape)), None


class EmbeddingFreeAttention(TwoSided):
    """Softmax attention without maps of queries, keys and values; keys are values.

        y = W_o softmax(x u^T / sqrt(key_dim)) u,   u = pool(x) W + c

    `pool` takes means of blocks of `ratio` x `ratio` tokens, and drops rows and columns beyond the last whole block. It
    has no parameters, so that a trained model can be evaluated at another ratio, with `factor` times as much reduction.
    Yu et al. 2024, https://arxiv.org/abs/2407.17261.

    Raises `UserError` for heads that do not divide `dim`, without a grid of two axes, and for one with an axis shorter
    than a block.

    Args:
      dim: model width.
      heads: number of heads.
      ratio: side of the blocks in training.
      factor: by which it is multiplied, for evaluation with fewer keys.
      implementation: of the core; `None`: the default of the platform.
      rngs: draws the parameters.
    """

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        ratio: int = 2,
        factor: int = 1,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        self.heads, self.key_dim = heads, head_channels(dim, heads)
        self.ratio, self.implementation = ratio * factor, implementation
        self.linear = Linear(dim, dim, bias=True, rngs=rngs)
        self.output = Linear(dim, dim, bias=True, axes=('heads', 'embed'), rngs=rngs)

    def __call__(self, x: Sequence, ctx: Context, state: None = None) -> tuple[Sequence, None]:
        grid = required_grid(ctx, type(self).__name__, axes=2)
        check_sides(grid, self.ratio)
        rows, columns = (size // self.ratio for size in grid)
        image = unflatten(x.astype(wide_dtype(x.dtype)), grid)[:, : rows * self.ratio, : columns * self.ratio]
        blocks = image.reshape(x.shape[0], rows, self.ratio, columns, self.ratio, x.shape[-1])
        pooled = self.linear(jnp.mean(blocks, axis=(2, 4)).reshape(x.shape[0], rows * columns, -1).astype(x.dtype))
        q, k = (y.reshape(*y.shape[:2], self.heads, self.key_dim) for y in (x, pooled))
        y = cores.attention(q, k, k, causal=False, implementation=self.implementation)
        return self.output(y.reshape(x.shape)), None


def check_sides(grid: tuple[int, ...], ratio: int) -> None:
    """Raises `UserError` for a grid with an axis shorter than a block."""
    if min(grid) < ratio:
        raise UserError(f'the ratio of reduction is {ratio}; the grid is {tuple(grid)}, and no axis may be shorter')
