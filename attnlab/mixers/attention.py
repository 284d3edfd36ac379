"""Attention: every query reads a weighted mean of the values before it."""

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int

import pallas_kernels
from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.functional.cache import Entries, KeyValueCache, empty_cache, extend, overflown
from attnlab.functional.masks import visible
from attnlab.functional.rotary import rotated_channels
from attnlab.mixers.mixer import Mixer
from attnlab.nn.positions import Alibi, Rope
from attnlab.nn.projections import Linear
from attnlab.typing import Heads, Keys, Queries, Segments, Sequence, Values
from pallas_kernels import Softmax, WeightMap


class Attention(Mixer):
    """Multi-head attention, `y_i = W_o sum_j p_ij v_j`, `p_i` the weights of the scores `q_i . k_j / sqrt(key_dim)`.

    Query head `i` reads key/value head `i // (heads / kv_heads)`: as many as `heads` make multi-head, one multi-query
    attention. `weights` is the map from scores to weights. Vaswani et al. 2017, https://arxiv.org/abs/1706.03762;
    Shazeer 2019, https://arxiv.org/abs/1911.02150; Ainslie et al. 2023, https://arxiv.org/abs/2305.13245.

    The state is a cache of keys and values. It holds the `length` tokens it was made for, and a call that goes beyond
    gives NaN; but with a window no longer than that it is a ring of `window + sinks` slots, which never fills up.

    Raises `UserError` for sizes that do not divide, and for sinks together with segments.

    Args:
      dim: model width.
      heads: query heads.
      kv_heads: key and value heads, a divisor of `heads`; `None`: as many.
      key_dim: channels of a query or key per head; `None`: `dim / heads`.
      value_dim: channels of a value per head; `None`: `key_dim`.
      position: how positions enter the scores; `None`: not at all.
      weights: the map from scores to weights.
      window: how many keys a query sees, its own included; `None`: all.
      sinks: how many of the first keys of the row it sees besides (Xiao et al. 2024, https://arxiv.org/abs/2309.17453).
      bias: whether the projections have one.
      causal: whether a query sees no later key.
      implementation: of the core; `None`: the default of the platform.
      rngs: draws the parameters.
    """

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        kv_heads: int | None = None,
        key_dim: int | None = None,
        value_dim: int | None = None,
        position: Rope | Alibi | None = None,
        weights: WeightMap = Softmax(),
        window: int | None = None,
        sinks: int = 0,
        bias: bool = False,
        causal: bool = True,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        kv_heads = heads if kv_heads is None else kv_heads
        key_dim = _share(dim, heads) if key_dim is None else key_dim
        value_dim = key_dim if value_dim is None else value_dim
        if kv_heads < 1 or heads % kv_heads:
            raise UserError(f'kv_heads is {kv_heads}; it must divide heads, which is {heads}')
        if sinks and window is None:
            raise UserError(f'sinks is {sinks} without a window: every key is seen already')
        if isinstance(position, Rope):
            rotated_channels(key_dim, position.fraction)
        self.heads, self.kv_heads, self.key_dim, self.value_dim = heads, kv_heads, key_dim, value_dim
        self.position, self.weights = position, weights
        self.window, self.sinks, self.causal, self.implementation = window, sinks, causal, implementation
        self.query = Linear(dim, heads * key_dim, bias=bias, rngs=rngs)
        self.key = Linear(dim, kv_heads * key_dim, bias=bias, rngs=rngs)
        self.value = Linear(dim, kv_heads * value_dim, bias=bias, rngs=rngs)
        self.output = Linear(heads * value_dim, dim, bias=bias, axes=('heads', 'embed'), rngs=rngs)

    def __call__(
        self, x: Sequence, ctx: Context, state: KeyValueCache | None = None
    ) -> tuple[Sequence, KeyValueCache | None]:
        if self.sinks and ctx.segments is not None:
            raise UserError(
                'attention with sinks takes no segments: sinks are the first keys of the row, not of a document'
            )
        q, k, v = self._project(x, ctx)
        if state is None:
            y = self._attend(q, k, v, ctx.segments)
        else:
            y, state = self._continue(q, k, v, ctx.segments_or_ones(), state)
        return self.output(y.reshape(*x.shape[:2], -1)), state

    def read_weights(self, x: Sequence, ctx: Context) -> tuple[Float[Array, 'b h t s'], Bool[Array, 'b t s']]:
        """Returns every weight `p_ij` of a call without a state, and which keys each query may see; for analysis."""
        q, k, _ = self._project(x, ctx)
        batch, length, _ = x.shape
        # Values that are the rows of the identity read the weights themselves.
        identity = jnp.broadcast_to(
            jnp.eye(length, dtype=q.dtype)[None, :, None], (batch, length, self.kv_heads, length)
        )
        weights = jnp.swapaxes(self._attend(q, k, identity, ctx.segments), 1, 2)
        places = jnp.arange(length, dtype=jnp.int32)
        seen = visible(places, places, window=self.window, sinks=self.sinks)
        if not self.causal:
            seen |= visible(places[::-1], places[::-1], window=self.window)
        segments = ctx.segments_or_ones()
        return weights, seen[None] & (segments[:, :, None] == segments[:, None, :])

    def init_state(self, batch: int, length: int, dtype: DTypeLike) -> KeyValueCache:
        """Returns an empty cache of `length` slots, or of `window + sinks` when that is fewer."""
        if not self.causal:
            raise UserError('bidirectional attention cannot be streamed: the first token sees the last')
        return empty_cache(
            batch,
            length,
            kv_heads=self.kv_heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            dtype=dtype,
            ring=None if self.window is None else self.window + self.sinks,
        )

    def _project(self, x: Sequence, ctx: Context) -> tuple[Queries, Keys, Values]:
        batch, length, _ = x.shape
        q = self.query(x).reshape(batch, length, self.heads, self.key_dim)
        k = self.key(x).reshape(batch, length, self.kv_heads, self.key_dim)
        v = self.value(x).reshape(batch, length, self.kv_heads, self.value_dim)
        if isinstance(self.position, Rope):
            q, k = self.position.rotate(q, ctx.positions), self.position.rotate(k, ctx.positions)
        return q, k, v

    def _slopes(self, dtype: DTypeLike) -> Float[Array, 'h'] | None:
        if not isinstance(self.position, Alibi):
            return None
        return jnp.asarray(self.position.slopes(self.heads), jnp.promote_types(dtype, jnp.float32))

    def _attend(self, q: Queries, k: Keys, v: Values, segments: Segments | None) -> Heads:
        return pallas_kernels.attention(
            q,
            k,
            v,
            weights=self.weights,
            causal=self.causal,
            window=self.window,
            sinks=self.sinks,
            segments=segments,
            slopes=self._slopes(q.dtype),
            implementation=self.implementation,
        )

    def _continue(
        self, q: Queries, k: Keys, v: Values, segments: Segments, state: KeyValueCache
    ) -> tuple[Heads, KeyValueCache]:
        tokens = state.consumed + jnp.arange(q.shape[1], dtype=jnp.int32)
        seen, places, state = extend(
            state, Entries(_swapped(k), _swapped(v), segments), window=self.window, sinks=self.sinks
        )
        y = pallas_kernels.attention(
            q,
            _swapped(seen.keys).astype(q.dtype),
            _swapped(seen.values).astype(q.dtype),
            weights=self.weights,
            causal=False,
            segments=(segments, seen.segments),
            bias=self._bias(tokens, places, q.dtype),
            implementation=self.implementation,
        )
        return jnp.where(overflown(state, self.window, self.sinks), jnp.nan, y), state

    def _bias(self, tokens: Int[Array, 't'], places: Int[Array, 's'], dtype: DTypeLike) -> Float[Array, '1 ... t s']:
        """Minus infinity where hidden, so that the core, and with it every weight map, serves the cache as it is."""
        mask = visible(tokens, places, window=self.window, sinks=self.sinks)[None, None]
        bias = jnp.zeros((1, 1, 1, 1), jnp.promote_types(dtype, jnp.float32))
        if (slopes := self._slopes(dtype)) is not None:
            distance = tokens[:, None] - places[None, :]
            bias = -slopes[None, :, None, None] * distance[None, None].astype(slopes.dtype)
        return jnp.where(mask, bias, -jnp.inf)


def _swapped(x: Float[Array, 'b s g k']) -> Float[Array, 'b g s k']:
    """Heads before time, or time before heads."""
    return jnp.swapaxes(x, 1, 2)


def _share(dim: int, heads: int) -> int:
    if heads < 1 or dim % heads:
        raise UserError(f'heads is {heads}; it must divide dim, which is {dim}, unless key_dim is given')
    return dim // heads
