"""Residual blocks: pre-norm branches, defined once for everything that runs or inspects them."""

import abc
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from attnlab.blocks.residual import Addition, Connection, Streams
from attnlab.context import IN_EXPERTS, MIXER_DROPOUT, MLP_DROPOUT, Context
from attnlab.errors import UserError
from attnlab.mixers.mixer import HasValues, Mixer
from attnlab.module import Module
from attnlab.nn.norms import RMSNorm
from attnlab.nn.preludes import Prelude
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
    """A block of pre-norm branches, `x += branch(norm(x))`, in sequence; it is called as a mixer is."""

    @abc.abstractmethod
    def __call__(self, streams: Streams, ctx: Context, state: State | None = None) -> tuple[Streams, State | None]:
        """Returns `(streams, state)`, by the contract of a mixer."""

    @abc.abstractmethod
    def init_state(self, batch: int, length: int, dtype: DTypeLike) -> State:
        """Returns the state before the first token, by the contract of a mixer."""

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
    """Runs one pre-norm branch: `x, kept = read(streams)`, `streams = add(kept, dropped(branch(norm(x))))`.

    Raises `UserError` for a branch that changes the shape, for one token would be added to all without a word, or the
    type, which a stack of several layers could not keep.
    """
    x, kept = connection.read(streams)
    normed = norm(x)
    y, state = branch(normed)
    if y.shape != normed.shape:
        raise UserError(f'the {name} of a block returned shape {y.shape}; expected that of its input, {normed.shape}')
    if y.dtype != x.dtype:
        raise UserError(f'the {name} of a block returned {y.dtype}; expected the type of the stream, {x.dtype}')
    return Step(name, normed, y, connection.add(kept, dropped(y, dropout, ctx)), state)


def steps(block: PreNorm | Mixer, streams: Streams, ctx: Context) -> Iterator[Step]:
    """The steps of any block; one that is not `PreNorm` is a single step."""
    if isinstance(block, PreNorm):
        yield from block.steps(streams, ctx)
    else:
        x, _ = block(streams, ctx)
        yield Step('residual', streams, x, x, None)


class BlockState(NamedTuple):
    """What a block with preludes remembers of a stream; empty tuples stand for parts that remember nothing.

    Attributes:
      mixer: the mixer's.
      mixer_prelude: of the prelude before it.
      mlp_prelude: of the prelude before the channel mixer.
      mlp: the channel mixer's.
    """

    mixer: State
    mixer_prelude: State
    mlp_prelude: State
    mlp: State


BranchName = Literal['mixer', 'mlp']

Norm = Callable[[Sequence], Sequence]

Branch = Callable[[Sequence], tuple[Sequence, Any]]
"""A branch of a block: its output, and the state after it."""


