"""RAT: a recurrence within chunks, and softmax attention to what each chunk ended in."""

from collections.abc import Sequence as Shape
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int

from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.functional import cores
from attnlab.functional.precision import wide_dtype
from attnlab.functional.recomputed import gated, recomputed
from attnlab.functional.recurrences import carried, document_starts, no_segment
from attnlab.mixers.mixer import Mixer
from attnlab.nn.heads import by_head, head_channels
from attnlab.nn.parameter import param
from attnlab.nn.positions import Rope
from attnlab.nn.projections import Linear
from attnlab.typing import Queries, Segments, Sequence

ROPE = Rope()


class Summaries(NamedTuple):
    """What whole chunks ended in, in the order of the stream; slots from `total` on are empty.

    Attributes:
      keys: rotated.
      values: as the recurrence leaves them.
      segments: their documents.
      total: how many there are in every row.
    """

    keys: Float[Array, 'b n h k']
    values: Float[Array, 'b n h k']
    segments: Int[Array, 'b n']
    total: Int[Array, ' b']


class RATState(NamedTuple):
    """What a layer remembers of a stream.

    Attributes:
      summaries: of the chunks that ended.
      running: values and keys of the chunk that goes on, float32 or float64.
      segment: the segment of the last token, `b`; -1 before the first.
    """

    summaries: Summaries
    running: Float[Array, 'b m']
    segment: Int[Array, ' b']


