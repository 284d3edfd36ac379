"""Preludes: the first operation of a mixer on its input, over one token or a few."""

import abc
import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int

from attnlab.errors import UserError
from attnlab.functional import cores
from attnlab.functional.precision import wide_dtype
from attnlab.functional.recomputed import recomputed, recomputed_method
from attnlab.functional.recurrences import NOTHING, document_starts, no_segment, of_token_before
from attnlab.module import Module
from attnlab.nn.activations import activation as activation_called
from attnlab.nn.parameter import param
from attnlab.nn.projections import Linear
from attnlab.typing import Segments, Sequence, State


class Lift(Module):
    """A learned linear map `y = x W + c` to the width of a recurrence; `c` is left out without `bias`."""

    def __init__(self, dim: int, width: int, *, bias: bool = True, rngs: nnx.Rngs):
        self.linear = Linear(dim, width, bias=bias, axes=('embed', 'mlp'), rngs=rngs)

    def __call__(self, x: Sequence) -> Float[Array, 'b t f']:
        return self.linear(x)


class Prelude(Module):
    """An operation over a few neighbouring tokens; its state is passed as that of a mixer."""

    @abc.abstractmethod
    def __call__(
        self, x: Sequence, segments: Segments | None, state: State | None = None
    ) -> tuple[Sequence, State | None]:
        """Returns `(y, state)`: given a state it continues from it; without one it starts afresh and returns `None`."""

    @abc.abstractmethod
    def init_state(self, batch: int, dtype: DTypeLike) -> State:
        """Returns the state before the first token of `batch` streams."""


def preludes_for(prelude: Callable[..., Prelude] | None, *widths: int, rngs: nnx.Rngs) -> nnx.List[Any]:
    """Returns a prelude for each of the projections that have these widths, or none without `prelude`."""
    return nnx.List([] if prelude is None else [prelude(width, rngs=rngs) for width in widths])


def behind_preludes(
    preludes: Iterable[Prelude],
    projections: Iterable[Float[Array, 'b t _']],
    segments: Segments | None,
    states: tuple[State, ...] | None,
    then: Callable[[Sequence], Array] = lambda y: y,
) -> tuple[list[Array], tuple[State, ...]]:
    """Returns what `then` makes of each projection behind its prelude, and the states of the preludes after it.

    The last projections may have no prelude, or all; given no states, preludes start afresh and return `None` for each.
    """
    parts, found, after = tuple(preludes), [], []
    for i, y in enumerate(projections):
        if i < len(parts):
            y, state = parts[i](y, segments, None if states is None else states[i])
            after.append(state)
        found.append(then(y))
    return found, tuple(after)


def states_of(preludes: Iterable[Prelude], batch: int, dtype: DTypeLike) -> tuple[State, ...]:
    """Returns the state of each prelude before the first token of `batch` streams."""
    return tuple(prelude.init_state(batch, dtype) for prelude in preludes)


class Activation(Prelude):
    """A nonlinearity, named by `name`, that keeps no state. Raises `UserError` for an unknown name."""

    def __init__(self, dim: int, *, name: str = 'silu', rngs: nnx.Rngs):
        del dim, rngs
        activation_called(name)
        self.name = name

    def __call__(
        self, x: Sequence, segments: Segments | None, state: tuple[()] | None = None
    ) -> tuple[Sequence, tuple[()] | None]:
        return activation_called(self.name)(x), state

    def init_state(self, batch: int, dtype: DTypeLike) -> tuple[()]:
        """Returns the empty state."""
        return ()


class ConvState(NamedTuple):
    """The past inputs that a causal convolution of width `w` still needs, oldest first, and their segments."""

    inputs: Float[Array, 'b w-1 d']
    segments: Int[Array, 'b w-1']


FUSED = ('identity', 'silu')
"""The activations that are part of the core; what has another is computed again in the backward pass."""


