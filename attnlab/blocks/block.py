"""Residual blocks: branches behind a norm, wired once for everything that runs or reads them."""

import abc
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from attnlab.blocks.residual import Addition, Connection, Streams
from attnlab.context import Context
from attnlab.mixers.mixer import Mixer
from attnlab.nn.norms import RMSNorm
from attnlab.typing import Sequence, State


class Step(NamedTuple):
    """A branch, and what went through it.

    Attributes:
      name: of the branch.
      normed: what it was given: the stream behind a norm, or the stream itself where a block is not wired here.
      output: what it returned, before dropout.
      streams: the residual streams after it.
      state: the state it advanced, if it has one and was given it.
    """

    name: str
    normed: Sequence
    output: Sequence
    streams: Streams
    state: Any


class PreNorm(nnx.Module):
    """What consists of branches behind norms, `x += branch(norm(x))`, one after the other."""

    @abc.abstractmethod
    def steps(self, streams: Streams, ctx: Context, state: State | None = None) -> Iterator[Step]:
        """Runs the branches one by one; the streams of the last are what comes out."""


def step(
    name: str,
    streams: Streams,
    branch: Callable[[Sequence], tuple[Sequence, State | None]],
    *,
    norm: Callable[[Sequence], Sequence],
    connection: Connection,
    dropout: float = 0.0,
    ctx: Context,
) -> Step:
    """Runs a branch of pre-norm wiring: `x, kept = read(streams)`, `streams = add(kept, dropped(branch(norm(x))))`."""
    x, kept = connection.read(streams)
    normed = norm(x)
    y, state = branch(normed)
    return Step(name, normed, y, connection.add(kept, dropped(y, dropout, ctx)), state)


def steps(block: PreNorm | Mixer, streams: Streams, ctx: Context) -> Iterator[Step]:
    """The branches of any block; one that wires its own residual branches is one step."""
    if isinstance(block, PreNorm):
        yield from block.steps(streams, ctx)
    else:
        x, _ = block(streams, ctx)
        yield Step('residual', streams, x, x, None)


class Block(PreNorm):
    """A sequence mixer and, unless there is none, a channel mixer: `x += mixer(norm(x))`, then `x += mlp(norm(x))`.

    How a branch meets the stream is the stack's choice; a block by itself adds (`attnlab.blocks.residual`).

    Args:
      dim: model width.
      mixer: makes the mixer, as `mixer(dim, rngs=rngs)`.
      mlp: makes the channel mixer, likewise; `None` leaves its branch out.
      norm: makes the norms.
      dropout: rate at which a branch's output is dropped in training.
    """

    def __init__(
        self,
        dim: int,
        *,
        mixer: Callable[..., Mixer],
        mlp: Callable[..., nnx.Module] | None = None,
        norm: Callable[..., nnx.Module] = RMSNorm,
        dropout: float = 0.0,
        rngs: nnx.Rngs,
    ):
        self.mixer_norm = norm(dim, rngs=rngs)
        self.mixer = mixer(dim, rngs=rngs)
        self.mlp_norm: Any = None if mlp is None else norm(dim, rngs=rngs)
        self.mlp: Any = None if mlp is None else mlp(dim, rngs=rngs)
        self.dropout = dropout
        self.connections = nnx.List([Addition() for _ in range(1 if mlp is None else 2)])

    def __call__(self, streams: Streams, ctx: Context, state: State | None = None) -> tuple[Streams, State | None]:
        """Returns `(streams, state)`, by the contract of a mixer."""
        taken = list(self.steps(streams, ctx, state))
        return taken[-1].streams, taken[0].state

    def steps(self, streams: Streams, ctx: Context, state: State | None = None) -> Iterator[Step]:
        """Runs the mixer, then the channel mixer."""
        mixed = step(
            'mixer',
            streams,
            lambda x: self.mixer(x, ctx, state),
            norm=self.mixer_norm,
            connection=self.connections[0],
            dropout=self.dropout,
            ctx=ctx.fold_in(0),
        )
        yield mixed
        if self.mlp is not None:
            yield step(
                'mlp',
                mixed.streams,
                lambda x: (self.mlp(x), None),
                norm=self.mlp_norm,
                connection=self.connections[1],
                dropout=self.dropout,
                ctx=ctx.fold_in(1),
            )

    def init_state(self, batch: int, length: int, dtype: DTypeLike) -> State:
        """The mixer's state: nothing else in a block remembers."""
        return self.mixer.init_state(batch, length, dtype)


@dataclasses.dataclass(frozen=True)
class Stage:
    """A named intermediate value, for reports that must name where something happened."""

    name: str
    value: jax.Array


def mixer_of(block: nnx.Module) -> Any:
    """The mixer in a block; a class that is a whole residual block, and keeps the contract of a mixer, is its own."""
    return block.mixer if isinstance(block, Block) else block


def stages(block: PreNorm | Mixer, streams: Streams, ctx: Context) -> Iterator[Stage]:
    """The outputs of a block's parts in order, the residual streams last."""
    after = streams
    for taken in steps(block, streams, ctx):
        if isinstance(block, PreNorm):
            yield Stage(f'{taken.name}_norm', taken.normed)
            yield Stage(taken.name, taken.output)
        after = taken.streams
    yield Stage('residual', after)


def dropped(x: Sequence, rate: float, ctx: Context) -> Sequence:
    """Inverted dropout: every element is zero with probability `rate`, the rest is scaled up by 1 / (1 - rate)."""
    if rate == 0.0 or ctx.deterministic:
        return x
    if ctx.dropout_key is None:
        raise ValueError('dropout wants a key: ctx.dropout_key is None and ctx.deterministic is False')
    keep = jax.random.bernoulli(ctx.dropout_key, 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros_like(x))
