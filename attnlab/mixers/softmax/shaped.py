"""Shaped attention: softmax attention whose weights are centred at the identity."""

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Bool, Float

from attnlab.context import Context
from attnlab.functional.attend import attend, identity_values, look
from attnlab.functional.cache import Entries, KeyValueCache, empty_cache
from attnlab.functional.needed import of_pairs
from attnlab.functional.reach import Reach
from attnlab.functional.rotary import rotated_channels
from attnlab.mixers.mixer import Mixer, require_causal
from attnlab.nn.heads import check_groups, head_channels
from attnlab.nn.positions import Rope
from attnlab.nn.projections import Linear
from attnlab.nn.reads import ShapedRead
from attnlab.typing import Keys, Queries, Sequence, Values


class ShapedAttention(Mixer):
    """Softmax attention that reads `a v_i + b sum_j p_ij v_j - c u_i`, `u_i` the mean of the values that it sees.

    The gains `a`, `b` and `c` are learned for every head and start at 1 (`ShapedRead`). Queries start at zero, so that
    what they read starts as the mean, and every head as the identity.
    Noci et al. 2023, https://arxiv.org/abs/2306.17759; causal and with trainable gains: He and Hofmann 2024,
    https://arxiv.org/abs/2311.01906.

    The state is a cache of keys and values, with a window a ring, as that of `Attention`; a call that goes beyond its
    `length` gives NaN.

    Raises `UserError` for sizes that do not divide, and for sinks together with segments or without a window.

    Args:
      dim: model width.
      heads: query heads.
      kv_heads: key and value heads, a divisor of `heads`; `None`: as many.
      key_dim: channels of a query or key per head; `None`: `dim / heads`.
      value_dim: channels of a value per head; `None`: `key_dim`.
      position: rotates queries and keys; `None`: no positions.
      window: how many keys a query sees, its own included; `None`: all.
      sinks: how many of the first keys of the row it sees besides.
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
        position: Rope | None = None,
        window: int | None = None,
        sinks: int = 0,
        bias: bool = False,
        causal: bool = True,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        kv_heads = heads if kv_heads is None else kv_heads
        key_dim = head_channels(dim, heads, instead='key_dim') if key_dim is None else key_dim
        value_dim = key_dim if value_dim is None else value_dim
        check_groups(heads, kv_heads)
        if position is not None:
            rotated_channels(key_dim, position.fraction)
        self.heads, self.kv_heads, self.key_dim, self.value_dim = heads, kv_heads, key_dim, value_dim
        self.position, self.reach, self.implementation = position, Reach(causal, window, sinks), implementation
        self.query = Linear(dim, heads * key_dim, bias=bias, initializer=nnx.initializers.zeros, rngs=rngs)
        self.key = Linear(dim, kv_heads * key_dim, bias=bias, rngs=rngs)
        self.value = Linear(dim, kv_heads * value_dim, bias=bias, rngs=rngs)
        self.output = Linear(heads * value_dim, dim, bias=bias, axes=('heads', 'embed'), rngs=rngs)
        self.read = ShapedRead(heads=heads, rngs=rngs)

    def __call__(
        self, x: Sequence, ctx: Context, state: KeyValueCache | None = None
    ) -> tuple[Sequence, KeyValueCache | None]:
        q, k, own = self._project(x, ctx)
        view = look(Entries(k, own, ctx.segments_or_ones()), ctx, self.reach, state)
        k, v, _ = view.entries
        y = attend(q, k, v, view, implementation=self.implementation)
        # A mean needs no products.
        averaged = of_pairs(attend, pairs=0, channels=0)
        mean = averaged(jnp.zeros_like(q), k, v, view, implementation=self.implementation)
        y = self.read(jnp.repeat(own, self.heads // self.kv_heads, axis=2), y, mean)
        return self.output(y.reshape(*x.shape[:2], -1)), view.cache

    def read_weights(self, x: Sequence, ctx: Context) -> tuple[Float[Array, 'b h t s'], Bool[Array, 'b t s']]:
        """Returns every `p_ij` of a call without a state, and which keys each query may see; for analysis."""
        q, k, v = self._project(x, ctx)
        view = look(Entries(k, v, ctx.segments_or_ones()), ctx, self.reach)
        weights = attend(q, k, identity_values(k), view, implementation=self.implementation)
        return jnp.swapaxes(weights, 1, 2), view.visible()

    @property
    def divides_time(self) -> bool:
        return self.reach.causal and not self.reach.sinks

    def init_state(self, batch: int, length: int, dtype: DTypeLike) -> KeyValueCache:
        """Returns an empty cache of `length` slots, or of `window + sinks` when that is fewer."""
        require_causal(self, self.reach.causal)
        return empty_cache(
            batch,
            length,
            kv_heads=self.kv_heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            dtype=dtype,
            reach=self.reach,
        )

    def _project(self, x: Sequence, ctx: Context) -> tuple[Queries, Keys, Values]:
        batch, length, _ = x.shape
        q = self.query(x).reshape(batch, length, self.heads, self.key_dim)
        k = self.key(x).reshape(batch, length, self.kv_heads, self.key_dim)
        v = self.value(x).reshape(batch, length, self.kv_heads, self.value_dim)
        if self.position is not None:
            q, k = self.position.rotate(q, ctx.positions), self.position.rotate(k, ctx.positions)
        return q, k, v