class ShortConv(Prelude):
    """A depthwise causal convolution, `y_t = f(c + sum_i a_i x_{t-w+1+i})`, `0 <= i < w`.

    Inputs of other documents, or before the first token, count as zero. `width` is `w`, `activation` names `f` (`None`:
    the identity); sums and `f` are in float32 or better. Taps start uniform with variance `gain / width`; a gain of 1/3
    is that of PyTorch's Conv1d. They are of the group `vector`: they act on single channels, and so lack the structure
    that optimisers for matrices rely on.

    Raises `UserError` for a width below 1, an unknown activation, or a negative gain.
    """

    def __init__(
        self,
        dim: int,
        *,
        width: int = 4,
        activation: str | None = 'silu',
        bias: bool = False,
        gain: float = 1 / 3,
        rngs: nnx.Rngs,
    ):
        if gain < 0:
            raise UserError(f'gain of ShortConv is {gain}; it must be at least 0')
        activation_called(activation or 'identity')
        self.width = width
        self.activation = activation
        taps = nnx.initializers.variance_scaling(gain, 'fan_in', 'uniform')
        self.taps = param(taps, (width, dim), axes=(None, 'mlp'), group='vector', rngs=rngs)
        self.bias = param(nnx.initializers.zeros, (dim,), axes=('mlp',), group='vector', rngs=rngs) if bias else None

    def __call__(
        self, x: Sequence, segments: Segments | None, state: ConvState | None = None
    ) -> tuple[Sequence, ConvState | None]:
        if state is None:
            return self._alone(x, segments), None
        segments = jnp.ones(x.shape[:2], jnp.int32) if segments is None else segments
        inputs = jnp.concatenate([state.inputs.astype(x.dtype), x], axis=1)
        known = jnp.concatenate([state.segments, segments], axis=1)
        t = x.shape[1]
        return self._convolved(inputs, known), ConvState(inputs[:, t:].astype(state.inputs.dtype), known[:, t:])

    def _alone(self, x: Sequence, segments: Segments | None) -> Sequence:
        activation = self.activation or 'identity'
        if activation not in FUSED:
            return self._recomputed(x, segments)
        bias = None if self.bias is None else self.bias[...]
        return cores.short_conv(x, self.taps[...], bias, segments=segments, activation=activation)

    @recomputed_method
    def _recomputed(self, x: Sequence, segments: Segments | None) -> Sequence:
        before = (self.width - 1, 0)
        known = None if segments is None else jnp.pad(segments, ((0, 0), before), constant_values=NOTHING)
        return self._convolved(jnp.pad(x, ((0, 0), before, (0, 0))), known)

    def _convolved(self, inputs: Float[Array, 'b s d'], segments: Int[Array, 'b s'] | None) -> Sequence:
        # One rounding, after the activation: those of the terms would be larger than that of the result, and gradients
        # of taps would be summed over tokens that are rounded.
        wide = wide_dtype(inputs.dtype)
        y = causal_conv(inputs.astype(wide), self.taps[...].astype(wide), segments)
        if self.bias is not None:
            y = y + jnp.broadcast_to(self.bias[...].astype(wide), y.shape)
        return activation_called(self.activation or 'identity')(y).astype(inputs.dtype)

    def init_state(self, batch: int, dtype: DTypeLike) -> ConvState:
        inputs = jnp.zeros((batch, self.width - 1, self.taps.shape[1]), dtype)
        return ConvState(inputs, jnp.full((batch, self.width - 1), NOTHING, jnp.int32))


class Canon(Prelude):
    """A short convolution added to its input, `y_t = x_t + sum_i a_i x_{t-w+1+i}`, without bias or activation.

    Taps start uniform within the root of `1 / width`. Allen-Zhu 2025, https://ssrn.com/abstract=5240330.
    """

    def __init__(self, dim: int, *, width: int = 4, rngs: nnx.Rngs):
        self.conv = ShortConv(dim, width=width, activation=None, rngs=rngs)

    def __call__(
        self, x: Sequence, segments: Segments | None, state: ConvState | None = None
    ) -> tuple[Sequence, ConvState | None]:
        y, state = self.conv(x, segments, state)
        return x + y, state

    def init_state(self, batch: int, dtype: DTypeLike) -> ConvState:
        """Returns the inputs that the convolution still needs."""
        return self.conv.init_state(batch, dtype)


