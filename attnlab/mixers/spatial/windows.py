"""Attention among the tokens of windows and neighbourhoods of a grid."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.functional import cores
from attnlab.functional.grids import Grid, coordinates, flatten, required_grid, unflatten
from attnlab.functional.lookup import taken
from attnlab.functional.precision import wide_dtype
from attnlab.mixers.mixer import TwoSided
from attnlab.nn.heads import head_channels
from attnlab.nn.parameter import param
from attnlab.nn.projections import Linear
from attnlab.typing import Sequence


class WindowAttention(TwoSided):
    """Softmax attention inside windows of `side` x `side` tokens that do not overlap, with a relative bias.

        y_i = W_o sum_j softmax_j(q_i . k_j / sqrt(key_dim) + b_{h, i - j}) v_j,   j in the window of i

    `b` has a learned number for every head and offset, and starts normal with deviation 0.02. `shifted`
    windows start half a side above and left of the grid: in layers that alternate, windows exchange information. Grids
    are filled up to whole windows with tokens that nobody reads; on a grid no larger than a window on one axis the
    window is as large as that axis, and not shifted. What a window forbids has weight zero, where the released code
    subtracts 100. Liu et al. 2021, https://arxiv.org/abs/2103.14030.

    Raises `UserError` for heads that do not divide `dim`, and without a grid of two axes.

    Args:
      dim: model width.
      heads: number of heads.
      side: of a window, in tokens.
      shifted: whether windows are shifted by half of it.
      implementation: of the core; `None`: the default of the platform.
      rngs: draws the parameters.
    """

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        side: int = 7,
        shifted: bool = False,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        self.heads, self.key_dim = heads, head_channels(dim, heads)
        self.side, self.shifted, self.implementation = side, shifted, implementation
        self.qkv = Linear(dim, 3 * dim, bias=True, rngs=rngs)
        self.output = Linear(dim, dim, bias=True, axes=('heads', 'embed'), rngs=rngs)
        self.bias = offset_table(side, heads, rngs)

    def __call__(self, x: Sequence, ctx: Context, state: None = None) -> tuple[Sequence, None]:
        grid = required_grid(ctx, type(self).__name__, axes=2)
        side = min(self.side, *grid)
        shift = self.side // 2 if self.shifted and min(grid) > self.side else 0
        whole = (-(-grid[0] // side) * side, -(-grid[1] // side) * side)
        places = coordinates((side, side))
        bias = offset_bias(self.bias[...], places[:, None] - places[None], self.side).astype(wide_dtype(x.dtype))
        q, k, v = (self._windows(part, grid, whole, side, shift) for part in jnp.split(self.qkv(x), 3, axis=-1))
        segments = _regions(grid, whole, side, shift)
        y = cores.attention(
            q,
            k,
            v,
            causal=False,
            segments=None if segments is None else jnp.asarray(np.tile(segments, (x.shape[0], 1))),
            bias=bias[None],
            implementation=self.implementation,
        )
        return self.output(self._tokens(y.reshape(*y.shape[:2], -1), x.shape[0], grid, whole, side, shift)), None

    def _windows(self, x: Sequence, grid: Grid, whole: Grid, side: int, shift: int) -> Float[Array, 'n s h k']:
        """Tokens by window: those of a row of the batch follow one another."""
        around = [(0, 0), *((0, full - size) for full, size in zip(whole, grid, strict=True)), (0, 0)]
        x = jnp.pad(unflatten(x, grid), around)
        x = jnp.roll(x, (-shift, -shift), axis=(1, 2)) if shift else x
        rows, columns = (size // side for size in whole)
        x = x.reshape(-1, rows, side, columns, side, x.shape[-1]).swapaxes(2, 3)
        return x.reshape(-1, side * side, self.heads, self.key_dim)

    def _tokens(self, y: Array, batch: int, grid: Grid, whole: Grid, side: int, shift: int) -> Sequence:
        """The inverse of `_windows`."""
        rows, columns = (size // side for size in whole)
        y = y.reshape(batch, rows, columns, side, side, -1).swapaxes(2, 3).reshape(batch, *whole, -1)
        y = jnp.roll(y, (shift, shift), axis=(1, 2)) if shift else y
        return flatten(y[:, : grid[0], : grid[1]], grid)


class NeighbourhoodAttention(TwoSided):
    """Softmax attention of every token to the `side` x `side` tokens nearest to it, with a relative bias.

    On an axis token `i` of `L` reads `side` tokens from `clip(i - side // 2, 0, L - side)` on: at a border the
    neighbourhood is moved inwards, not cut. With a `dilation` of more than 1 this holds among the tokens whose places
    are equal modulo it. Weights are those of `WindowAttention`. Hassani et al. 2023,
    https://arxiv.org/abs/2204.07143; dilated: Hassani and Shi 2022, https://arxiv.org/abs/2209.15001.

    Raises `UserError` for heads that do not divide `dim`, without a grid of two axes, and for a grid with an axis
    shorter than `side * dilation`.

    Args:
      dim: model width.
      heads: number of heads.
      side: of a neighbourhood, in tokens.
      dilation: distance of neighbours.
      rngs: draws the parameters.
    """

    def __init__(self, dim: int, *, heads: int, side: int = 7, dilation: int = 1, rngs: nnx.Rngs):
        self.heads, self.key_dim = heads, head_channels(dim, heads)
        self.side, self.dilation = side, dilation
        self.qkv = Linear(dim, 3 * dim, bias=True, rngs=rngs)
        self.output = Linear(dim, dim, bias=True, axes=('heads', 'embed'), rngs=rngs)
        self.bias = offset_table(side, heads, rngs)

    def __call__(self, x: Sequence, ctx: Context, state: None = None) -> tuple[Sequence, None]:
        grid = required_grid(ctx, type(self).__name__, axes=2)
        if min(grid) < self.side * self.dilation:
            raise UserError(
                f'NeighbourhoodAttention has side {self.side} and dilation {self.dilation}; every axis of the grid '
                f'must have at least {self.side * self.dilation} tokens, and it is {grid}'
            )
        keys, offsets = neighbours(grid, self.side, self.dilation)
        shape = (*x.shape[:2], self.heads, self.key_dim)
        q, k, v = (part.reshape(shape) for part in jnp.split(self.qkv(x), 3, axis=-1))
        wide = wide_dtype(x.dtype)
        scores = jnp.einsum('b t h k, b t n h k -> b h t n', q, taken(k, keys, 1), preferred_element_type=wide)
        bias = offset_bias(self.bias[...], offsets, self.side).astype(wide)
        weights = jax.nn.softmax(scores * self.key_dim**-0.5 + bias[None], axis=-1)
        y = jnp.einsum('b h t n, b t n h k -> b t h k', weights.astype(x.dtype), taken(v, keys, 1))
        return self.output(y.reshape(x.shape)), None


def neighbours(grid: Grid, side: int, dilation: int) -> tuple[Int[np.ndarray, 't n'], Int[np.ndarray, 't n axes']]:
    """Returns the index of every neighbour of every token, and its offset from it in neighbours."""
    starts = []
    for size in grid:
        places = np.arange(size)
        remainder, step = places % dilation, places // dilation
        count = (size - remainder + dilation - 1) // dilation
        starts.append(np.clip(step - side // 2, 0, count - side) * dilation + remainder)
    window = coordinates((side,) * len(grid)) * dilation  # type: ignore[arg-type]
    places = coordinates(grid)
    first = np.stack([start[places[:, axis]] for axis, start in enumerate(starts)], axis=-1)
    found = first[:, None] + window[None]
    index = np.ravel_multi_index(tuple(np.moveaxis(found, -1, 0)), grid)
    return index.astype(np.int32), ((places[:, None] - found) // dilation).astype(np.int32)


def offset_table(side: int, heads: int, rngs: nnx.Rngs) -> nnx.Param:
    """A learned number for every offset on two axes, each less than `side` either way, and every head."""
    shape = ((2 * side - 1) ** 2, heads)
    return param(nnx.initializers.normal(0.02), shape, axes=(None, 'heads'), group='vector', rngs=rngs)


def offset_bias(table: Float[Array, 'r h'], offsets: Int[np.ndarray, 't s axes'], side: int) -> Float[Array, 'h t s']:
    """Returns the numbers of a table made for `side` at offsets of queries from keys."""
    width = 2 * side - 1
    rows = (offsets[..., 0] + side - 1) * width + offsets[..., 1] + side - 1
    return jnp.moveaxis(taken(table, rows, 0), -1, 0)


def _regions(grid: Grid, whole: Grid, side: int, shift: int) -> Int[np.ndarray, 'n s'] | None:
    """Which tokens of a window see each other: those of equal numbers; `None`: all do.

    Parts that a shift has brought together from opposite borders are apart, and what a grid was filled up with is 0.
    """
    if not shift and grid == whole:
        return None
    numbers = np.zeros(whole, np.int32)
    parts = [[slice(0, -side), slice(-side, -shift), slice(-shift, None)] if shift else [slice(None)]] * 2
    for row, vertical in enumerate(parts[0]):
        for column, horizontal in enumerate(parts[1]):
            numbers[vertical, horizontal] = 1 + 3 * row + column
    there = np.zeros(whole, bool)
    there[: grid[0], : grid[1]] = True
    numbers = np.where(np.roll(there, (-shift, -shift), axis=(0, 1)), numbers, 0)
    rows, columns = (size // side for size in whole)
    return numbers.reshape(rows, side, columns, side).swapaxes(1, 2).reshape(-1, side * side)
