"""Hyena: long convolutions and gates in turn."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.functional import cores
from attnlab.functional.precision import wide_dtype
from attnlab.functional.recomputed import recomputed
from attnlab.functional.recurrences import document_starts, no_segment
from attnlab.mixers.mixer import Mixer
from attnlab.nn.filters import ImplicitFilter
from attnlab.nn.parameter import param
from attnlab.nn.preludes import Prelude, ShortConv
from attnlab.nn.projections import Linear
from attnlab.typing import Segments, Sequence, State


class Past(NamedTuple):
    """The inputs of long convolutions so far, one slot a token, and what they will give to tokens to come.

    Slots are read in blocks: one begins after a call of several tokens, and after every `w` single ones.

    Attributes:
      inputs: those of every convolution, in order.
      ahead: of every convolution, what the inputs before the present block, of the document of the last of them, give
        to the `w` slots from its first one, or to the last `w` where fewer are left.
      runs: the document of every token, counted from 0; -1 in empty slots.
      segment: the segment of the last token, `b`; -1 before the first.
      consumed: how many tokens there were.
      begun: how many of them came before the present block.
    """

    inputs: tuple[Float[Array, 'b s d'], ...]
    ahead: tuple[Float[Array, 'b w d'], ...]
    runs: Int[Array, 'b s']
    segment: Int[Array, ' b']
    consumed: Int[Array, '']
    begun: Int[Array, '']


class HyenaState(NamedTuple):
    """What the operator remembers of a stream: the state of the prelude, and all inputs of the convolutions."""

    prelude: State
    past: Past


class Hyena(Mixer):
    """The Hyena operator of an order: `y = W_o (x_0 v)`, where `v` becomes, for every j from the last to 1,

        v <- k_j * (x_j v) + b_j x_j v

    `x_0 ... v` are maps of the input under a short convolution, `*` a causal convolution as long as the row with a
    filter of `filters`; all but the maps is in float32 or better. A stream keeps all inputs of the convolutions, as a
    filter has no state of fixed size, and a call beyond the `length` of the state gives NaN. It is read in blocks of
    `w` tokens, about the root of `s log s` for a state of `s`: a step sums over the inputs of its own block, and what
    those before it give to the next `w` tokens is convolved once a block, so that a step costs `O(w d)` on average.
    Poli et al. 2023, https://arxiv.org/abs/2302.10866.

    Raises `UserError` for an order below 2.

    Args:
      dim: model width.
      order: how many maps gate; one fewer convolutions.
      length: the unit of the filters' lags, the length of rows in training.
      filters: made as `filters(channels, length=, rngs=rngs)`, for the channels of all convolutions.
      prelude: made as `prelude(channels, rngs=rngs)`, for all maps.
      implementation: of the core; `None`: the default of the platform.
      rngs: draws the parameters.
    """

    def __init__(
        self,
        dim: int,
        *,
        order: int = 2,
        length: int = 1024,
        filters: Callable[..., ImplicitFilter] = ImplicitFilter,
        prelude: Callable[..., Prelude] = ShortConv,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        if order < 2:
            raise UserError(f'the order of Hyena is {order}; it must be at least 2, with one convolution')
        self.order, self.dim, self.implementation = order, dim, implementation
        self.input = Linear(dim, (order + 1) * dim, bias=True, axes=('embed', 'mlp'), rngs=rngs)
        self.prelude = prelude((order + 1) * dim, rngs=rngs)
        self.filters = filters((order - 1) * dim, length=length, rngs=rngs)
        normal = nnx.initializers.normal(1.0)
        self.direct = param(normal, (order - 1, dim), axes=(None, 'mlp'), group='vector', rngs=rngs)
        self.output = Linear(dim, dim, bias=True, axes=('mlp', 'embed'), rngs=rngs)

    def __call__(
        self, x: Sequence, ctx: Context, state: HyenaState | None = None
    ) -> tuple[Sequence, HyenaState | None]:
        wide = wide_dtype(x.dtype)
        # What is kept is in the type of `x`, what is computed of it is not.
        mixed, prelude = recomputed(lambda maps, before: self.prelude(maps.astype(wide), ctx.segments, before))(
            self.input(x), None if state is None else state.prelude
        )
        *gates, v = jnp.split(mixed, self.order + 1, axis=-1)
        past = None if state is None else _moved_on(state.past, ctx.segments_or_ones())
        steps = x.shape[1]
        slots = steps if past is None else past.runs.shape[1]
        lags = past.ahead[0].shape[1] if past is not None and steps == 1 else slots
        kernels = self._kernels(lags, wide)
        inputs = []
        for j, (gate, kernel) in enumerate(zip(gates[:0:-1], kernels, strict=True)):
            v = gate * v
            if past is None:
                read = self._convolved(v, kernel, ctx.segments)
            else:
                inputs.append(_put(past.inputs[j], v, past.consumed - steps))
                read = self._read(inputs[j], past.ahead[j], kernel, past, steps)
            v = read + self.direct[...].astype(wide)[j][None, None] * v
        y = self.output((v * gates[0]).astype(x.dtype))
        if past is None:
            return y, None
        past = past._replace(inputs=tuple(inputs))
        if steps > 1:
            past = past._replace(ahead=self._ahead(past, kernels), begun=past.consumed)
        else:
            ahead, begun = jax.lax.cond(
                past.consumed - past.begun == lags,
                lambda past: (self._ahead(past, self._kernels(slots, wide)), past.consumed),
                lambda past: (past.ahead, past.begun),
                past,
            )
            past = past._replace(ahead=ahead, begun=begun)
        return jnp.where(past.consumed > slots, jnp.nan, y), HyenaState(prelude, past)

    @property
    def divides_time(self) -> bool:
        return True

    def init_state(self, batch: int, length: int, dtype: DTypeLike) -> HyenaState:
        """Returns room for the inputs of `length` tokens."""
        inputs, ahead = (
            tuple(jnp.zeros((batch, size, self.dim), wide_dtype(dtype)) for _ in range(self.order - 1))
            for size in (length, block_length(length))
        )
        # Two arrays, as a call may be given the memory of each.
        consumed, begun = (jnp.zeros((), jnp.int32) for _ in range(2))
        past = Past(inputs, ahead, jnp.full((batch, length), -1, jnp.int32), no_segment(batch), consumed, begun)
        return HyenaState(self.prelude.init_state(batch, dtype), past)

    def _kernels(self, lags: int, dtype: DTypeLike) -> list[Float[Array, 'w d']]:
        return jnp.split(self.filters(max(1, lags), dtype), self.order - 1, axis=-1)

    def _convolved(
        self, inputs: Float[Array, 'b s d'], kernel: Float[Array, 's d'], segments: Segments | None = None
    ) -> Float[Array, 'b s d']:
        return cores.long_conv(inputs, kernel, segments=segments, implementation=self.implementation)

    def _read(
        self,
        inputs: Float[Array, 'b s d'],
        ahead: Float[Array, 'b w d'],
        kernel: Float[Array, 'l d'],
        past: Past,
        steps: int,
    ) -> Float[Array, 'b t d']:
        """The convolution at the last `steps` tokens; of a single one, `ahead` and a sum over its own block."""
        if steps > 1:
            y = self._convolved(inputs, kernel, past.runs)
            return jax.lax.dynamic_slice_in_dim(y, past.consumed - steps, steps, axis=1)
        width = ahead.shape[1]
        first = _first_slot(past.begun, inputs.shape[1], width)
        own, runs = (jax.lax.dynamic_slice_in_dim(each, first, width, axis=1) for each in (inputs, past.runs))
        slot, last = jnp.arange(width), past.consumed - 1 - first
        here, given = (jax.lax.dynamic_slice_in_dim(each, last, 1, axis=1) for each in (runs, ahead))
        taps = jnp.where((slot <= last)[:, None], kernel[jnp.maximum(last - slot, 0)], jnp.zeros_like(kernel))
        seen = (runs == here) & (first + slot >= past.begun)[None]
        y = jnp.einsum('bwd,wd->bd', jnp.where(seen[..., None], own, jnp.zeros_like(own)), taps, precision='highest')
        # What came before the block gives nothing to a document that began in it.
        goes_on = here == _run_before(past.runs, past.begun)
        return y[:, None] + jnp.where(goes_on[..., None], given, jnp.zeros_like(given))

    def _ahead(self, past: Past, kernels: list[Float[Array, 's d']]) -> tuple[Float[Array, 'b w d'], ...]:
        """What all inputs so far, of the document of the last one, give to the block that begins with the next."""
        width, seen = past.ahead[0].shape[1], past.runs == _run_before(past.runs, past.consumed)
        first = _first_slot(past.consumed, past.runs.shape[1], width)

        def given(inputs: Float[Array, 'b s d'], kernel: Float[Array, 's d']) -> Float[Array, 'b w d']:
            y = self._convolved(jnp.where(seen[..., None], inputs, jnp.zeros_like(inputs)), kernel)
            return jax.lax.dynamic_slice_in_dim(y, first, width, axis=1)

        return tuple(map(given, past.inputs, kernels))


def block_length(slots: int) -> int:
    """How many single tokens of a stream make a block: a power of two near the root of `s log2 s`.

    There the sum over a block's own inputs, `w d` a step, costs about what a convolution of all, `s log2 s d`, costs
    where `w` steps share it.
    """
    slots = max(2, slots)
    return 1 << round(math.log2(slots * math.log2(slots)) / 2)


def _first_slot(begun: Int[Array, ''], slots: int, width: int) -> Int[Array, '']:
    """The first of the `width` slots where a block is kept: the one it begins with, or an earlier one near the end."""
    return jnp.minimum(begun, slots - width)


def _run_before(runs: Int[Array, 'b s'], slot: Int[Array, '']) -> Int[Array, 'b 1']:
    """The document of the token before a slot; before the first, of the first slot."""
    return jax.lax.dynamic_slice_in_dim(runs, jnp.maximum(slot - 1, 0), 1, axis=1)


def _moved_on(past: Past, segments: Segments) -> Past:
    """The past with the documents of a call's tokens; raises `UserError` for a call of more tokens than slots."""
    steps, slots = segments.shape[1], past.runs.shape[1]
    if steps > slots:
        raise UserError(f'{steps} tokens do not fit in a state of length {slots}; init_state needs a greater length')
    started = jnp.cumsum(document_starts(segments, past.segment), axis=1, dtype=jnp.int32)
    runs = _put(past.runs, _run_before(past.runs, past.consumed) + started, past.consumed)
    return past._replace(runs=runs, segment=segments[:, -1], consumed=past.consumed + steps)


def _put(slots: Array, new: Array, start: Int[Array, '']) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(slots, new.astype(slots.dtype), start, axis=1)
