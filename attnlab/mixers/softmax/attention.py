"""Attention: every query reads a weighted mean of the values before it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Bool, Float

from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.functional.attend import View, attend, identity_values, look
from attnlab.functional.cache import Entries, ForgettingEntries, KeyValueCache, empty_cache
from attnlab.functional.grids import required_grid
from attnlab.functional.penalty import Penalised
from attnlab.functional.precision import wide_dtype
from attnlab.functional.reach import Reach
from attnlab.functional.recomputed import recomputed_beside_products
from attnlab.functional.rotary import rotated_channels
from attnlab.mixers.mixer import Mixer, require_causal
from attnlab.nn.heads import check_groups, head_channels
from attnlab.nn.positions import Alibi, GridRope, Rope
from attnlab.nn.preludes import Prelude, ShiftState, behind_preludes, preludes_for, states_of
from attnlab.nn.projections import Linear
from attnlab.typing import Heads, Keys, Queries, Sequence, State, Values
from pallas_kernels import Softmax, WeightMap


class AttentionState(NamedTuple):
    """What attention remembers of a stream.

    Attributes:
      cache: keys and values, and what gates have forgotten of them.
      shifts: the last key and the last value before they were shifted; empty without a shift.
      preludes: the states of the preludes of queries, keys and values; empty without preludes.
    """

    cache: KeyValueCache
    shifts: tuple[ShiftState, ...]
    preludes: tuple[State, ...] = ()


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
        prelude: Callable[..., Prelude] | None = None,
        shift: Callable[..., nnx.Module] | None = None,
        qk_norm: Callable[..., nnx.Module] | None = None,
        position: Rope | Alibi | GridRope | None = None,
        weights: WeightMap | Penalised | Callable[..., nnx.Module] = Softmax(),
        temperature: Callable[..., nnx.Module] | None = None,
        forget: Callable[..., nnx.Module] | None = None,
        sink: Callable[..., nnx.Module] | None = None,
        window: int | None = None,
        sinks: int = 0,
        norm: Callable[..., nnx.Module] | None = None,
        gate: Callable[..., nnx.Module] | None = None,
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
          prelude: made as `prelude(features, rngs=)`, one each for queries, keys and values, after norms
            and before rotations.
          shift: made as `shift(dim, heads=, channels=, rngs=)`, one for keys and one for values, which it mixes with
            those of the token before.
          qk_norm: made as `qk_norm(key_dim, heads=, rngs=)`, one for queries and one for keys, before positions.
          position: how positions enter the scores.
          weights: the map from scores to weights: one of `pallas_kernels`, such a one with a penalty in training
            (`Penalised`), or one that needs whole rows, made as `weights(heads=, rngs=)` (see `attnlab.nn.dense_maps`).
          temperature: made as `temperature(dim, heads=, rngs=)`; from the input and the number of keys a query sees
            gives the factor of its products with them.
          forget: made as `forget(dim, heads=, rngs=)`; gives the logarithms of forget gates, `b t h`, from the input: a
            score loses those of all tokens after the key, up to the query.
          sink: made as `sink(heads=, rngs=)`; gives the score of a key without a value for every head.
          window: how many keys a query sees, its own included; `None`: all.
          sinks: how many of the first keys of the row it sees besides (Xiao et al. 2024,
            https://arxiv.org/abs/2309.17453).
          norm: made as `norm(value_dim, heads=, rngs=)`, applied to what heads have read.
          gate: made as `gate(dim, heads=, channels=, rngs=)`; multiplies it after that.
          bias: whether the projections have one.
          causal: whether a query sees no later key.
          implementation: of the core; `None`: the default of the platform.
          rngs: draws the parameters.
        """
        kv_heads = heads if kv_heads is None else kv_heads
        key_dim = head_channels(dim, heads, instead='key_dim') if key_dim is None else key_dim
        value_dim = key_dim if value_dim is None else value_dim
        check_groups(heads, kv_heads)
        if isinstance(position, Rope):
            rotated_channels(key_dim, position.fraction)
        self.heads, self.kv_heads, self.key_dim, self.value_dim = heads, kv_heads, key_dim, value_dim
        self.position = position
        self.reach, self.implementation = Reach(causal, window, sinks), implementation
        self.query = Linear(dim, heads * key_dim, bias=bias, rngs=rngs)
        self.key = Linear(dim, kv_heads * key_dim, bias=bias, rngs=rngs)
        self.value = Linear(dim, kv_heads * value_dim, bias=bias, rngs=rngs)
        self.output = Linear(heads * value_dim, dim, bias=bias, axes=('heads', 'embed'), rngs=rngs)
        widths = () if shift is None else (key_dim, value_dim)
        self.shifts: Any = nnx.List(
            [shift(dim, heads=kv_heads, channels=width, rngs=rngs) for width in widths if shift]
        )
        features = (heads * key_dim, kv_heads * key_dim, kv_heads * value_dim)
        self.preludes: Any = preludes_for(prelude, *features, rngs=rngs)
        self.query_norm = None if qk_norm is None else qk_norm(key_dim, heads=heads, rngs=rngs)
        self.key_norm = None if qk_norm is None else qk_norm(key_dim, heads=kv_heads, rngs=rngs)
        self.weights: Any = weights if isinstance(weights, WeightMap | Penalised) else weights(heads=heads, rngs=rngs)
        self.temperature = None if temperature is None else temperature(dim, heads=heads, rngs=rngs)
        self.forget = None if forget is None else forget(dim, heads=heads, rngs=rngs)
        self.sink = None if sink is None else sink(heads=heads, rngs=rngs)
        self.norm = None if norm is None else norm(value_dim, heads=heads, rngs=rngs)
        self.gate = None if gate is None else gate(dim, heads=heads, channels=value_dim, rngs=rngs)
        self._check_parts()

    def _check_parts(self) -> None:
        """Raises `UserError` for parts that cannot go together."""
        if self.forget is not None:
            self.reach.check_forgetting()
        if isinstance(self.weights, Penalised):
            slopes = self.position if isinstance(self.position, Alibi) else None
            self.weights.check(slopes=slopes, forget=self.forget, sink=self.sink)
        elif not isinstance(self.weights, WeightMap):
            if self.forget is not None or self.sink is not None:
                raise UserError(f'{type(self.weights).__name__} takes neither a forget gate nor a learned sink')
            ordered = getattr(self.weights, 'ordered', False)
            if ordered and not (self.reach.causal and self.reach.window is None):
                name = type(self.weights).__name__
                raise UserError(f'{name} needs all keys of a causal row, in order; give it causal=True and window=None')
        elif self.sink is not None and not self.weights.takes_sink:
            raise UserError(f'{type(self.weights).__name__} takes no learned sink: it is no softmax')

    def __call__(
        self, x: Sequence, ctx: Context, state: AttentionState | None = None
    ) -> tuple[Sequence, AttentionState | None]:
        q, k, v, shifts, preludes = self._project(x, ctx, state)
        view = self._look(k, v, x, ctx, None if state is None else state.cache)
        y = self.written(self._attend(q, view.entries.values, view, x), x)
        return y, None if view.cache is None else AttentionState(view.cache, shifts, preludes)

    def read(self, x: Sequence, ctx: Context, reach: Reach) -> Heads:
        """Returns what the heads read of a call without a state, with another reach in the place of their own."""
        q, k, v, *_ = self._project(x, ctx, None)
        return self._attend(q, v, look(Entries(k, v, ctx.segments_or_ones()), ctx, reach), x)

    def written(self, y: Heads, x: Sequence) -> Sequence:
        """Returns the output for what the heads have read of the input `x`: normed, gated and mapped."""
        return self.output(recomputed_beside_products(lambda y: self._opened(y, x))(y).reshape(*x.shape[:2], -1))

    def _opened(self, y: Heads, x: Sequence) -> Heads:
        y = y if self.norm is None else self.norm(y)
        return y if self.gate is None else y * self.gate(x)

    def read_weights(self, x: Sequence, ctx: Context) -> tuple[Float[Array, 'b h t s'], Bool[Array, 'b t s']]:
        """Returns every weight `p_ij` of a call without a state, and which keys each query may see; for analysis."""
        q, k, v, *_ = self._project(x, ctx, None)
        view = self._look(k, v, x, ctx, None)
        return jnp.swapaxes(self._attend(q, identity_values(k), view, x), 1, 2), view.visible()

    @property
    def divides_time(self) -> bool:
        forgets = self.forget is None or self.weights == Softmax()
        # Distances to both sides have no form.
        sided = self.reach.causal or (self.reach.window is None and not isinstance(self.position, Alibi))
        return sided and not self.reach.sinks and isinstance(self.weights, WeightMap) and forgets

    def init_state(self, batch: int, length: int, dtype: DTypeLike) -> AttentionState:
        """Returns an empty cache of `length` slots, or of `window + sinks` when that is fewer."""
        require_causal(self, self.reach.causal)
        cache = empty_cache(
            batch,
            length,
            kv_heads=self.kv_heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            dtype=dtype,
            reach=self.reach,
        )
        if self.forget is not None:
            forgotten = jnp.zeros((*cache.entries.segments.shape, self.heads), wide_dtype(dtype))
            keys, values, segments = cache.entries
            cache = cache._replace(entries=ForgettingEntries(keys, values, segments, forgotten))
        shifts = tuple(shift.init_state(batch, dtype) for shift in self.shifts)
        return AttentionState(cache, shifts, states_of(self.preludes, batch, dtype))

    def _project(
        self, x: Sequence, ctx: Context, state: AttentionState | None
    ) -> tuple[Queries, Keys, Values, tuple[Any, ...], tuple[Any, ...]]:
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
        preludes: tuple[Any, ...] = ()
        if self.preludes:
            flat = [each.reshape(batch, length, -1) for each in (q, k, v)]
            before = None if state is None else state.preludes
            flat, preludes = behind_preludes(self.preludes, flat, ctx.segments, before)
            q, k, v = (y.reshape(each.shape) for y, each in zip(flat, (q, k, v), strict=True))
        if isinstance(self.position, Rope):
            q, k = self.position.rotate(q, ctx.positions), self.position.rotate(k, ctx.positions)
        elif isinstance(self.position, GridRope):
            grid = required_grid(ctx, type(self).__name__)
            q, k = self.position.rotate(q, grid), self.position.rotate(k, grid)
        return q, k, v, tuple(shifts), preludes

    def _look(self, k: Keys, v: Values, x: Sequence, ctx: Context, cache: KeyValueCache | None) -> View:
        gates = None if self.forget is None else self.forget(x)
        return look(Entries(k, v, ctx.segments_or_ones()), ctx, self.reach, cache, log_forget=gates)

    def _attend(self, q: Queries, v: Values, view: View, x: Sequence) -> Heads:
        """What queries read of a view whose entries have these values."""
        wide, ctx = wide_dtype(x.dtype), view.ctx
        return attend(
            q,
            view.entries.keys,
            v,
            view,
            weights=self.weights,
            slopes=jnp.asarray(self.position.slopes(self.heads), wide) if isinstance(self.position, Alibi) else None,
            # By the keys of its own reach, where a view has another too: scores are the same then.
            temperature=None
            if self.temperature is None
            else self.temperature(x, self.reach.counts(ctx.positions, ctx.segments).astype(wide)),
            sink_scores=None if self.sink is None else self.sink(),
            implementation=self.implementation,
        )
