"""What mixes tokens on a grid."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.functional.grids import Grid
from attnlab.mixers.mixer import TwoSided
from attnlab.testing.contract.subject import Make, Subject, full, require
from attnlab.testing.noise import noise
from attnlab.typing import Sequence, State

GRIDS: tuple[Grid, ...] = ((4, 6), (6, 4), (5, 7), (3, 4, 5))
"""Neither square nor multiples of one window; the last is a volume."""


class OnGrid(TwoSided):
    """A mixer whose tokens lie on the most nearly square grid of their number, wider than high, unless told otherwise.

    It lets a mixer that needs `ctx.grid` be asked what every mixer is asked.
    """

    def __init__(self, mixer: nnx.Module):
        self.mixer: Any = mixer

    def __call__(self, x: Sequence, ctx: Context, state: State | None = None) -> tuple[Sequence, State | None]:
        grid = nearly_square(x.shape[1]) if ctx.grid is None else ctx.grid
        return self.mixer(x, dataclasses.replace(ctx, grid=grid), state)


def nearly_square(length: int) -> tuple[int, int]:
    """The height and width of `length` tokens whose sides differ least, the width the larger."""
    height = next(side for side in range(math.isqrt(length), 0, -1) if length % side == 0)
    return height, length // height


def on_grid(make: Make) -> Make:
    """Makes what `make` makes, on grids."""

    @functools.wraps(make)
    def made(*args: Any, **options: Any) -> OnGrid:
        return OnGrid(make(*args, **options))

    return made


def check_grids(subject: Subject) -> None:
    """Rows on grids of several shapes are served, or refused in words; the shape matters, and its lack is an error.

    The first two must be served. Which axis is which no mixer at large can be asked: that is for tests of equations.
    """
    found = {grid: _on(subject, grid) for grid in GRIDS}
    for grid in GRIDS[:2]:
        require(found[grid] is not None, f'grids: {grid} is refused; choose sizes for tests (`small`) that suit it')
    wide, high = found[GRIDS[0]], found[GRIDS[1]]
    same = wide is not None and high is not None and np.array_equal(wide, high)
    require(not same, f'grids: 24 tokens give the same on {GRIDS[0]} as on {GRIDS[1]}')
    try:
        jax.eval_shape(lambda x: subject.mixer.mixer(x, full())[0], subject.x())
    except UserError as error:
        require('ctx.grid is None' in str(error), f'grids: without a grid it says {error}')
    else:
        require(False, 'grids: without ctx.grid it gives an output; it must raise UserError')


def check_sparse(subject: Subject) -> None:
    """What lies at empty places reaches no other, segments without any change nothing, and all numbers are finite."""
    x, ctx = subject.x(), full()
    there = np.random.default_rng(2).random(x.shape[:2]) < 0.6

    def outputs(x: Array, there: np.ndarray | None) -> np.ndarray:
        segments = None if there is None else jnp.asarray(there, jnp.int32)
        return np.asarray(subject.apply(subject.params, x, dataclasses.replace(ctx, segments=segments))[0])

    found = outputs(x, there)
    moved = outputs(jnp.where(jnp.asarray(there)[..., None], x, subject.x(seed=1)), there)
    require(bool(np.isfinite(found).all()), 'sparse: with empty places outputs are not finite')
    apart = np.abs(found - moved)[there].max()
    require(apart == 0, f'sparse: what lies at empty places moves others by {apart:.3g}')
    every, none = outputs(x, np.ones_like(there)), outputs(x, None)
    apart = np.abs(every - none).max()
    require(apart <= 1e-5 * np.abs(none).max(), f'sparse: segments without empty places move outputs by {apart:.3g}')
    require(not np.allclose(found[there], none[there]), 'sparse: empty places make no difference')


def _on(subject: Subject, grid: Grid) -> np.ndarray | None:
    """The outputs on a grid; `None` where it is refused by an error that names it."""
    length = math.prod(grid)
    # The grid that `OnGrid` chooses by itself needs no other program than other checks do.
    ctx = dataclasses.replace(full(length), grid=None if grid == nearly_square(length) else grid)
    try:
        y = subject.apply(subject.params, noise(2, length, subject.dim), ctx)[0]
    except UserError as error:
        require(str(grid) in str(error), f'grids: {grid} is refused by a sentence that does not name it: {error}')
        return None
    require(y.shape == (2, length, subject.dim) and bool(jnp.isfinite(y).all()), f'grids: outputs on {grid} are wrong')
    return np.asarray(y)