class Block(PreNorm):
    """A sequence mixer and, unless there is none, a channel mixer: `x += mixer(norm(x))`, then `x += mlp(norm(x))`.

    The stack chooses the residual connection; a block by itself adds (`attnlab.blocks.residual`). Preludes work on what
    the norms give (points A and C of Allen-Zhu 2025, https://ssrn.com/abstract=5240330).

    Args:
      dim: model width.
      mixer: makes the mixer, as `mixer(dim, rngs=rngs)`.
      mlp: makes the channel mixer, likewise; it is called as `mlp(x)`, unless its class `remembers` or `routes`
        (`attnlab.module.Module`); `None`: no channel mixer.
      norm: makes the norms; one whose class `learns_in_training` has another form there.
      dropout: dropout rate of a branch's output in training.
      mixer_prelude: made as `prelude(dim, rngs=rngs)`, applied to the input of the mixer; `None`: nothing is.
      mlp_prelude: likewise of the channel mixer.
    """

    tells = frozenset({'mixer_norm', 'mlp_norm'})

    def __init__(
        self,
        dim: int,
        *,
        mixer: Callable[..., Mixer],
        mlp: Callable[..., nnx.Module] | None = None,
        norm: Callable[..., nnx.Module] = RMSNorm,
        dropout: float = 0.0,
        mixer_prelude: Callable[..., Prelude] | None = None,
        mlp_prelude: Callable[..., Prelude] | None = None,
        rngs: nnx.Rngs,
    ):
        if mlp is None and mlp_prelude is not None:
            raise UserError('a block without a channel mixer has no mlp_prelude; leave it out')
        self.mixer_norm = norm(dim, rngs=rngs)
        self.mixer = mixer(dim, rngs=rngs)
        self.mlp_norm: Any = None if mlp is None else norm(dim, rngs=rngs)
        self.mlp: Any = None if mlp is None else mlp(dim, rngs=rngs)
        self.dropout = dropout
        self.connections = nnx.List([Addition() for _ in range(1 if mlp is None else 2)])
        self.mixer_prelude: Any = None if mixer_prelude is None else mixer_prelude(dim, rngs=rngs)
        self.mlp_prelude: Any = None if mlp_prelude is None else mlp_prelude(dim, rngs=rngs)

    def __call__(self, streams: Streams, ctx: Context, state: State | None = None) -> tuple[Streams, State | None]:
        """Returns `(streams, state)`, by the contract of a mixer."""
        taken = list(self.steps(streams, ctx, state))
        if state is None:
            return taken[-1].streams, None
        mixer, before = taken[0].state
        between, mlp = taken[1].state if self.mlp is not None else ((), ())
        advanced = BlockState(mixer, before, between, mlp)
        return taken[-1].streams, advanced if self._remembers() else advanced.mixer

    def steps(self, streams: Streams, ctx: Context, state: State | None = None) -> Iterator[Step]:
        """Runs the mixer, then the channel mixer; the state of a step is that of its prelude and of its own."""
        before = self._before(state)

        def mix(x: Sequence) -> tuple[Sequence, Any]:
            x, prelude = _through(self.mixer_prelude, x, ctx, before.mixer_prelude)
            y, after = self.mixer(x, ctx, before.mixer)
            return y, (after, prelude)

        def feed(x: Sequence) -> tuple[Sequence, Any]:
            x, prelude = _through(self.mlp_prelude, x, ctx, before.mlp_prelude)
            if self._mlp_remembers():
                y, after = self.mlp(x, ctx.segments, before.mlp)
                return y, (prelude, after)
            return fed(self.mlp, x, ctx), (prelude, before.mlp)

        norm, mixing = self.around('mixer', _during(self.mixer_norm, ctx, state), mix, ctx)
        mixed = step(
            'mixer',
            streams,
            mixing,
            norm=norm,
            connection=self.connections[0],
            dropout=self.dropout,
            ctx=ctx.fold_in(MIXER_DROPOUT),
        )
        yield mixed
        if self.mlp is not None:
            norm, feeding = self.around('mlp', _during(self.mlp_norm, ctx, state), feed, ctx)
            yield step(
                'mlp',
                mixed.streams,
                feeding,
                norm=norm,
                connection=self.connections[1],
                dropout=self.dropout,
                ctx=ctx.fold_in(MLP_DROPOUT),
            )

    def values(self, streams: Streams, ctx: Context, state: State | None = None) -> Float[Array, 'b t v']:
        """The values of its mixer, which `HasValues`, in such a call."""
        before, mixer = self._before(state), cast(HasValues, self.mixer)
        norm, _ = self.around('mixer', _during(self.mixer_norm, ctx, state), lambda x: (x, None), ctx)
        x, _ = _through(self.mixer_prelude, norm(self.connections[0].read(streams)[0]), ctx, before.mixer_prelude)
        return mixer.values(x, ctx, before.mixer)

    def around(self, name: BranchName, norm: Norm, run: Branch, ctx: Context) -> tuple[Norm, Branch]:
        """The norm of a branch's input, and the branch, both as they are; subclasses may wrap them."""
        del name, ctx
        return norm, run

    def init_state(self, batch: int, length: int, dtype: DTypeLike) -> State:
        """The mixer's state, where no other part of the block has one; a `BlockState` where one has."""
        mixer = self.mixer.init_state(batch, length, dtype)
        if not self._remembers():
            return mixer
        before, between = (() if each is None else each.init_state(batch, dtype) for each in self._preludes())
        mlp = self.mlp.init_state(batch, dtype) if self._mlp_remembers() else ()
        return BlockState(mixer, before, between, mlp)

    def _before(self, state: State | None) -> BlockState:
        """The states of its parts; `None` each where a sequence starts afresh."""
        if state is None:
            return BlockState(None, None, None, None)
        return state if self._remembers() else BlockState(state, (), (), ())

    def _preludes(self) -> tuple[Any, Any]:
        return self.mixer_prelude, self.mlp_prelude

    def _remembers(self) -> bool:
        """Whether another part than the mixer has a state."""
        return self._mlp_remembers() or any(each is not None for each in self._preludes())

    def _mlp_remembers(self) -> bool:
        return getattr(self.mlp, 'remembers', False)


def _during(norm: Any, ctx: Context, state: State | None) -> Norm:
    """The norm; in training, the training form of a norm with batch statistics.

    Raises `UserError` if it looks ahead and the call is given a state.
    """
    if state is not None and getattr(norm, 'looks_ahead', False):
        raise UserError(
            f'{type(norm).__name__} looks at all tokens of a row; a block with it has no form that takes some at a time'
        )
    return norm.in_training if getattr(norm, 'learns_in_training', False) and not ctx.deterministic else norm


def fed(mlp: Any, x: Sequence, ctx: Context) -> Sequence:
    """The output of a channel mixer without a state; one that routes may draw, in training, where tokens go."""
    if getattr(mlp, 'routes', False):
        key = None if ctx.deterministic else ctx.fold_in(IN_EXPERTS).dropout_key
        return mlp(x, key, ctx.labels, ctx.segments, trains=not ctx.deterministic)
    return mlp(x)


def _through(prelude: Prelude | None, x: Sequence, ctx: Context, state: State | None) -> tuple[Sequence, State | None]:
    return (x, state) if prelude is None else prelude(x, ctx.segments, state)


@checked_fields
@dataclasses.dataclass(frozen=True)
class Stage:
    """A named intermediate value, for reports that locate an error."""

    name: str
    value: jax.Array


def past_prelude(block: nnx.Module, name: BranchName, normed: Sequence, ctx: Context) -> Sequence:
    """What the module of a branch is called with in a call without a state, of the branch's input (`Step.normed`)."""
    return _through(getattr(block, f'{name}_prelude', None), normed, ctx, None)[0]


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
    """Inverted dropout: every element is zero with probability `rate`, the rest is scaled up by 1 / (1 - rate).

    Raises `ValueError` in training without a key.
    """
    if rate == 0.0 or ctx.deterministic:
        return x
    if ctx.dropout_key is None:
        raise ValueError('dropout needs a key: ctx.dropout_key is None and ctx.deterministic is False')
    keep = jax.random.bernoulli(ctx.dropout_key, 1.0 - rate, x.shape)
    return jnp.where(keep, x / (1.0 - rate), jnp.zeros_like(x))
