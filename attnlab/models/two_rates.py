"""Two stacks at two rates: windows of a row, and summaries of them."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from attnlab.blocks.block import Stage
from attnlab.context import PADDING, Context
from attnlab.errors import UserError
from attnlab.models.stack import Stack
from attnlab.module import Module
from attnlab.nn.norms import RMSNorm
from attnlab.nn.projections import Linear
from attnlab.typing import Sequence, State

NO_STREAM = 'a model of two rates cannot be streamed: its outputs are one a window'


class TwoRates(Module):
    """HiSS, in the place of a model's stack: a stack that reads windows of a row, and one that reads their summaries.

        z_j = W norm(fast(x_(j w), .., x_(j w + w - 1)))_last + c        y = slow(z_0, z_1, ..)

    `fast` begins anew in every window; the output has one token a window, so that rows become `w` times shorter. Where
    `w` does not divide a row its last window is shorter. A row holds one document, from its first token on, with
    padding behind it: what is summarised is the last token that is no padding, and windows of padding are padding.
    Bhirangi et al. 2024, https://arxiv.org/abs/2402.10211.

    Args:
      dim: width of `fast`, that of the model's inputs.
      fast: makes the stack of windows, as `fast(dim, rngs=rngs)`.
      slow: makes the stack of summaries, as `slow(width * dim, rngs=rngs)`.
      window: the tokens `w` of a window.
      width: of summaries, in multiples of `dim`.
      norm: of what `fast` gives, made as `norm(dim, rngs=rngs)`.
      rngs: draws the parameters.

    Raises `UserError` when it is given a state.
    """

    def __init__(
        self,
        dim: int,
        *,
        fast: Callable[..., Stack],
        slow: Callable[..., Stack],
        window: int = 10,
        width: int = 1,
        norm: Callable[..., nnx.Module] = RMSNorm,
        rngs: nnx.Rngs,
    ):
        self.dim, self.window = width * dim, window
        self.fast = fast(dim, rngs=rngs)
        self.norm: Any = norm(dim, rngs=rngs)
        self.summary = Linear(dim, self.dim, bias=True, axes=('embed', None), rngs=rngs)
        self.slow = slow(self.dim, rngs=rngs)

    def __call__(self, x: Sequence, ctx: Context, state: State | None = None) -> tuple[Float[Array, 'b s f'], None]:
        """Returns `(y, None)`, one token a window."""
        if state is not None:
            raise UserError(NO_STREAM)
        windows, slow = self._contexts(ctx)
        y, _ = self.fast(self._windows(x), windows.fold_in(0))
        return self.slow(self._summaries(y, windows, slow), slow.fold_in(1))[0], None

    def context(self, ctx: Context) -> Context:
        """The context of the output."""
        return self._contexts(ctx)[1]

    @property
    def parts(self) -> list[Stack]:
        """Both stacks, in order."""
        return [self.fast, self.slow]

    def stacks(self, ctx: Context) -> list[tuple[Stack, Context]]:
        """Both stacks, in order, each with the context of its tokens; windows are rows."""
        return list(zip(self.parts, self._contexts(ctx), strict=True))

    def stages(self, x: Sequence, ctx: Context) -> Iterator[Stage]:
        """Every named intermediate value in order, lazily; the last is the output."""
        windows, slow = self._contexts(ctx)
        y = self._windows(x)
        for stage in self.fast.stages(y, windows.fold_in(0)):
            yield Stage(f'fast.{stage.name}', stage.value)
            y = stage.value
        y = self._summaries(y, windows, slow)
        yield Stage('summary', y)
        for stage in self.slow.stages(y, slow.fold_in(1)):
            yield Stage(f'slow.{stage.name}', stage.value)

    def init_state(self, batch: int, length: int, dtype: DTypeLike) -> State:
        """Raises `UserError`: it cannot be streamed."""
        raise UserError(NO_STREAM)

    def _contexts(self, ctx: Context) -> tuple[Context, Context]:
        """The contexts of windows, as rows, and of summaries."""
        rows, length = ctx.positions.shape
        count = -(-length // self.window)
        segments = ctx.segments
        if segments is not None or length % self.window:
            missing = count * self.window - length
            segments = jnp.pad(ctx.segments_or_ones(), ((0, 0), (0, missing)), constant_values=PADDING)
            segments = segments.reshape(rows * count, self.window)
        return (
            dataclasses.replace(
                ctx, positions=Context.full(rows * count, self.window).positions, segments=segments, grid=None
            ),
            dataclasses.replace(
                ctx,
                positions=Context.full(rows, count).positions,
                # Padding is behind all else, so that the first token says of what a window is.
                segments=None if segments is None else segments[:, 0].reshape(rows, count),
                grid=None,
            ),
        )

    def _windows(self, x: Sequence) -> Float[Array, 'n w d']:
        count = -(-x.shape[1] // self.window)
        whole = jnp.pad(x, ((0, 0), (0, count * self.window - x.shape[1]), (0, 0)))
        return whole.reshape(x.shape[0] * count, self.window, x.shape[2])

    def _summaries(self, y: Float[Array, 'n w d'], windows: Context, slow: Context) -> Float[Array, 'b s f']:
        if windows.segments is None:
            last = y[:, -1]
        else:
            place = jnp.maximum(jnp.sum(windows.segments != PADDING, axis=1) - 1, 0)
            last = jnp.take_along_axis(y, place[:, None, None], axis=1)[:, 0]
        return self.summary(self.norm(last.reshape(*slow.positions.shape, -1)))