def causal_conv(
    inputs: Float[Array, 'b s d'], taps: Float[Array, 'w d'], segments: Int[Array, 'b s'] | None
) -> Float[Array, 'b t d']:
    """Returns `y_t = sum_i taps_i inputs_{t+i}`, without inputs of documents other than that of the last one.

    A segment that comes again behind another is another document.
    """
    reach = taps.shape[0] - 1
    t = inputs.shape[1] - reach
    seen = None if segments is None else _seen(segments, reach, t)
    y = inputs[:, reach:] * taps[reach][None, None]
    for i in range(reach):
        tap = inputs[:, i : i + t] * taps[i][None, None]
        if seen is not None:
            tap = jnp.where(seen[i][..., None], tap, jnp.zeros_like(tap))
        y = y + tap
    return y


def _seen(segments: Int[Array, 'b s'], reach: int, t: int) -> list[Bool[Array, 'b t']]:
    """Whether the token so many places before each is of its document, from `reach` places down to one."""
    same = [segments[:, i : i + t] == segments[:, reach:] for i in range(reach)]
    return list(itertools.accumulate(reversed(same), jnp.logical_and))[::-1]


class ShiftState(NamedTuple):
    """What is shifted, at the last token, and the segment of that token."""

    last: Float[Array, 'b ...']
    segment: Int[Array, ' b']


def no_shift(shape: tuple[int, ...], dtype: DTypeLike) -> ShiftState:
    """The state before the first token; `shape` is that of a token's, batch first."""
    return ShiftState(jnp.zeros(shape, dtype), no_segment(shape[0]))


def shifted(
    x: Float[Array, 'b t ...'], segments: Segments | None, state: ShiftState | None = None
) -> tuple[Float[Array, 'b t ...'], ShiftState | None]:
    """Returns what `x` was at the previous token of the document, zero at its first, and the state after it, if any."""
    before = of_token_before(x, None if state is None else state.last)
    if segments is not None or state is not None:
        segments = jnp.ones(x.shape[:2], jnp.int32) if segments is None else segments
        starts = document_starts(segments, None if state is None else state.segment)
        starts = starts.reshape(*starts.shape, *(1,) * (x.ndim - 2))
        before = jnp.where(starts, jnp.zeros_like(before), before)
        if state is not None:
            state = ShiftState(x[:, -1].astype(state.last.dtype), segments[:, -1])
    return before, state


class TokenShift(Module):
    """Mixes keys or values with those of the previous token: `k_t = a_t k'_{t-1} + (1 - a_t) k'_t`, `a = sigmoid(x W)`.

    One gate per head, from the current input; keys before the first token of a document count as zero.
    Lin et al. 2025, https://arxiv.org/abs/2503.02130.
    """

    def __init__(self, dim: int, *, heads: int, channels: int, rngs: nnx.Rngs):
        self.shape = (heads, channels)
        self.gate = Linear(dim, heads, rngs=rngs)

    def __call__(
        self,
        keys: Float[Array, 'b t g k'],
        x: Sequence,
        segments: Segments | None,
        state: ShiftState | None = None,
    ) -> tuple[Float[Array, 'b t g k'], ShiftState | None]:
        """Returns the shifted keys and the state, by the contract of a prelude."""
        return _mixed_with_last(keys, self.gate(x), segments, state)

    def init_state(self, batch: int, dtype: DTypeLike) -> ShiftState:
        """Returns the state before the first token of `batch` streams."""
        return no_shift((batch, *self.shape), dtype)


@recomputed
def _mixed_with_last(
    keys: Float[Array, 'b t g k'], logits: Float[Array, 'b t g'], segments: Segments | None, state: ShiftState | None
) -> tuple[Float[Array, 'b t g k'], ShiftState | None]:
    gate = jax.nn.sigmoid(logits)[..., None]
    before, state = shifted(keys, segments, state)
    return gate * before + (1 - gate) * keys, state
