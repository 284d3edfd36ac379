"""How the branches of a model meet its residual stream: what each is given, and what becomes of what it returns.

    streams = residual.open(x)                      the embedding
    x, kept = connection.read(streams)              of every branch, in order
    streams = connection.add(kept, branch(norm(x)))
    x = residual.close(streams)                     for the final norm

`streams` is one array or a tree of them, of the same shapes after every branch.
"""

import abc
from typing import Any

from flax import nnx

from attnlab.typing import Sequence

Streams = Any
"""What runs from branch to branch; `b t d` where it is plain, `b t n d` where there are several."""


class Connection(nnx.Module):
    """Where one branch meets the stream."""

    @abc.abstractmethod
    def read(self, streams: Streams) -> tuple[Sequence, Any]:
        """Returns what the branch is given, before its norm, and what `add` is to be handed."""

    @abc.abstractmethod
    def add(self, kept: Any, y: Sequence) -> Streams:
        """Returns the streams after the branch, whose output is `y`."""


class Residual(nnx.Module):
    """What a stack has at its two ends, and what it puts between a branch and the stream.

    It is built as `Residual(dim, *, ..., branches, rngs)`, `branches` how many there are in the whole stack.
    """

    @abc.abstractmethod
    def open(self, x: Sequence) -> Streams:
        """Returns the streams before the first branch."""

    @abc.abstractmethod
    def connection(self, index: Any, *, rngs: nnx.Rngs) -> Connection:
        """Returns that of branch `index`, from 0, which may be traced: one program makes those of all layers."""

    @abc.abstractmethod
    def close(self, streams: Streams) -> Sequence:
        """Returns what the final norm is given."""


class Addition(Connection):
    """`x + branch(norm(x))`."""

    def read(self, streams: Sequence) -> tuple[Sequence, Sequence]:
        return streams, streams

    def add(self, kept: Sequence, y: Sequence) -> Sequence:
        return kept + y


class Plain(Residual):
    """One stream, to which every branch adds."""

    def __init__(self, dim: int, *, branches: int, rngs: nnx.Rngs):
        del dim, branches, rngs

    def open(self, x: Sequence) -> Sequence:
        return x

    def connection(self, index: Any, *, rngs: nnx.Rngs) -> Addition:
        del index, rngs
        return Addition()

    def close(self, streams: Sequence) -> Sequence:
        return streams
