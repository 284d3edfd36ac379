"""Hyena: long convolutions and gates in turn."""

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
from attnlab.functional.recurrences import document_starts, no_segment, state_dtype
from attnlab.mixers.mixer import Mixer
from attnlab.nn.filters import ImplicitFilter
from attnlab.nn.parameter import param
from attnlab.nn.preludes import Prelude, ShortConv
from attnlab.nn.projections import Linear
from attnlab.typing import Segments, Sequence, State


class Past(NamedTuple):
    """The inputs of long convolutions so far, one slot a token.

    Attributes:
      inputs: those of every convolution, in order.
      runs: the document of every token, counted from 0; -1 in empty slots.
      segment: the segment of the last token, `b`; -1 before the first.
      consumed: how many tokens there were.
    """

    inputs: tuple[Float[Array, 'b s d'], ...]
    runs: Int[Array, 'b s']
    segment: Int[Array, ' b']
    consumed: Int[Array, '']


class HyenaState(NamedTuple):
    """What the operator remembers of a stream: the state of the prelude, and all inputs of the convolutions."""

    prelude: State
    past: Past


class Hyena(Mixer):
    """The Hyena operator of an order: `y = W_o (x_0 v)`, where `v` becomes, for every j from the last to 1,

        v <- k_j * (x_j v) + b_j x_j v

    `x_0 ... v` are maps of the input under a short convolution, `*` a causal convolution as long as the row with a
    filter of `filters`; all but the maps is in float32 or better. A stream keeps all inputs of the convolutions, as a
    filter has no state of fixed size: a step takes time linear in what came before, and a call beyond the `length` of
    the state gives NaN.
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
        wide = state_dtype(x.dtype)
        maps = self.input(x).astype(wide)
        mixed, prelude = self.prelude(maps, ctx.segments, None if state is None else state.prelude)
        *gates, v = jnp.split(mixed, self.order + 1, axis=-1)
        slots = x.shape[1] if state is None else state.past.runs.shape[1]
        past = None if state is None else _moved_on(state.past, ctx.segments_or_ones())
        kernels = jnp.split(self.filters(max(1, slots), wide), self.order - 1, axis=-1)
        inputs = []
        for j, (gate, kernel) in enumerate(zip(gates[:0:-1], kernels, strict=True)):
            v = gate * v
            if past is None or state is None:
                read = cores.long_conv(v, kernel, segments=ctx.segments, implementation=self.implementation)
            else:
                inputs.append(_put(past.inputs[j], v, state.past.consumed))
                read = self._read(inputs[-1], kernel, past.runs, state.past.consumed, x.shape[1])
            v = read + self.direct[...].astype(wide)[j][None, None] * v
        y = self.output((v * gates[0]).astype(x.dtype))
        if past is None:
            return y, None
        overflown = past.consumed > slots
        return jnp.where(overflown, jnp.nan, y), HyenaState(prelude, past._replace(inputs=tuple(inputs)))

    @property
    def divides_time(self) -> bool:
        return True

    def init_state(self, batch: int, length: int, dtype: DTypeLike) -> HyenaState:
        """Returns room for the inputs of `length` tokens."""
        inputs = tuple(jnp.zeros((batch, length, self.dim), state_dtype(dtype)) for _ in range(self.order - 1))
        past = Past(inputs, jnp.full((batch, length), -1, jnp.int32), no_segment(batch), jnp.zeros((), jnp.int32))
        return HyenaState(self.prelude.init_state(batch, dtype), past)

    def _read(
        self,
        inputs: Float[Array, 'b s d'],
        kernel: Float[Array, 's d'],
        runs: Int[Array, 'b s'],
        start: Int[Array, ''],
        steps: int,
    ) -> Float[Array, 'b t d']:
        """The convolution at the `steps` tokens from `start` on; of a single one, a sum over those before it."""
        if steps > 1:
            y = cores.long_conv(inputs, kernel, segments=runs, implementation=self.implementation)
            return jax.lax.dynamic_slice_in_dim(y, start, steps, axis=1)
        lag = start - jnp.arange(inputs.shape[1])
        here = jax.lax.dynamic_slice_in_dim(runs, start, 1, axis=1)
        taps = jnp.where((lag >= 0)[:, None], kernel[jnp.maximum(lag, 0)], jnp.zeros_like(kernel))
        seen = jnp.where((runs == here)[..., None], inputs, jnp.zeros_like(inputs))
        return jnp.einsum('bsd,sd->bd', seen, taps, precision='highest')[:, None]


def _moved_on(past: Past, segments: Segments) -> Past:
    """The past with the documents of a call's tokens; raises `UserError` for a call of more tokens than slots."""
    steps, slots = segments.shape[1], past.runs.shape[1]
    if steps > slots:
        raise UserError(f'{steps} tokens do not fit in a state of length {slots}; init_state needs a greater length')
    started = jnp.cumsum(document_starts(segments, past.segment), axis=1, dtype=jnp.int32)
    runs = jnp.max(past.runs, axis=1, keepdims=True) + started
    return Past(past.inputs, _put(past.runs, runs, past.consumed), segments[:, -1], past.consumed + steps)


def _put(slots: Array, new: Array, start: Int[Array, '']) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(slots, new.astype(slots.dtype), start, axis=1)
