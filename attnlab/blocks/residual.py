"""Residual connections: the input of every branch, and how its output is combined with the residual stream.

    streams = residual.open(x)                      the embedding
    x, kept = connection.read(streams)              for every branch, in order
    streams = connection.add(kept, branch(norm(x)))
    x = residual.close(streams)                     for the final norm

`streams` is one array or a tree of them, of the same shapes after every branch.
"""

import abc
from typing import Any

from flax import nnx

from attnlab.module import Module
from attnlab.typing import Sequence

Streams = Any
"""The residual streams; `b t d` for one, `b t n d` for several."""


class Connection(Module):
    """The residual connection of one branch."""

    @abc.abstractmethod
    def read(self, streams: Streams) -> tuple[Sequence, Any]:
        """Returns the input of the branch, before its norm, and the value to pass to `add`."""

    @abc.abstractmethod
    def add(self, kept: Any, y: Sequence) -> Streams:
        """Returns the streams after the branch, whose output is `y`."""


class Residual(Module):
    """The residual scheme of a stack: its initial and final streams, and the connection of every branch.

    It is built as `Residual(dim, *, ..., branches, rngs)`, with `branches` their number in the whole stack.
    """

    @abc.abstractmethod
    def open(self, x: Sequence) -> Streams:
        """Returns the streams before the first branch."""

    @abc.abstractmethod
    def connection(self, index: Any, *, rngs: nnx.Rngs) -> Connection:
        """Returns the connection of branch `index`, from 0; it may be traced, so that one program builds all layers."""

    @abc.abstractmethod
    def close(self, streams: Streams) -> Sequence:
        """Returns the input of the final norm."""


class Addition(Connection):
    """`x + branch(norm(x))`."""

    def read(self, streams: Sequence) -> tuple[Sequence, Sequence]:
        return streams, streams

    def add(self, kept: Sequence, y: Sequence) -> Sequence:
        return kept + y


class Plain(Residual):
    """One residual stream, to which every branch adds."""

    def __init__(self, dim: int, *, branches: int, rngs: nnx.Rngs):
        del dim, branches, rngs

    def open(self, x: Sequence) -> Sequence:
        return x

    def connection(self, index: Any, *, rngs: nnx.Rngs) -> Addition:
        del index, rngs
        return Addition()

    def close(self, streams: Sequence) -> Sequence:
        return streams
