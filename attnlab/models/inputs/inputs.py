"""The protocol of maps from inputs to activations."""

import abc

from flax import nnx
from jax.typing import DTypeLike

from attnlab.module import Module
from attnlab.typing import Features, Sequence, Tokens


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
    def __call__(self, tokens: Tokens | Features, dtype: DTypeLike | None = None) -> Sequence:
        """The activations, of type `dtype` (`None`: of the inputs' own, or the table's)."""
