"""Stacks of falling resolution and rising width, one after another."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from attnlab.blocks.block import Stage
from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.functional.grids import Grid, flatten, required_grid, unflatten
from attnlab.mixers.mixer import NO_STREAM
from attnlab.models.stack import Stack
from attnlab.module import Module
from attnlab.nn.positions import GridSinusoids, LearnedPlaces
from attnlab.typing import Sequence, State


class Resolution(Module):
    """A stack of one width, behind what maps the grid before it to its own: what papers call a stage.

        x = merge(x)    x = x + positions    x = stack(x)

    Made by a `Pyramid` as `resolution(dim, before=width of what comes before, rngs=rngs)`.

    Args:
      dim: width of the first resolution.
      before: width of the activations that it is given.
      width: of its own activations, in multiples of `dim`.
      stack: makes the stack, as `stack(width * dim, rngs=rngs)`.
      merge: maps a grid to a smaller one, made as `merge(before, width * dim, patch=ratio, rngs=rngs)`, as stems of
        `Patches` are; `None`: the resolution is that before it, and so is the width.
      ratio: by which the sides of the grid become shorter.
      positions: added behind `merge`: `GridSinusoids`, or made as `positions(width * dim, rngs=rngs)`; `None`: none.
      rngs: draws the parameters.

    Raises `UserError` for another width without `merge`.
    """

    def __init__(
        self,
        dim: int,
        *,
        before: int,
        width: int = 1,
        stack: Callable[..., Stack],
        merge: Callable[..., nnx.Module] | None = None,
        ratio: int = 2,
        positions: GridSinusoids | Callable[..., nnx.Module] | None = None,
        rngs: nnx.Rngs,
    ):
        self.dim, self.before, self.ratio = width * dim, before, ratio
        if merge is None and self.dim != before:
            raise UserError(
                f'a resolution of width {self.dim} behind one of {before} needs merge, such as PatchMerging'
            )
        self.merge: Any = None if merge is None else merge(before, self.dim, patch=ratio, rngs=rngs)
        if positions is not None and not isinstance(positions, GridSinusoids):
            positions = positions(self.dim, rngs=rngs)
        self.positions: Any = positions
        self.stack = stack(self.dim, rngs=rngs)

    def context(self, ctx: Context) -> Context:
        """The context of its stack, by that of what comes before. Raises `UserError` for a grid that is too small."""
        if self.merge is None:
            return ctx
        merged = self.grid(required_grid(ctx, type(self).__name__, axes=2))
        positions = Context.full(ctx.positions.shape[0], math.prod(merged)).positions
        return dataclasses.replace(ctx, positions=positions, segments=None, grid=merged)

    def grid(self, before: Grid) -> Grid:
        """Its grid, by that of what comes before. Raises `UserError` for one that is too small."""
        if self.merge is None:
            return before
        image = jax.ShapeDtypeStruct((1, *before, self.before), jnp.float32)
        merged = jax.eval_shape(self.merge, image).shape[1:-1]
        if not math.prod(merged):
            raise UserError(f'a grid of {before} has no blocks of {self.ratio} x {self.ratio}; use fewer resolutions')
        return merged

    def merged(self, x: Sequence, ctx: Context, after: Context) -> Float[Array, 'b s f']:
        """The input of its stack; `ctx` is the context of `x` and `after` that of the stack."""
        if self.merge is not None:
            image = self.merge(unflatten(x, required_grid(ctx, type(self).__name__, axes=2)))
            x = flatten(image, required_grid(after, type(self).__name__))
        if self.positions is None:
            return x
        grid = required_grid(after, type(self).__name__)
        sinusoids = isinstance(self.positions, GridSinusoids)
        here = self.positions.encode(grid, self.dim) if sinusoids else self.positions()
        if here.shape[0] != math.prod(grid):
            raise UserError(
                f'positions of a resolution are for {here.shape[0]} places; its grid is {grid}: give it that as '
                'positions.grid, or adapt a trained model to images of this size by Model.resize'
            )
        return x + jnp.broadcast_to(here.astype(x.dtype), x.shape)


class Pyramid(Module):
    """Resolutions one after another, in the place of a model's stack: a hierarchical model, by a list in its config.

    Its input is of the first width, its output of the last, of fewer tokens. It is bidirectional and keeps no state.
    Liu et al. 2021, https://arxiv.org/abs/2103.14030; Wang et al. 2021, https://arxiv.org/abs/2102.12122.

    Args:
      dim: width of the first resolution, that of the model's inputs.
      resolutions: from the finest, made as `resolution(dim, before=, rngs=)`.
      rngs: draws the parameters.

    Raises `UserError` for no resolutions.
    """

    def __init__(self, dim: int, *, resolutions: tuple[Callable[..., Resolution], ...], rngs: nnx.Rngs):
        if not resolutions:
            raise UserError('a pyramid needs at least one resolution')
        made: list[Resolution] = []
        for resolution in resolutions:
            made.append(resolution(dim, before=made[-1].dim if made else dim, rngs=rngs))
        self.dim = made[-1].dim
        self.resolutions = nnx.List(made)

    def __call__(self, x: Sequence, ctx: Context, state: State | None = None) -> tuple[Float[Array, 'b s f'], None]:
        """Returns `(x, None)`, the tokens of the last resolution."""
        if state is not None:
            raise UserError(NO_STREAM)
        for index, resolution in enumerate(self.resolutions):
            after = resolution.context(ctx)
            x, _ = resolution.stack(resolution.merged(x, ctx, after), after.fold_in(index))
            ctx = after
        return x, None

    def context(self, ctx: Context) -> Context:
        """The context of the output."""
        return self.stacks(ctx)[-1][1]

    def resize(self, grid: Grid, to: Grid) -> None:
        """Takes a grid `to` from now on where it took `grid`; see `Patches.resize`.

        Learned positions of every resolution are interpolated between those of its own grid. Raises `UserError` for a
        grid that is too small, and then changes nothing.
        """
        for resolution, old, new in zip(self.resolutions, self.grids(grid), self.grids(to), strict=True):
            if isinstance(resolution.positions, LearnedPlaces):
                resolution.positions.resample(old, new)

    def grids(self, grid: Grid) -> list[Grid]:
        """The grids of the resolutions in order, by that of the input."""
        found = []
        for resolution in self.resolutions:
            grid = resolution.grid(grid)
            found.append(grid)
        return found

    @property
    def parts(self) -> list[Stack]:
        """The stacks, in order."""
        return [resolution.stack for resolution in self.resolutions]

    def stacks(self, ctx: Context) -> list[tuple[Stack, Context]]:
        """The stacks in order, each with the context of its tokens."""
        found = []
        for resolution in self.resolutions:
            ctx = resolution.context(ctx)
            found.append((resolution.stack, ctx))
        return found

    def stages(self, x: Sequence, ctx: Context) -> Iterator[Stage]:
        """Every named intermediate value in order, lazily; the last is the output."""
        for index, resolution in enumerate(self.resolutions):
            after = resolution.context(ctx)
            x = resolution.merged(x, ctx, after)
            yield Stage(f'resolutions[{index}].merged', x)
            for stage in resolution.stack.stages(x, after.fold_in(index)):
                yield Stage(f'resolutions[{index}].{stage.name}', stage.value)
                x = stage.value
            ctx = after

    def init_state(self, batch: int, length: int, dtype: DTypeLike) -> State:
        """Raises `UserError`: it cannot be streamed."""
        raise UserError(NO_STREAM)
