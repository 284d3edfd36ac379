"""The contract every sequence mixer obeys."""

import abc
from typing import Any

from flax import nnx
from jax.typing import DTypeLike

from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.signature import checked
from attnlab.typing import Sequence, State


class Mixer(nnx.Module):
    """Mixes a sequence along time: `y_t = f(x_1 .. x_t)`, or of the whole row when bidirectional.

    A mixer is built as `Mixer(dim, *, ..., rngs)` and is final: variation goes through the parts it is given.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        """Checks what every mixer is made with: raises `UserError` for sizes of a wrong type or below their range."""
        super().__init_subclass__(**options)
        if '__init__' in vars(cls):
            cls.__init__ = checked(cls.__init__)  # type: ignore[method-assign]

    @abc.abstractmethod
    def __call__(self, x: Sequence, ctx: Context, state: State | None = None) -> tuple[Sequence, State | None]:
        """Returns `(y, state)`, `y` like `x`.

        With `state=None` the sequence starts afresh and `None` is returned for the state. Given a state it goes on
        where that state stopped, by any number of steps, and returns the advanced state: same structure, same shapes.
        """

    @property
    def divides_time(self) -> bool:
        """Whether the tokens of a row may lie on several devices: none then gathers more than keys and values."""
        return False

    @abc.abstractmethod
    def init_state(self, batch: int, length: int, dtype: DTypeLike) -> State:
        """Returns the state before the first token, able to hold `length` tokens, activations of type `dtype`."""


def require_causal(causal: bool) -> None:
    """Raises `UserError` for a mixer that is asked for a state though it sees to both sides."""
    if not causal:
        raise UserError('a bidirectional mixer cannot be streamed: the first token sees the last')
