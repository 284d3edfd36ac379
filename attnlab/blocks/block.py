"""Residual blocks: pre-norm branches, defined once for everything that runs or inspects them."""

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
from attnlab.module import Module
from attnlab.nn.norms import RMSNorm
from attnlab.signature import checked_fields
from attnlab.typing import Sequence, State


class Step(NamedTuple):
    """The record of one branch's execution.

    Attributes:
      name: the name of the branch.
      normed: its input: the normalised stream, or the stream itself for a block that is not pre-norm.
      output: its output, before dropout.
      streams: the residual streams after it.
      state: its new state, if it was given one.
    """

    name: str
    normed: Sequence
    output: Sequence
    streams: Streams
    state: Any


class PreNorm(Module):
    """A block of pre-norm branches, `x += branch(norm(x))`, in sequence."""

    @abc.abstractmethod
    def steps(self, streams: Streams, ctx: Context, state: State | None = None) -> Iterator[Step]:
        """Runs the branches one by one; the streams of the last are the output."""


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
    """Runs one pre-norm branch: `x, kept = read(streams)`, `streams = add(kept, dropped(branch(norm(x))))`."""
    x, kept = connection.read(streams)
    normed = norm(x)
    y, state = branch(normed)
    return Step(name, normed, y, connection.add(kept, dropped(y, dropout, ctx)), state)


def steps(block: PreNorm | Mixer, streams: Streams, ctx: Context) -> Iterator[Step]:
    """The steps of any block; one that is not `PreNorm` is a single step."""
    if isinstance(block, PreNorm):
        yield from block.steps(streams, ctx)
    else:
        x, _ = block(streams, ctx)
        yield Step('residual', streams, x, x, None)


class Block(PreNorm):
    """A sequence mixer and, unless there is none, a channel mixer: `x += mixer(norm(x))`, then `x += mlp(norm(x))`.

    The stack chooses the residual connection; a block by itself adds (`attnlab.blocks.residual`).

    Args:
      dim: model width.
      mixer: makes the mixer, as `mixer(dim, rngs=rngs)`.
      mlp: makes the channel mixer, likewise; `None`: no channel mixer.
      norm: makes the norms.
      dropout: dropout rate of a branch's output in training.
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
        """The mixer's state: no other part of a block has one."""
        return self.mixer.init_state(batch, length, dtype)


@checked_fields
@dataclasses.dataclass(frozen=True)
class Stage:
    """A named intermediate value, for reports that locate an error."""

    name: str
    value: jax.Array


def mixer_of(block: nnx.Module) -> Any:
    """The mixer of a block; a class that is itself a complete residual block is its own mixer."""
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
        raise ValueError('dropout needs a key: ctx.dropout_key is None and ctx.deterministic is False')
    keep = jax.random.bernoulli(ctx.dropout_key, 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros_like(x))
