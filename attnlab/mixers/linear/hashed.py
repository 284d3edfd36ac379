"""Attention whose weights are products of binary codes, in linear time."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from attnlab.context import PADDING, Context
from attnlab.functional.counted import counted_linear_attention, summable
from attnlab.functional.normalizers import SumNormalizer
from attnlab.functional.recurrences import carried, no_segment, state_dtype
from attnlab.mixers.linear.write import Additive
from attnlab.mixers.mixer import Mixer, require_causal
from attnlab.nn.feature_maps import UnitNorm
from attnlab.nn.gates import Terms
from attnlab.nn.hashing import SIGNS, Codes, KernelHash
from attnlab.nn.heads import head_channels
from attnlab.nn.projections import Linear
from attnlab.typing import Queries, Sequence

SAMPLED = 256
"""Tokens of a row that a hash is fitted to: the fit compares all pairs of them."""


class HashedState(NamedTuple):
    """What hashed attention remembers of a stream.

    Attributes:
      memory: what codes have written of values and of ones; float32 or float64.
      segment: the segment of the last token, `b`; -1 before the first.
    """

    memory: Float[Array, 'b h m v']
    segment: Int[Array, ' b']


class HashedAttention(Mixer):
    """EcoFormer: a key weighs as many bits as its code shares with the query's, plus what keeps weights positive.

        w_ts = c_t . c_s + n + 1        y_t = W_o (sum_s w_ts v_s / sum_s w_ts)

    `c = hash(q / |q|)` are codes of n bits, -1 and 1, and queries are the keys as well (`attnlab.nn.hashing`). Weights
    are from 1 to `2 n + 1`. As `c` and a constant are features, the sums are memories of `n + 1` rows. Codes are
    computed in float32 or better, so that they do not depend on the type of the activations; their gradient is straight
    through, that of numbers clipped to -1 and 1. Liu et al. 2022, https://arxiv.org/abs/2209.09004.

    Args:
      dim: model width.
      heads: each of `dim / heads` channels.
      bits: of a code.
      anchors: of a hash.
      codes: from numbers to bits.
      bias: whether the projections have one.
      causal: whether a query sees no later key.
      implementation: of the core; `None`: the default of the platform.
      rngs: draws the parameters, and the buffers of the hash.

    Raises `UserError` for heads that do not divide the width.
    """

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        bits: int = 16,
        anchors: int = 25,
        codes: Codes = SIGNS,
        bias: bool = False,
        causal: bool = True,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        channels = head_channels(dim, heads)
        self.heads, self.channels, self.bits = heads, channels, bits
        self.causal, self.implementation = causal, implementation
        self.query, self.value = (Linear(dim, dim, bias=bias, rngs=rngs) for _ in range(2))
        self.hash = KernelHash(channels, heads=heads, bits=bits, anchors=anchors, codes=codes, rngs=rngs)
        self.output = Linear(dim, dim, bias=bias, axes=('heads', 'embed'), rngs=rngs)

    def __call__(
        self, x: Sequence, ctx: Context, state: HashedState | None = None
    ) -> tuple[Sequence, HashedState | None]:
        codes = self.hash(self.hashed(x)).astype(x.dtype)
        ones = jnp.ones_like(codes[..., :1])
        q = jnp.concatenate([codes, (self.bits + 1) * ones], axis=-1)
        k = jnp.concatenate([codes, ones], axis=-1)
        v = self.value(x).reshape(*codes.shape[:3], -1)
        core: dict[str, Any] = {'scale': 1.0, 'segments': ctx.segments, 'implementation': self.implementation}
        if self.causal:
            before = None if state is None else carried(state.memory, ctx.segments_or_ones(), state.segment)
            y, memory = counted_linear_attention(q, k, v, state=before, **core)
            if state is not None:
                state = HashedState(memory, ctx.segments_or_ones()[:, -1])
        else:
            # A column of ones among the values collects the sum of the weights.
            q, k, v = summable(q, k, jnp.concatenate([v, ones], axis=-1))
            y = Additive().both_ways(q, k, v, Terms(), **core)
        y = SumNormalizer(eps=0.0)(y[..., :-1], y[..., -1]).astype(x.dtype)
        return self.output(y.reshape(x.shape)), state

    def hashed(self, x: Sequence) -> Queries:
        """What codes are made of: queries of length one, in float32 or better."""
        wide = x.astype(state_dtype(x.dtype))
        return UnitNorm(eps=1e-12).wide(self.query(wide).reshape(*x.shape[:2], self.heads, -1))

    def fit(self, x: Sequence, ctx: Context, key: Array) -> None:
        """Fits the hash, in place, to the queries of `x` without padding, unless it has been fitted before.

        Of longer rows `SAMPLED` tokens are read, evenly apart; `key` draws which of them are anchors.
        """
        places = jnp.linspace(0, x.shape[1] - 1, min(SAMPLED, x.shape[1])).astype(jnp.int32)
        seen = ctx.segments_or_ones()[:, places] != PADDING
        self.hash.fit(self.hashed(x[:, places]), seen, key)

    def init_state(self, batch: int, length: int, dtype: DTypeLike) -> HashedState:
        """Returns an empty memory; its size does not depend on `length`."""
        require_causal(self.causal)
        shape = (batch, self.heads, self.bits + 1, self.channels + 1)
        return HashedState(jnp.zeros(shape, state_dtype(dtype)), no_segment(batch))
