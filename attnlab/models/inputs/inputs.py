"""The protocol of maps from inputs to activations."""

import abc
import dataclasses
import math

from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.module import Module
from attnlab.typing import Embedded, Features, Tokens


class Inputs(Module):
    """Maps inputs to activations; made as `inputs(vocab, dim, rngs=rngs)`.

    Attributes:
      tokens: whether inputs are token ids, so that a prediction can be the next input.
      table: one vector per token, `vocab dim`, which a head may share; `None`: there is no table.
      grid: the static shape, `(height, width)` or `(depth, height, width)`, of activations that are a flattened image
        or volume; `None` for a sequence.
    """

    tokens: bool = False
    grid: tuple[int, int] | tuple[int, int, int] | None = None

    @property
    def table(self) -> nnx.Param | None:
        """`None` unless a subclass has one."""
        return None

    @abc.abstractmethod
    def __call__(self, tokens: Tokens | Features, dtype: DTypeLike | None = None) -> Embedded:
        """The activations, of type `dtype` (`None`: of the inputs' own, or the table's)."""

    def condition(self, tokens: Tokens | Features) -> Float[Array, 'b m'] | None:
        """What the layers are told of a row besides its tokens; `None`: nothing."""
        del tokens
        return None

    def context(self, ctx: Context) -> Context:
        """The context of the activations: `ctx` with the grid.

        Raises `UserError` when the size of the grid is not the length of the rows.
        """
        if self.grid is None:
            return ctx
        size, length = math.prod(self.grid), ctx.positions.shape[1]
        if size != length:
            raise UserError(f'the grid of the inputs is {self.grid}, {size} positions; the rows have {length}')
        return dataclasses.replace(ctx, grid=self.grid)
