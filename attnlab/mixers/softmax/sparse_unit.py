"""A gated attention unit for the tokens that a layer chooses, around a moving average for all of them."""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from attnlab.context import PADDING, Context
from attnlab.errors import UserError
from attnlab.functional import cores
from attnlab.functional.precision import wide_dtype
from attnlab.functional.recomputed import recomputed
from attnlab.functional.recurrences import carried, document_starts, no_segment
from attnlab.mixers.mixer import Mixer
from attnlab.nn.gated_units import (
    ROPE,
    SOFTMAX,
    QueriesAndKeys,
    averaged,
    gated_by_silu,
    offset_deviation,
    rounded_silu,
    wide_silu,
)
from attnlab.nn.parameter import param
from attnlab.nn.positions import Rope
from attnlab.nn.projections import Linear
from attnlab.nn.systems import DampedAverage
from attnlab.typing import Segments, Sequence
from pallas_kernels import SquaredRelu, WeightMap


class Chosen(NamedTuple):
    """The active tokens of every row, one after the other, in `c` slots of which the last may be empty.

    Attributes:
      tokens: the token of every slot, 0 in an empty one.
      slots: the slot of every token, `c` for one that is not active.
      runs: the document of every slot, numbered from 1 in the row; 0 in an empty one.
    """

    tokens: Int[Array, 'b c']
    slots: Int[Array, 'b t']
    runs: Int[Array, 'b c']


class SparseState(NamedTuple):
    """What a layer of sparse activation remembers of a stream.

    Attributes:
      average: the state of the moving average, float32 or float64.
      keys: of the last active tokens, the newest last.
      values: theirs.
      held: whether a slot holds a token of the document of the last one.
      active: how many active tokens that document has had.
      segment: the segment of the last token; -1 before the first.
    """

    average: Float[Array, 'b d n']
    keys: Float[Array, 'b w k']
    values: Float[Array, 'b w v']
    held: Bool[Array, 'b w']
    active: Int[Array, ' b']
    segment: Int[Array, ' b']


