"""Lizard: gated linear attention to the whole past, beside softmax attention to the latest keys."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from attnlab.context import Context
from attnlab.functional.attend import attend, look
from attnlab.functional.cache import Entries, KeyValueCache, empty_cache
from attnlab.functional.counted import counted_linear_attention
from attnlab.functional.normalizers import SumNormalizer
from attnlab.functional.precision import wide_dtype
from attnlab.functional.reach import Reach
from attnlab.functional.recomputed import recomputed_method
from attnlab.functional.recurrences import carried, no_segment
from attnlab.mixers.mixer import Mixer
from attnlab.nn.feature_maps import SignedExponentials
from attnlab.nn.heads import by_head, head_channels
from attnlab.nn.parameter import param
from attnlab.nn.positions import Rope
from attnlab.nn.preludes import Prelude, behind_preludes, preludes_for, states_of
from attnlab.nn.projections import Linear
from attnlab.typing import Heads, Keys, Queries, Sequence, State, Values


class LizardState(NamedTuple):
    """What both branches remember of a stream.

    Attributes:
      memory: what keys have written of values, and of ones in a last column; float32 or float64.
      cache: the latest keys and values.
      segment: the segment of the last token, `b`; -1 before the first.
      preludes: the states of the preludes of queries, keys and values; empty without preludes.
    """

    memory: Float[Array, 'b h m u']
    cache: KeyValueCache
    segment: Int[Array, ' b']
    preludes: tuple[State, ...]


class Lizard(Mixer):
    """Two reads of the same queries, keys and values, `y_i = W_o (g_i + c a_i)`, `c` learned, one number:

        g_i = sum_(j <= i) G_ij f(q_i) . f(k_j) v_j / sum_(j <= i) G_ij f(q_i) . f(k_j)
        a_i = sum_(i - w < j <= i) exp(q_i . k_j / sqrt(k)) v_j / (sum_n exp(t_n) + sum_(i - w < j <= i) exp(..))

    `f` is learned (`SignedExponentials`), `G_ij` the product of the gates `sigmoid(W_g x)`, one a head, of the tokens
    after `j` up to `i`, `w` the window and `t` the logits of tokens without a value, learned for every head.
    Nguyen et al. 2025, https://arxiv.org/abs/2507.09025.

    Raises `UserError` for heads that do not divide the width.
    """

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        window: int = 128,
        metas: int = 4,
        prelude: Callable[..., Prelude] | None = None,
        position: Rope | None = None,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        """Makes the projections and the parts.

        Args:
          dim: model width.
          heads: of both reads, each of `dim / heads` channels.
          window: how many keys a query of the softmax sees, its own included.
          metas: how many tokens without a value it sees besides.
          prelude: made as `prelude(dim, rngs=)`, one each for queries, keys and values of both reads.
          position: rotates queries and keys of the softmax alone.
          implementation: of the cores; `None`: the default of the platform.
          rngs: draws the parameters.
        """
        self.heads, self.channels = heads, head_channels(dim, heads)
        self.position, self.reach, self.implementation = position, Reach(window=window), implementation
        self.normalizer = SumNormalizer(eps=1e-12)
        self.query, self.key, self.value = (Linear(dim, dim, rngs=rngs) for _ in range(3))
        self.preludes = preludes_for(prelude, dim, dim, dim, rngs=rngs)
        self.feature_map = SignedExponentials(self.channels, heads=heads, rngs=rngs)
        self.forget = Linear(dim, heads, rngs=rngs)
        zeros, ones = nnx.initializers.zeros, nnx.initializers.ones
        self.metas = param(zeros, (heads, metas), axes=('heads', None), group='vector', rngs=rngs)
        self.share = param(ones, (), axes=(), group='vector', rngs=rngs)
        self.output = Linear(dim, dim, axes=('heads', 'embed'), rngs=rngs)

    def __call__(
        self, x: Sequence, ctx: Context, state: LizardState | None = None
    ) -> tuple[Sequence, LizardState | None]:
        (q, k, v), preludes = behind_preludes(
            self.preludes,
            (linear(x) for linear in (self.query, self.key, self.value)),
            ctx.segments,
            None if state is None else state.preludes,
            lambda y: by_head(y, self.heads),
        )
        past, memory = self._linear(q, k, v, x, ctx, state)
        latest, cache = self._window(q, k, v, ctx, None if state is None else state.cache)
        if cache is not None:
            state = LizardState(memory, cache, ctx.segments_or_ones()[:, -1], preludes)
        return self.output(self._sum(past, latest).reshape(x.shape)), state

    @recomputed_method
    def _sum(self, past: Heads, latest: Heads) -> Heads:
        wide = wide_dtype(latest.dtype)
        # In the type of the share, so that its gradient is summed over tokens in float32.
        share = jnp.broadcast_to(self.share[...].astype(wide), latest.shape)
        return (past.astype(wide) + share * latest.astype(wide)).astype(latest.dtype)

    def init_state(self, batch: int, length: int, dtype: DTypeLike) -> LizardState:
        """Returns an empty memory and an empty cache of `length` slots, or of `window` when that is fewer."""
        memory = jnp.zeros((batch, self.heads, 2 * self.channels, self.channels + 1), wide_dtype(dtype))
        cache = empty_cache(
            batch,
            length,
            kv_heads=self.heads,
            key_dim=self.channels,
            value_dim=self.channels,
            dtype=dtype,
            reach=self.reach,
        )
        return LizardState(memory, cache, no_segment(batch), states_of(self.preludes, batch, dtype))

    def _linear(
        self, q: Queries, k: Keys, v: Values, x: Sequence, ctx: Context, state: LizardState | None
    ) -> tuple[Heads, Float[Array, 'b h m u']]:
        q, k = self.feature_map.features(q, k, ctx.positions)
        read, memory = counted_linear_attention(
            q,
            k,
            v,
            jax.nn.log_sigmoid(self.forget(x).astype(wide_dtype(x.dtype))),
            scale=1.0,
            state=None if state is None else carried(state.memory, ctx.segments_or_ones(), state.segment),
            segments=ctx.segments,
            implementation=self.implementation,
        )
        return self.normalizer(read[..., :-1], read[..., -1]).astype(v.dtype), memory

    def _window(
        self, q: Queries, k: Keys, v: Values, ctx: Context, cache: KeyValueCache | None
    ) -> tuple[Heads, KeyValueCache | None]:
        if self.position is not None:
            q, k = self.position.rotate(q, ctx.positions), self.position.rotate(k, ctx.positions)
        view = look(Entries(k, v, ctx.segments_or_ones()), ctx, self.reach, cache)
        keys, values, _ = view.entries
        sinks = jax.nn.logsumexp(self.metas[...].astype(wide_dtype(q.dtype)), axis=1)
        return attend(q, keys, values, view, sink_scores=sinks, implementation=self.implementation), view.cache
