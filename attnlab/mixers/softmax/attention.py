"""Attention: every query reads a weighted mean of the values before it."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int, Shaped

import pallas_kernels
from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.functional import cores
from attnlab.functional.cache import Entries, KeyValueCache, empty_cache, extend, overflown
from attnlab.functional.cached import attend_cached
from attnlab.functional.dense import dense_attention
from attnlab.functional.masks import reachable, visible
from attnlab.functional.penalty import penalised
from attnlab.functional.recurrences import state_dtype
from attnlab.functional.rotary import rotated_channels
from attnlab.mixers.mixer import Mixer, require_causal
from attnlab.nn.heads import check_groups, head_channels
from attnlab.nn.positions import Alibi, Rope
from attnlab.nn.preludes import ShiftState
from attnlab.nn.projections import Linear
from attnlab.typing import Heads, Keys, Queries, Segments, Sequence, Values
from pallas_kernels import Softmax, WeightMap


class ForgettingEntries(NamedTuple):
    """The `Entries` of a cache with a forget gate.

    `forgotten` is what the next token's query adds to the score of each key before its own gate: the sum of the log
    gates of all tokens after the key, `b s h`, in float32 or better.
    """

    keys: Float[Array, 'b g s k']
    values: Float[Array, 'b g s v']
    segments: Segments
    forgotten: Float[Array, 'b s h']


class AttentionState(NamedTuple):
    """What attention remembers of a stream.

    Attributes:
      cache: keys and values, and what gates have forgotten of them.
      shifts: the last key and the last value before they were shifted; empty without a shift.
    """

    cache: KeyValueCache
    shifts: tuple[ShiftState, ...]


class Terms(NamedTuple):
    """What the queries of a call bring besides themselves.

    Attributes:
      temperature: factor of the products of every query, `b t h`, or `None`.
      log_forget: the logarithms of the forget gates, `b t h`, or `None`.
    """

    temperature: Float[Array, 'b t h'] | None
    log_forget: Float[Array, 'b t h'] | None


class Attention(Mixer):
    """Multi-head attention, `y_i = W_o sum_j p_ij v_j`, `p_i` the weights of the scores `q_i . k_j / sqrt(key_dim)`.

    Query head `i` reads key/value head `i // (heads / kv_heads)`: as many as `heads` make multi-head, one multi-query
    attention. `weights` is the map from scores to weights; every other part may be `None`, which leaves it out.
    Vaswani et al. 2017, https://arxiv.org/abs/1706.03762; Shazeer 2019, https://arxiv.org/abs/1911.02150; Ainslie et
    al. 2023, https://arxiv.org/abs/2305.13245.

    The state holds a cache of keys and values. It takes the `length` tokens it was made for, and a call that goes
    beyond gives NaN; but with a window no longer than that it is a ring of `window + sinks` slots, which never fills.

    Raises `UserError` for sizes that do not divide, for sinks together with segments, and for parts that exclude each
    other.
    """

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        kv_heads: int | None = None,
        key_dim: int | None = None,
        value_dim: int | None = None,
        shift: Callable[..., nnx.Module] | None = None,
        qk_norm: Callable[..., nnx.Module] | None = None,
        position: Rope | Alibi | None = None,
        weights: WeightMap | Callable[..., nnx.Module] = Softmax(),
        temperature: Callable[..., nnx.Module] | None = None,
        forget: Callable[..., nnx.Module] | None = None,
        sink: Callable[..., nnx.Module] | None = None,
        window: int | None = None,
        sinks: int = 0,
        read: Callable[..., nnx.Module] | None = None,
        norm: Callable[..., nnx.Module] | None = None,
        gate: Callable[..., nnx.Module] | None = None,
        penalty: Callable[..., nnx.Module] | None = None,
        bias: bool = False,
        causal: bool = True,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        """Makes the projections and the parts that have parameters.

        Args:
          dim: model width.
          heads: query heads.
          kv_heads: key and value heads, a divisor of `heads`; `None`: as many.
          key_dim: channels of a query or key per head; `None`: `dim / heads`.
          value_dim: channels of a value per head; `None`: `key_dim`.
          shift: made as `shift(dim, heads=, channels=, rngs=)`, one for keys and one for values, which it mixes with
            those of the token before.
          qk_norm: made as `qk_norm(key_dim, heads=, rngs=)`, one for queries and one for keys, before positions.
          position: how positions enter the scores.
          weights: the map from scores to weights: one of `pallas_kernels`, or one that wants whole rows, made as
            `weights(heads=, rngs=)` (see `attnlab.nn.dense_maps`).
          temperature: made as `temperature(dim, heads=, rngs=)`; from the input and the number of keys a query sees
            gives the factor of its products with them.
          forget: made as `forget(dim, heads=, rngs=)`; gives the logarithms of forget gates, `b t h`, from the input: a
            score loses those of all tokens after the key, up to the query.
          sink: made as `sink(heads=, rngs=)`; gives the score of a key without a value for every head.
          window: how many keys a query sees, its own included; `None`: all.
          sinks: how many of the first keys of the row it sees besides (Xiao et al. 2024,
            https://arxiv.org/abs/2309.17453).
          read: made as `read(heads=, rngs=)`; combines a query's own value, what it reads, and the mean of the values
            that it sees. Queries then start at zero, so that what they read starts as that mean.
          norm: made as `norm(value_dim, heads=, rngs=)`, applied to what heads have read.
          gate: made as `gate(dim, heads=, channels=, rngs=)`; multiplies it after that.
          penalty: made as `penalty(rngs=)`; a term of the loss in training, from queries and keys.
          bias: whether the projections have one.
          causal: whether a query sees no later key.
          implementation: of the core; `None`: the default of the platform.
          rngs: draws the parameters.
        """
        kv_heads = heads if kv_heads is None else kv_heads
        key_dim = head_channels(dim, heads, instead='key_dim') if key_dim is None else key_dim
        value_dim = key_dim if value_dim is None else value_dim
        check_groups(heads, kv_heads)
        if sinks and window is None:
            raise UserError(f'sinks is {sinks} without a window: every key is seen already')
        if isinstance(position, Rope):
            rotated_channels(key_dim, position.fraction)
        if forget is not None and not causal:
            raise UserError('a forget gate wants causal attention: it sums what lies between a key and a later query')
        if forget is not None and sinks:
            raise UserError('sinks are there to stay, and a forget gate forgets them; give one of the two')
        self.heads, self.kv_heads, self.key_dim, self.value_dim = heads, kv_heads, key_dim, value_dim
        self.position = position
        self.window, self.sinks, self.causal, self.implementation = window, sinks, causal, implementation
        self.query = Linear(dim, heads * key_dim, bias=bias, rngs=rngs)
        self.key = Linear(dim, kv_heads * key_dim, bias=bias, rngs=rngs)
        self.value = Linear(dim, kv_heads * value_dim, bias=bias, rngs=rngs)
        self.output = Linear(heads * value_dim, dim, bias=bias, axes=('heads', 'embed'), rngs=rngs)
        widths = () if shift is None else (key_dim, value_dim)
        self.shifts: Any = nnx.List(
            [shift(dim, heads=kv_heads, channels=width, rngs=rngs) for width in widths if shift]
        )
        self.query_norm = None if qk_norm is None else qk_norm(key_dim, heads=heads, rngs=rngs)
        self.key_norm = None if qk_norm is None else qk_norm(key_dim, heads=kv_heads, rngs=rngs)
        self.weights: Any = weights if isinstance(weights, WeightMap) else weights(heads=heads, rngs=rngs)
        self.temperature = None if temperature is None else temperature(dim, heads=heads, rngs=rngs)
        self.forget = None if forget is None else forget(dim, heads=heads, rngs=rngs)
        self.sink = None if sink is None else sink(heads=heads, rngs=rngs)
        self.read = None if read is None else read(heads=heads, rngs=rngs)
        self.norm = None if norm is None else norm(value_dim, heads=heads, rngs=rngs)
        self.gate = None if gate is None else gate(dim, heads=heads, channels=value_dim, rngs=rngs)
        self.penalty: Any = None if penalty is None else penalty(rngs=rngs)
        if read is not None:
            self.query.weight[...] = jnp.zeros_like(self.query.weight[...])
        self._check_parts()

    def _check_parts(self) -> None:
        """Raises `UserError` for parts that cannot go together."""
        dense = not isinstance(self.weights, WeightMap)
        if dense and (self.forget is not None or self.sink is not None):
            raise UserError(f'{type(self.weights).__name__} takes neither a forget gate nor a learned sink')
        if self.sink is not None and isinstance(self.weights, WeightMap) and not self.weights.takes_sink:
            raise UserError(f'{type(self.weights).__name__} takes no learned sink: it is no softmax')
        if self.penalty is not None and not self.causal:
            raise UserError('a penalty of rows is for causal attention')
        biased = isinstance(self.position, Alibi) or self.forget is not None or self.sink is not None
        if self.read is not None and (biased or not isinstance(self.weights, Softmax)):
            raise UserError('a read about the mean wants a softmax of products alone: no ALiBi, forget gate or sink')

    def __call__(
        self, x: Sequence, ctx: Context, state: AttentionState | None = None
    ) -> tuple[Sequence, AttentionState | None]:
        if self.sinks and ctx.segments is not None:
            raise UserError(
                'attention with sinks takes no segments: sinks are the first keys of the row, not of a document'
            )
        q, k, v, shifts = self._project(x, ctx, state)
        terms = self._terms(x, ctx)
        if state is None:
            look = functools.partial(self._attend, k=k, v=v, terms=terms, ctx=ctx)
        else:
            entries, places, cache = self._extend(k, v, terms, ctx, state.cache)
            look = functools.partial(self._look_back, entries=entries, places=places, cache=cache, terms=terms, ctx=ctx)
            state = AttentionState(_forgotten(cache, terms), shifts)
        y = look(q)
        if self.penalty is not None and state is None and not ctx.deterministic:
            y = penalised(y, self._penalty(q, k, terms, ctx))
        if self.read is not None:
            own = jnp.repeat(v, self.heads // self.kv_heads, axis=2)
            y = self.read(own, y, look(jnp.zeros_like(q)))
        if self.norm is not None:
            y = self.norm(y)
        if self.gate is not None:
            y = y * self.gate(x)
        return self.output(y.reshape(*x.shape[:2], -1)), state

    def read_weights(self, x: Sequence, ctx: Context) -> tuple[Float[Array, 'b h t s'], Bool[Array, 'b t s']]:
        """Returns every weight `p_ij` of a call without a state, and which keys each query may see; for analysis."""
        q, k, _, _ = self._project(x, ctx, None)
        batch, length, _ = x.shape
        # Values that are the rows of the identity read the weights themselves.
        identity = jnp.broadcast_to(
            jnp.eye(length, dtype=q.dtype)[None, :, None], (batch, length, self.kv_heads, length)
        )
        weights = jnp.swapaxes(self._attend(q, k, identity, self._terms(x, ctx), ctx), 1, 2)
        return weights, self._seen(ctx)

    def init_state(self, batch: int, length: int, dtype: DTypeLike) -> AttentionState:
        """Returns an empty cache of `length` slots, or of `window + sinks` when that is fewer."""
        require_causal(self.causal)
        cache = empty_cache(
            batch,
            length,
            kv_heads=self.kv_heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            dtype=dtype,
            ring=None if self.window is None else self.window + self.sinks,
        )
        if self.forget is not None:
            forgotten = jnp.zeros((*cache.entries.segments.shape, self.heads), state_dtype(dtype))
            keys, values, segments = cache.entries
            cache = cache._replace(entries=ForgettingEntries(keys, values, segments, forgotten))
        return AttentionState(cache, tuple(shift.init_state(batch, dtype) for shift in self.shifts))

    def _project(
        self, x: Sequence, ctx: Context, state: AttentionState | None
    ) -> tuple[Queries, Keys, Values, tuple[Any, ...]]:
        batch, length, _ = x.shape
        q = self.query(x).reshape(batch, length, self.heads, self.key_dim)
        k = self.key(x).reshape(batch, length, self.kv_heads, self.key_dim)
        v = self.value(x).reshape(batch, length, self.kv_heads, self.value_dim)
        shifts: list[Any] = []
        if self.shifts:
            k, after = self.shifts[0](k, x, ctx.segments, None if state is None else state.shifts[0])
            v, later = self.shifts[1](v, x, ctx.segments, None if state is None else state.shifts[1])
            shifts = [after, later]
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        if isinstance(self.position, Rope):
            q, k = self.position.rotate(q, ctx.positions), self.position.rotate(k, ctx.positions)
        return q, k, v, tuple(shifts)

    def _terms(self, x: Sequence, ctx: Context) -> Terms:
        return Terms(
            None if self.temperature is None else self.temperature(x, self._counts(ctx).astype(state_dtype(x.dtype))),
            None if self.forget is None else self.forget(x),
        )

    def _penalty(self, q: Queries, k: Keys, terms: Terms, ctx: Context) -> Float[Array, '']:
        warm = q if terms.temperature is None else q * terms.temperature[..., None].astype(q.dtype)
        counts = self._counts(ctx).astype(state_dtype(q.dtype))
        return self.penalty(warm, k, counts, ctx.segments, self.window)

    def _counts(self, ctx: Context) -> Shaped[Array, 'b t']:
        """How many keys every query sees."""
        if self.causal:
            counts = ctx.positions + 1
            if self.window is not None:
                counts = jnp.minimum(counts, self.window + self.sinks)
            return counts
        counts = pallas_kernels.visible_counts(
            ctx.positions.shape[1], causal=False, window=self.window, sinks=self.sinks, segments=ctx.segments
        )
        return jnp.broadcast_to(counts[..., 0], ctx.positions.shape)

    def _seen(self, ctx: Context) -> Bool[Array, 'b t s']:
        """Which keys each query of a call without a state may see."""
        segments = ctx.segments_or_ones()
        seen = reachable(segments.shape[1], causal=self.causal, window=self.window, sinks=self.sinks)
        return seen[None] & (segments[:, :, None] == segments[:, None, :])

    def _slopes(self, dtype: DTypeLike) -> Float[Array, 'h'] | None:
        if not isinstance(self.position, Alibi):
            return None
        return jnp.asarray(self.position.slopes(self.heads), state_dtype(dtype))

    def _attend(self, q: Queries, k: Keys, v: Values, terms: Terms, ctx: Context) -> Heads:
        """What queries read in a call without a state."""
        if not isinstance(self.weights, WeightMap):
            places = jnp.arange(q.shape[1], dtype=jnp.int32)
            bias = self._distance_bias(places, places, q.dtype)
            return self._weigh(q, k, v, self._seen(ctx), bias, terms, ctx)
        return cores.attention(
            q,
            k,
            v,
            weights=self.weights,
            causal=self.causal,
            window=self.window,
            sinks=self.sinks,
            segments=ctx.segments,
            slopes=self._slopes(q.dtype),
            log_forget=terms.log_forget,
            temperature=terms.temperature,
            sink_scores=None if self.sink is None else self.sink(),
            implementation=self.implementation,
        )

    def _weigh(
        self,
        q: Queries,
        k: Keys,
        v: Values,
        seen: Bool[Array, 'b t s'],
        bias: Float[Array, '1 _ t s'] | None,
        terms: Terms,
        ctx: Context,
    ) -> Heads:
        """The read through a map that wants whole rows."""
        key = None if ctx.deterministic else ctx.fold_in(2).dropout_key
        return dense_attention(self.weights, q, k, v, visible=seen, bias=bias, temperature=terms.temperature, key=key)

    def _extend(
        self,
        k: Float[Array, 'b t g k'],
        v: Float[Array, 'b t g v'],
        terms: Terms,
        ctx: Context,
        cache: KeyValueCache,
    ) -> tuple[Any, Int[Array, 's'], KeyValueCache]:
        """Appends tokens to the cache; see `extend`."""
        keys, values, segments = _swapped(k), _swapped(v), ctx.segments_or_ones()
        new: Any = Entries(keys, values, segments)
        if terms.log_forget is not None:
            new = ForgettingEntries(keys, values, segments, -jnp.cumsum(terms.log_forget, axis=1))
        return extend(cache, new, window=self.window, sinks=self.sinks)

    def _look_back(
        self, q: Queries, entries: Any, places: Int[Array, 's'], cache: KeyValueCache, terms: Terms, ctx: Context
    ) -> Heads:
        """What queries read from a cache that has their own keys already."""
        segments = ctx.segments_or_ones()
        tokens = cache.consumed - q.shape[1] + jnp.arange(q.shape[1], dtype=jnp.int32)
        bias = self._distance_bias(tokens, places, q.dtype)
        if not isinstance(self.weights, WeightMap):
            k, v = _swapped(entries.keys).astype(q.dtype), _swapped(entries.values).astype(q.dtype)
            seen = visible(tokens, places, window=self.window, sinks=self.sinks)
            same = segments[:, :, None] == entries.segments[:, None, :]
            y = self._weigh(q, k, v, seen[None] & same, bias, terms, ctx)
        else:
            y = attend_cached(
                q,
                Entries(entries.keys, entries.values, entries.segments),
                tokens=tokens,
                places=places,
                segments=segments,
                weights=self.weights,
                window=self.window,
                sinks=self.sinks,
                bias=_forgetting(bias, entries, terms),
                temperature=terms.temperature,
                sink_scores=None if self.sink is None else self.sink(),
                implementation=self.implementation,
            )
        return jnp.where(overflown(cache, self.window, self.sinks), jnp.nan, y)

    def _distance_bias(
        self, queries: Int[Array, 't'], keys: Int[Array, 's'], dtype: DTypeLike
    ) -> Float[Array, '1 h t s'] | None:
        """What positions add to the scores."""
        slopes = self._slopes(dtype)
        if slopes is None:
            return None
        distance = jnp.abs(queries[:, None] - keys[None, :])
        return -slopes[None, :, None, None] * distance[None, None].astype(slopes.dtype)


def _forgetting(bias: Float[Array, '1 h t s'] | None, entries: Any, terms: Terms) -> Float[Array, '_ h t s'] | None:
    """The bias of the scores, with what gates have forgotten of every key."""
    if terms.log_forget is None:
        return bias
    since = jnp.moveaxis(jnp.cumsum(terms.log_forget, axis=1), 1, 2)[..., None]
    return (0 if bias is None else bias) + since + jnp.moveaxis(entries.forgotten, 1, 2)[:, :, None]


def _forgotten(cache: KeyValueCache, terms: Terms) -> KeyValueCache:
    """The cache as the tokens after a call find it: all of its keys have been forgotten by the gates of the call."""
    if terms.log_forget is None:
        return cache
    entries: Any = cache.entries
    forgotten = entries.forgotten + jnp.sum(terms.log_forget, axis=1, keepdims=True)
    return cache._replace(entries=entries._replace(forgotten=forgotten))


def _swapped(x: Float[Array, 'b s g k']) -> Float[Array, 'b g s k']:
    """Heads before time, or time before heads."""
    return jnp.swapaxes(x, 1, 2)