class SparseGatedUnit(Mixer):
    """SeqBoat: a moving average of all tokens, and a gated attention unit of those that it makes active.

        m = silu(average(x) + w x)     p = softmax(W_p m / temperature)     a = [p_1 > p_0]
        z, r, v = silu(W m)     h = W_h (r * (A v))     y = silu(W_s m + a max(p) h + x) - x

    `A` is attention of one head, by default a softmax, of gains and offsets of `z`, from an active token to itself and
    the `window` active tokens before it in the document: tokens that are not active take no place. Active tokens are
    moved together before the unit and put back after it. The choice takes no noise; its gradient is that of the
    confidence `max(p)` of active tokens. In a block that adds `y` to its input without a norm before it this is the
    layer of the paper. Ren et al. 2023, https://arxiv.org/abs/2306.11197. With `weights=SquaredRelu()` it is
    `relu(q k^T / window)^2`, as in the released code, and offsets start as in `GatedAttentionUnit`.

    The state is that of the average, and keys and values of `window` tokens.

    Raises `UserError` for a temperature that is not positive.

    Args:
      dim: model width.
      key_dim: channels of `z`.
      value_dim: channels of `v` and `r`; `None`: twice the width.
      state: dimensions of the moving average, of every channel.
      window: active tokens before its own that a token sees.
      capacity: the most active tokens of a document; later ones are not active. A row of one document then takes a
        unit of that many tokens. `None`: a document may be active throughout.
      temperature: at the start, over the root of the width.
      position: rotates queries and keys by their places among all tokens; `None`: no positions but the average.
      weights: the map from scores to weights.
      implementation: of the cores; `None`: the default of the platform.
      rngs: draws the parameters.
    """

    goes_on = True

    def __init__(
        self,
        dim: int,
        *,
        key_dim: int = 64,
        value_dim: int | None = None,
        state: int = 16,
        window: int = 128,
        capacity: int | None = None,
        temperature: float = 0.3,
        position: Rope | None = ROPE,
        weights: WeightMap = SOFTMAX,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        if temperature <= 0:
            raise UserError(f'temperature of SparseGatedUnit is {temperature}; it must be positive')
        value_dim = 2 * dim if value_dim is None else value_dim
        self.key_dim, self.value_dim, self.window, self.capacity = key_dim, value_dim, window, capacity
        self.weights, self.implementation = weights, implementation
        self.average = DampedAverage(dim, state=state, rngs=rngs)
        self.direct = param(nnx.initializers.normal(1.0), (dim,), axes=('mlp',), group='vector', rngs=rngs)
        self.choice = Linear(dim, 2, bias=True, axes=('embed', None), rngs=rngs)
        start = nnx.initializers.constant(math.log(temperature * math.sqrt(dim)))
        self.log_temperature = param(start, (), axes=(), group='vector', rngs=rngs)
        self.own = Linear(dim, dim, bias=True, rngs=rngs)
        self.mixed = Linear(dim, key_dim + 2 * value_dim, bias=True, rngs=rngs)
        squared = isinstance(weights, SquaredRelu)
        self.scale = 1 / window if squared else None
        self.heads = QueriesAndKeys(
            key_dim, position=position, offset=offset_deviation(window) if squared else 0.0, rngs=rngs
        )
        self.output = Linear(value_dim, dim, bias=True, axes=('heads', 'embed'), rngs=rngs)

    def __call__(
        self, x: Sequence, ctx: Context, state: SparseState | None = None
    ) -> tuple[Sequence, SparseState | None]:
        segments, wide = ctx.segments_or_ones(), wide_dtype(x.dtype)
        before = None if state is None else carried(state.average, segments, state.segment)
        average, after = self.average(x, ctx.segments, before, implementation=self.implementation)
        m = averaged(average, x, self.direct[...])
        runs = jnp.cumsum(document_starts(segments), axis=1, dtype=jnp.int32)
        confidence, wanted = self.choose(m)
        active, counts = self._within_capacity(wanted & (segments != PADDING), segments, state)
        chosen = self._chosen(active, runs, one_document=ctx.segments is None)

        z, r, v = jnp.split(
            self.mixed(_at(m.astype(x.dtype), chosen.tokens)),
            (self.key_dim, self.key_dim + self.value_dim),
            axis=-1,
        )
        places = jnp.take_along_axis(ctx.positions, chosen.tokens, axis=1)
        here = dataclasses.replace(ctx, positions=places, segments=None)
        q, k = (each.astype(x.dtype) for each in self.heads(wide_silu(z), here))
        v = rounded_silu(v)[:, :, None]
        attention = functools.partial(
            cores.attention, weights=self.weights, scale=self.scale, implementation=self.implementation
        )
        if state is None:
            seen = None if ctx.segments is None else chosen.runs
            read = attention(q, k, v, causal=True, window=self.window + 1, segments=seen)
        else:
            held = jnp.where(state.held & (segments[:, :1] == state.segment[:, None]), 1, 0)
            known = jnp.concatenate([held, chosen.runs], axis=1)
            k = jnp.concatenate([state.keys[:, :, None].astype(x.dtype), k], axis=1)
            v = jnp.concatenate([state.values[:, :, None].astype(x.dtype), v], axis=1)
            read = attention(q, k, v, causal=False, bias=self._bias(chosen.runs, known, wide))
            # The newest tokens stand behind those known before, and empty slots behind them.
            newest = jnp.sum(active, axis=1, dtype=jnp.int32)[:, None] + jnp.arange(self.window)[None]
            state = state._replace(
                keys=_at(k[:, :, 0], newest).astype(state.keys.dtype),
                values=_at(v[:, :, 0], newest).astype(state.values.dtype),
                held=jnp.take_along_axis(known, newest, axis=1) == runs[:, -1:],
                active=counts,
                segment=segments[:, -1],
            )
        h = self.output(gated_by_silu(read[:, :, 0], r))

        # A slot more, of zeros, is what tokens read that are not active.
        given = _at(jnp.pad(h, ((0, 0), (0, 1), (0, 0))), chosen.slots)
        y = _joined(self.own(m.astype(x.dtype)), confidence, given, x)
        if state is None or after is None:
            return y, None
        return y, state._replace(average=after)

    def choose(self, m: Float[Array, 'b t d']) -> tuple[Float[Array, 'b t'], Bool[Array, 'b t']]:
        """Returns the confidence of the choice for every token, and whether it is to be active."""
        logits = self.choice(m)
        weights = jax.nn.softmax(logits / jnp.exp(self.log_temperature[...].astype(m.dtype)), axis=-1)
        return jnp.max(weights, axis=-1), logits[..., 1] > logits[..., 0]

    def init_state(self, batch: int, length: int, dtype: DTypeLike) -> SparseState:
        """Returns an average at rest and no active tokens; its size does not depend on `length`."""
        del length
        return SparseState(
            self.average.init_state(batch, dtype),
            jnp.zeros((batch, self.window, self.key_dim), dtype),
            jnp.zeros((batch, self.window, self.value_dim), dtype),
            jnp.zeros((batch, self.window), bool),
            jnp.zeros((batch,), jnp.int32),
            no_segment(batch),
        )

    def _within_capacity(
        self, wanted: Bool[Array, 'b t'], segments: Segments, state: SparseState | None
    ) -> tuple[Bool[Array, 'b t'], Int[Array, ' b']]:
        """The first tokens of every document, and how many the last document of the row has had."""
        last = None if state is None else state.segment
        counts = jnp.cumsum(wanted, axis=1, dtype=jnp.int32)
        if state is not None:
            counts = counts + jnp.where(segments[:, 0] == state.segment, state.active, 0)[:, None]
        before = jnp.where(document_starts(segments, last), counts - wanted, 0)
        # Counts never fall: the greatest of those before a document is that before the last one.
        counts = counts - jax.lax.cummax(before, axis=1)
        if self.capacity is None:
            return wanted, counts[:, -1]
        return wanted & (counts <= self.capacity), jnp.minimum(counts[:, -1], self.capacity)

    def _chosen(self, active: Bool[Array, 'b t'], runs: Int[Array, 'b t'], *, one_document: bool) -> Chosen:
        length = active.shape[1]
        room = length if self.capacity is None or not one_document else min(length, self.capacity)
        slots = jnp.where(active, jnp.cumsum(active, axis=1, dtype=jnp.int32) - 1, room)
        # Row by row: where rows are numbers that index, they are gathered on a mesh that divides them.
        put = jax.vmap(lambda slots, values: jnp.zeros(room, jnp.int32).at[slots].set(values, mode='drop'))
        tokens = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), active.shape)
        return Chosen(tokens=put(slots, tokens), slots=slots, runs=put(slots, runs))

    def _bias(self, queries: Int[Array, 'b c'], keys: Int[Array, 'b s'], dtype: DTypeLike) -> Float[Array, 'b 1 c s']:
        """Minus infinity where a query does not see a key; the first `window` keys are those of the state."""
        distance = jnp.arange(queries.shape[1])[:, None] + self.window - jnp.arange(keys.shape[1])[None]
        near = (distance >= 0) & (distance <= self.window)
        seen = near[None] & (queries[:, :, None] == keys[:, None, :])
        return jnp.where(seen, 0.0, -jnp.inf).astype(dtype)[:, None]


@recomputed
def _joined(
    own: Float[Array, 'b t d'], confidence: Float[Array, 'b t'], given: Float[Array, 'b t d'], x: Float[Array, 'b t d']
) -> Float[Array, 'b t d']:
    return jax.nn.silu(own + confidence[..., None].astype(x.dtype) * given + x) - x


def _at(x: Float[Array, 'b s d'], index: Int[Array, 'b t']) -> Float[Array, 'b t d']:
    """The entries of every row at the places of an index."""
    return jnp.take_along_axis(x, index[..., None], axis=1)