class RAT(Mixer):
    """Softmax attention to gated averages of keys and values over chunks of `chunk` tokens.

        v'_t = g_t v'_{t-1} + (1 - g_t) v_t    k'_t likewise, both from nothing at the first token of a chunk
        y_t = W_o (sigmoid(z_t) * sum_j w_tj v'_j)    w_t = softmax(q_t . k'_j / sqrt(k))

    over the last token j of every earlier chunk of the document, and t itself. `g = sigmoid(W_g x + c)`, one a channel,
    of values and keys; c starts at the logarithm of a number from 1 to `chunk - 1`. Queries and keys of `groups` serve
    the heads in turn, and are rotated by the number of their chunk. A chunk of one token is attention, to keys and
    values times `1 - g`; a chunk as long as the document is a recurrence.
    Wei et al. 2025, https://arxiv.org/abs/2507.04416.

    The state holds a key and a value for every `chunk` tokens; a call beyond its `length` gives NaN. Raises `UserError`
    for heads that do not divide the width, or groups that do not divide the heads.

    Args:
      dim: model width.
      heads: query heads.
      chunk: tokens of a chunk.
      groups: sets of queries and keys.
      position: rotates queries and keys; `None`: no positions.
      implementation: of the core of the recurrence; `None`: the default of the platform.
      rngs: draws the parameters.
    """

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        chunk: int = 16,
        groups: int = 2,
        position: Rope | None = ROPE,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        channels = head_channels(dim, heads)
        if heads % groups:
            raise UserError(f'{groups} groups do not divide {heads} heads; groups serve the heads in turn')
        self.heads, self.chunk, self.position, self.implementation = heads, chunk, position, implementation
        self.value, self.output_gate, self.forget = (Linear(dim, dim, rngs=rngs) for _ in range(3))
        self.query, self.key = (Linear(dim, groups * channels, rngs=rngs) for _ in range(2))

        def lengths(key: jax.Array, shape: Shape[int], dtype: DTypeLike) -> Array:
            return jnp.log(jax.random.uniform(key, shape, dtype, minval=1, maxval=max(chunk - 1, 1) + 1e-6))

        self.bias = param(lengths, (dim,), axes=('heads',), group='dynamics', rngs=rngs)
        self.output = Linear(dim, dim, axes=('heads', 'embed'), rngs=rngs)

    def __call__(self, x: Sequence, ctx: Context, state: RATState | None = None) -> tuple[Sequence, RATState | None]:
        before = self.init_state(x.shape[0], x.shape[1], x.dtype) if state is None else state
        segments = ctx.segments_or_ones()
        starts = document_starts(segments, before.segment) | (ctx.positions % self.chunk == 0)
        v, k, running = self._running(x, starts, carried(before.running, segments, before.segment))
        q = self._per_head(self.query(x)).astype(v.dtype)
        if self.position is not None:
            place = ctx.positions // self.chunk
            q, k = self.position.rotate(q, place), self.position.rotate(k, place)
        ends = ctx.positions % self.chunk == self.chunk - 1
        summaries = _appended(before.summaries, k, v, segments, ends)
        earlier = before.summaries.total[:, None] + jnp.cumsum(ends, axis=1, dtype=jnp.int32) - ends
        read = _attend(q, k, v, summaries, segments, earlier)
        y = self.output(gated(read.reshape(x.shape).astype(x.dtype), self.output_gate(x), jax.nn.sigmoid))
        if state is None:
            return y, None
        overflown = summaries.total > summaries.segments.shape[1]
        return jnp.where(overflown[:, None, None], jnp.nan, y), RATState(summaries, running, segments[:, -1])

    def init_state(self, batch: int, length: int, dtype: DTypeLike) -> RATState:
        """Returns room for the chunks of `length` tokens."""
        wide, slots = wide_dtype(dtype), max(1, length // self.chunk)
        dim = self.bias.shape[0]
        keys, values = (jnp.zeros((batch, slots, self.heads, dim // self.heads), wide) for _ in range(2))
        count, segments = jnp.zeros(batch, jnp.int32), jnp.zeros((batch, slots), jnp.int32)
        summaries = Summaries(keys, values, segments, count)
        return RATState(summaries, jnp.zeros((batch, 2 * dim), wide), no_segment(batch))

    def _running(
        self, x: Sequence, starts: Bool[Array, 'b t'], state: Float[Array, 'b m']
    ) -> tuple[Queries, Queries, Float[Array, 'b m']]:
        """Values and keys as the recurrence has them at every token, by head, and after the last."""
        wide = state.dtype

        @recomputed
        def entries(logits: Sequence, values: Sequence, keys: Sequence) -> tuple[Array, Array]:
            """What is taken of values and keys, and by what those before are multiplied."""
            logits = logits.astype(wide) + jnp.broadcast_to(self.bias[...].astype(wide), logits.shape)
            taken = jax.nn.sigmoid(-logits)
            kept = jnp.where(starts[..., None], jnp.zeros_like(logits), jax.nn.sigmoid(logits))
            both = jnp.concatenate([taken * values.astype(wide), taken * keys.astype(wide)], axis=-1)
            return both, jnp.concatenate([kept, kept], axis=-1)

        running, last = cores.linear_scan(
            *entries(self.forget(x), self.value(x), self._per_head(self.key(x)).reshape(x.shape)),
            state=state,
            implementation=self.implementation,
        )
        v, k = (by_head(each, self.heads) for each in jnp.split(running, 2, axis=-1))
        return v, k, last

    def _per_head(self, x: Float[Array, 'b t m']) -> Queries:
        """The groups for the heads in turn."""
        channels = self.bias.shape[0] // self.heads
        groups = x.reshape(*x.shape[:2], -1, channels)
        return jnp.tile(groups, (1, 1, self.heads // groups.shape[2], 1))


def _appended(summaries: Summaries, k: Queries, v: Queries, segments: Segments, ends: Bool[Array, 'b t']) -> Summaries:
    """The summaries with those of a call; tokens that end no chunk are dropped."""
    slots = summaries.segments.shape[1]
    place = summaries.total[:, None] + jnp.cumsum(ends, axis=1, dtype=jnp.int32) - 1
    place = jnp.where(ends, place, slots)

    @recomputed
    def put(old: Array, new: Array) -> Array:
        # Row by row: where rows are numbers that index, they are gathered on a mesh that divides them.
        written = jax.vmap(lambda old, place, new: old.at[place].set(new, mode='drop'))
        return written(old, place, new.astype(old.dtype))

    return Summaries(
        put(summaries.keys, k),
        put(summaries.values, v),
        put(summaries.segments, segments),
        summaries.total + jnp.sum(ends, axis=1, dtype=jnp.int32),
    )


def _attend(
    q: Queries, k: Queries, v: Queries, summaries: Summaries, segments: Segments, earlier: Int[Array, 'b t']
) -> Queries:
    """Softmax attention to the summaries before every token, of which there are `earlier`, and to the token itself."""
    q = q * q.shape[-1] ** -0.5
    scores = jnp.einsum('bthk,bnhk->bhtn', q, summaries.keys.astype(q.dtype), precision='highest')
    slots = jnp.arange(summaries.segments.shape[1])
    seen = (slots[None, None] < earlier[..., None]) & (segments[..., None] == summaries.segments[:, None])
    scores = jnp.where(seen[:, None], scores, -jnp.inf)
    own = jnp.moveaxis(jnp.sum(q * k, axis=-1), 1, 2)[..., None]
    weights = jax.nn.softmax(jnp.concatenate([scores, own], axis=-1), axis=-1)
    past = jnp.einsum('bhtn,bnhk->bthk', weights[..., :-1], summaries.values.astype(q.dtype), precision='highest')
    return past + jnp.moveaxis(weights[..., -1], 1, 2)[..., None] * v
