"""Tokens that are a flattened image or volume, the last axis fastest."""

import math

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.functional.rotary import frequencies

Grid = tuple[int, int] | tuple[int, int, int]
"""Sizes of the axes, `(height, width)` or `(depth, height, width)`."""


def required_grid(ctx: Context, name: str, axes: int | None = None) -> Grid:
    """Returns the grid of a context.

    Args:
      ctx: the context of a call.
      name: of the class that needs it, for the message.
      axes: how many it must have; `None`: any number.

    Raises `UserError` where there is none, where it is of other tokens, or has another number of axes.
    """
    if ctx.grid is None:
        raise UserError(
            f'{name} mixes tokens on a grid, and ctx.grid is None; use inputs that declare one, such as Patches '
            '(configs/images.py)'
        )
    length = ctx.positions.shape[1]
    if math.prod(ctx.grid) != length:
        raise UserError(f'ctx.grid is {ctx.grid}, {math.prod(ctx.grid)} positions; {name} was given {length} tokens')
    if axes is not None and len(ctx.grid) != axes:
        raise UserError(f'{name} mixes tokens on a grid of {axes} axes; ctx.grid is {ctx.grid}')
    return ctx.grid


def coordinates(grid: Grid) -> Int[np.ndarray, 't axes']:
    """Returns the place of every token on every axis."""
    return np.stack(np.unravel_index(np.arange(math.prod(grid)), grid), axis=-1).astype(np.int32)


def numbered(grid: Grid) -> Int[np.ndarray, '*grid']:
    """Returns the number of the token at every place of a grid."""
    return np.arange(math.prod(grid)).reshape(grid)


def unflatten(x: Float[Array, 'b t ...'], grid: Grid) -> Array:
    """Returns tokens as a grid, `b *grid ...`."""
    return x.reshape(x.shape[0], *grid, *x.shape[2:])


def flatten(x: Array, grid: Grid) -> Float[Array, 'b t ...']:
    """Returns a grid `b *grid ...` as tokens; `grid` is its shape."""
    return x.reshape(x.shape[0], math.prod(grid), *x.shape[1 + len(grid) :])


def resampling(size: int, to: int) -> Float[np.ndarray, 'i j']:
    """Returns the weights by which `to` places on an axis are interpolated between `size` places that span the same.

    Place `i` lies at `(i + 1/2) size / to - 1/2`, and reads the two places around it, linearly; beyond the outermost
    ones it reads these. Where there are fewer places than before each is a mean of those nearest, by weights that fall
    to zero over the distance of two new places. Raises `UserError` for less than one place.
    """
    if min(size, to) < 1:
        raise UserError(f'{size} places on an axis cannot be interpolated at {to}; both must be at least 1')
    centres = (np.arange(to) + 0.5) * size / to - 0.5
    near = np.abs(centres[:, None] - np.arange(size)[None]) / max(size / to, 1.0)
    weights = np.maximum(1 - near, 0)
    return weights / weights.sum(axis=1, keepdims=True)


def resampled(x: Float[np.ndarray, 't d'], grid: Grid, to: Grid) -> Float[np.ndarray, 's d']:
    """Returns what lies on a grid, interpolated on another that spans the same; see `resampling`.

    Raises `UserError` for grids of different numbers of axes.
    """
    if len(grid) != len(to):
        raise UserError(f'what lies on a grid of {len(grid)} axes cannot be interpolated on one of {len(to)}')
    y = x.reshape(*grid, -1)
    for axis, (size, wanted) in enumerate(zip(grid, to, strict=True)):
        y = np.moveaxis(np.tensordot(resampling(size, wanted), y, axes=(1, axis)), 0, axis)
    return y.reshape(math.prod(to), -1).astype(x.dtype)


def axial_angles(
    grid: Grid, channels: int, base: float, dtype: DTypeLike, *, inclusive: bool = False, span: int | None = None
) -> Float[Array, 't r']:
    """Returns angles in radians, `r = channels / 2`: a part of equal size for every axis, one after the other.

    For place `p` on an axis and `n` channels an axis these are `p base^(-2 i / n)`, `0 <= i < n / 2`; `inclusive`, they
    are `p base^(-i / (n / 2 - 1))`, down to `p / base`. With a `span` an axis of any number `s` of places covers what
    `span` places do: `p` is `(i + 1/2) span / s - 1/2` for the place `i`.
    Raises `UserError` unless the channels are a multiple of twice the number of axes, and the base is positive.
    """
    axes = len(grid)
    if channels % (2 * axes):
        raise UserError(
            f'positions on the grid {grid} need a multiple of {2 * axes} channels, twice its axes; got {channels}'
        )
    pairs = jnp.arange(0, channels // axes, 2, dtype=dtype)
    places = jnp.asarray(coordinates(grid), dtype)
    if span is not None:
        places = (places + 0.5) * (span / jnp.asarray(grid, dtype))[None] - 0.5
    lowest = max(channels // axes - 2, 1) if inclusive else channels // axes
    angles = places[:, :, None] * frequencies(pairs, lowest, base)[None, None]
    return angles.reshape(places.shape[0], channels // 2)
