"""Attention whose weights are products of binary codes, in linear time."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.functional import cores
from attnlab.functional.counted import counted_linear_attention, summable, with_sums_apart
from attnlab.functional.normalizers import SumNormalizer
from attnlab.functional.precision import wide_dtype
from attnlab.functional.recurrences import carried, no_segment
from attnlab.mixers.linear.write import Additive
from attnlab.mixers.mixer import Mixer, require_causal
from attnlab.nn.feature_maps import UnitNorm
from attnlab.nn.gates import Terms
from attnlab.nn.hashing import SIGNS, Codes, DocumentHash, KernelHash
from attnlab.nn.heads import by_head, head_channels
from attnlab.nn.preludes import Prelude, behind_preludes, preludes_for, states_of
from attnlab.nn.projections import Linear
from attnlab.typing import Keys, Queries, Segments, Sequence, State, Values

SAMPLED = 256
"""Tokens of a row that a hash is fitted to: the fit compares all pairs of them."""


class HashedState(NamedTuple):
    """What hashed attention remembers of a stream.

    Attributes:
      memory: what codes have written of values and of ones; float32 or float64.
      segment: the segment of the last token, `b`; -1 before the first.
      preludes: the states of the preludes of queries and of values; empty without preludes.
    """

    memory: Float[Array, 'b h m v']
    segment: Int[Array, ' b']
    preludes: tuple[State, ...]


class HashedAttention(Mixer):
    """EcoFormer: a key weighs the more, the more bits its code shares with that of the query; weights are positive.

        w_ts = c_t . c_s + n + 1        y_t = W_o (sum_s w_ts v_s / sum_s w_ts)

    `c = hash(q / |q|)` are codes of n bits, -1 and 1, and queries are the keys as well (`attnlab.nn.hashing`). Weights
    are from 1 to `2 n + 1`. As `c` and a constant are features, the sums are memories of `n + 1` rows. Codes are
    computed in float32 or better, so that they do not depend on the type of the activations; their gradient is straight
    through, that of numbers clipped to -1 and 1. Liu et al. 2022, https://arxiv.org/abs/2209.09004.

    In its released code the `n + 1` of all keys is in the denominator and multiplies the own value alone in the
    numerator, `shift='own'`, so that what values are multiplied by does not sum to one:

        y_t = W_o ((sum_s c_t . c_s v_s + (n + 1) v_t) / sum_s w_ts)

    Args:
      dim: model width.
      heads: each of `dim / heads` channels.
      bits: of a code.
      anchors: of a hash.
      codes: from numbers to bits.
      shift: whether `n + 1` multiplies values of all keys or the own value.
      prelude: made as `prelude(dim, rngs=)`, one each for queries, before they are hashed, and values.
      spread: of the kernel: as it was fitted, or that of the document at hand (`DocumentHash`); bidirectional only.
      bias: whether the projections have one.
      causal: whether a query sees no later key.
      implementation: of the core; `None`: the default of the platform.
      rngs: draws the parameters, and the buffers of the hash.

    Raises `UserError` for heads that do not divide the width, and for a causal mixer with the spread of the document.
    """

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        bits: int = 16,
        anchors: int = 25,
        codes: Codes = SIGNS,
        shift: Literal['all', 'own'] = 'all',
        prelude: Callable[..., Prelude] | None = None,
        spread: Literal['fitted', 'document'] = 'fitted',
        bias: bool = False,
        causal: bool = True,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        channels = head_channels(dim, heads)
        self.heads, self.channels, self.bits = heads, channels, bits
        self.shift, self.causal, self.implementation = shift, causal, implementation
        self.query, self.value = (Linear(dim, dim, bias=bias, rngs=rngs) for _ in range(2))
        self.preludes = preludes_for(prelude, dim, dim, rngs=rngs)
        if causal and spread == 'document':
            raise UserError("spread of HashedAttention is 'document', which looks ahead; it needs causal=False")
        kernel_hash = DocumentHash if spread == 'document' else KernelHash
        self.hash = kernel_hash(channels, heads=heads, bits=bits, anchors=anchors, codes=codes, rngs=rngs)
        self.output = Linear(dim, dim, bias=bias, axes=('heads', 'embed'), rngs=rngs)

    def __call__(
        self, x: Sequence, ctx: Context, state: HashedState | None = None
    ) -> tuple[Sequence, HashedState | None]:
        states = None if state is None else state.preludes
        queries, of_queries = self._hashed(x, ctx.segments, states)
        codes = self.hash(queries, ctx.segments).astype(x.dtype)
        ones = jnp.ones_like(codes[..., :1])
        q = jnp.concatenate([codes, (self.bits + 1) * ones], axis=-1)
        k = jnp.concatenate([codes, ones], axis=-1)
        (v,), of_values = behind_preludes(
            self.preludes[1:], [self.value(x)], ctx.segments, None if states is None else states[1:]
        )
        v = v.reshape(*codes.shape[:3], -1)
        core: dict[str, Any] = {'scale': 1.0, 'segments': ctx.segments, 'implementation': self.implementation}
        read = _read_with_own if self.shift == 'own' else _read
        before = None if state is None else carried(state.memory, ctx.segments_or_ones(), state.segment)
        y, memory = read(q, k, v, causal=self.causal, state=before, **core)
        if state is not None and memory is not None:
            state = HashedState(memory, ctx.segments_or_ones()[:, -1], of_queries + of_values)
        y = SumNormalizer(eps=0.0)(y[..., :-1], y[..., -1]).astype(x.dtype)
        return self.output(y.reshape(x.shape)), state

    def hashed(self, x: Sequence, segments: Segments | None = None) -> Queries:
        """What codes are made of: queries of length one, in float32 or better."""
        return self._hashed(x, segments, None)[0]

    def _hashed(
        self, x: Sequence, segments: Segments | None, states: tuple[State, ...] | None
    ) -> tuple[Queries, tuple[State, ...]]:
        (y,), after = behind_preludes(
            self.preludes[:1],
            [self.query(x.astype(wide_dtype(x.dtype)))],
            segments,
            states,
            lambda y: UnitNorm(eps=1e-12).wide(by_head(y, self.heads)),
        )
        return y, after

    def fit(self, x: Sequence, ctx: Context, key: Array) -> None:
        """Fits the hash, in place, to the queries of `x` without padding, unless it has been fitted before.

        Of longer rows `SAMPLED` tokens are read, evenly apart; `key` draws which of them are anchors.
        """
        places = jnp.linspace(0, x.shape[1] - 1, min(SAMPLED, x.shape[1])).astype(jnp.int32)
        # Preludes read neighbours.
        queries = self.hashed(x, ctx.segments)[:, places] if self.preludes else self.hashed(x[:, places])
        self.hash.fit(queries, ctx.segments_or_ones()[:, places], key)

    def init_state(self, batch: int, length: int, dtype: DTypeLike) -> HashedState:
        """Returns an empty memory; its size does not depend on `length`."""
        require_causal(self, self.causal)
        shape = (batch, self.heads, self.bits + 1, self.channels + 1)
        memory = jnp.zeros(shape, wide_dtype(dtype))
        of_queries = states_of(self.preludes[:1], batch, wide_dtype(dtype))
        return HashedState(memory, no_segment(batch), of_queries + states_of(self.preludes[1:], batch, dtype))


Sums = Float[Array, 'b t h u']
"""Of values and, in a last column, of the weights."""


def _read(q: Queries, k: Keys, v: Values, *, causal: bool, **core: Any) -> tuple[Sums, Array | None]:
    """The sums, and the memory of a causal read."""
    if causal:
        return counted_linear_attention(q, k, v, **core)
    # A column of ones among the values collects the sum of the weights.
    q, k, v = summable(q, k, jnp.concatenate([v, jnp.ones_like(v[..., :1])], axis=-1))
    return Additive().both_ways(q, k, v, Terms(), **core), None


def _read_with_own(q: Queries, k: Keys, v: Values, *, causal: bool, **core: Any) -> tuple[Sums, Array | None]:
    """The same, but the last feature, a constant, multiplies the own value in the place of those of all keys."""
    q, k, v = summable(q, k, v)
    codes, own, memory = q.at[..., -1].set(0), q[..., -1:] * v, None
    if causal:
        state = core.pop('state')
        sums, memory = with_sums_apart(
            lambda state: cores.linear_attention(codes, k, v, state=state, **core),
            lambda state: cores.linear_attention_sums(q, k, state=state, **core),
            state,
        )
    else:
        read = Additive().both_ways(codes, k, v, Terms(), **core)
        sums = jnp.concatenate([read, Additive().both_ways(q, k, jnp.ones_like(v[..., :1]), Terms(), **core)], axis=-1)
    return sums.at[..., :-1].add(own.astype(sums.dtype)), memory
