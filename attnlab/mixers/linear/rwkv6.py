"""RWKV-6: linear attention with decays and mixtures of tokens that depend on the input."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.functional.exclusive import exclusive_linear_attention
from attnlab.functional.precision import wide_dtype
from attnlab.functional.recomputed import recomputed_beside_products, recomputed_method
from attnlab.functional.recurrences import carried, no_segment
from attnlab.mixers.mixer import Mixer
from attnlab.module import Module
from attnlab.nn.heads import by_head, head_channels
from attnlab.nn.norms import GroupNorm
from attnlab.nn.parameter import param, starting_at, uniform_within
from attnlab.nn.preludes import ShiftState, no_shift, shifted
from attnlab.nn.projections import Linear, LowRank, fan_in_normal
from attnlab.typing import Heads, Sequence

DECAY, KEY, VALUE, QUERY, GATE = range(5)
"""The inputs of a layer, each of which mixes a token with the one before it."""


class RWKV6State(NamedTuple):
    """What a layer remembers of a stream.

    Attributes:
      memory: float32 or float64, `b h k v`.
      shift: the last token.
      segment: the segment of the last token, `b`; -1 before the first.
    """

    memory: Float[Array, 'b h k v']
    shift: ShiftState
    segment: Int[Array, ' b']


class TokenMixtures(Module):
    """Mixes every token with the one before it, in several ways: `x_t + d_t (m_i + tanh((x_t + d_t n) A_i) B_i)`.

    `d_t = x_{t-1} - x_t`, zero less `x_t` at the first token of a document; `A` starts at zero, and `start` gives `m`,
    `i d`, and `n`, its first row. Peng et al. 2024, https://arxiv.org/abs/2404.05892.
    """

    def __init__(self, dim: int, *, rank: int, start: Array, rngs: nnx.Rngs):
        count = len(start)
        self.mix = param(starting_at(start), (count, dim), axes=(None, 'embed'), group='vector', rngs=rngs)
        self.first = param(starting_at(start[0]), (dim,), axes=('embed',), group='vector', rngs=rngs)
        zeros = nnx.initializers.zeros
        self.down = Linear(dim, count * rank, initializer=zeros, axes=('embed', None), rngs=rngs)
        self.up = param(uniform_within(0.01), (count, rank, dim), axes=(None, None, 'embed'), rngs=rngs)

    def __call__(self, x: Sequence, before: Sequence) -> list[Sequence]:
        inner = jnp.tanh(self.down(self._first(x, before)))
        inner = inner.reshape(*x.shape[:2], self.up.shape[0], -1)
        # Sums in float32, those of the gradients too.
        wide = wide_dtype(x.dtype)
        more = jnp.einsum('btnr,nrd->nbtd', inner, self.up[...].astype(x.dtype), preferred_element_type=wide)
        return list(self._mixed(x, before, more))

    @recomputed_method
    def _first(self, x: Sequence, before: Sequence) -> Sequence:
        wide = wide_dtype(x.dtype)
        return x + ((before - x).astype(wide) * self.first[...].astype(wide)[None, None]).astype(x.dtype)

    @recomputed_method
    def _mixed(self, x: Sequence, before: Sequence, more: Float[Array, 'n b t d']) -> Float[Array, 'n b t d']:
        step = (before - x).astype(more.dtype)
        mix = self.mix[...].astype(more.dtype)[:, None, None] + more
        return x[None] + (step[None] * mix).astype(x.dtype)


class RWKV6(Mixer):
    """The time mixing of RWKV-6, `S_t = diag(w_t) S_{t-1} + k_t v_t^T`, read before a token is written:

        y_t = W_o (g_t * norm(S_{t-1}^T r_t + (r_t . u k_t) v_t))

    Every input mixes a token with the one before it, by amounts that depend on both; `w = exp(-exp(.))` is a decay for
    every channel, through a bottleneck, `u` the bonus of a token for itself, learned for every channel, `g` a gate with
    SiLU, and the norm that of every head with its mean. Peng et al. 2024, https://arxiv.org/abs/2404.05892.

    Raises `UserError` for heads that do not divide the width, and for `place` or `remaining` outside of [0, 1].
    """

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        place: float = 0.0,
        remaining: float | None = None,
        norm_gain: float = 1.0,
        rank: int = 64,
        mix_rank: int = 32,
        orthogonal: float | None = None,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        """Makes the projections and the parts.

        Args:
          dim: model width.
          heads: how many memories, each of `dim / heads` keys and values.
          place: of the layer in its model, from 0 for the first to 1 for the last; sets where decays, bonuses, and
            what is taken of the token before, start.
          remaining: of all layers, how many are not below it, from 1 for the first to almost 0; sets where what is
            taken of the token before starts; `None`: `1 - place`.
          norm_gain: what the gains of the norm start at.
          rank: of the bottleneck of decays.
          mix_rank: of that of each mixture of tokens.
          orthogonal: the gain of the orthogonal maps that keys and gate start from; `None`: they start as other maps.
          implementation: of the core; `None`: the default of the platform.
          rngs: draws the parameters.
        """
        if not 0 <= place <= 1:
            raise UserError(f'the place of RWKV6 is {place}; it must be from 0, the first layer, to 1, the last')
        remaining = 1 - place if remaining is None else remaining
        if not 0 <= remaining <= 1:
            raise UserError(f'remaining of RWKV6 is {remaining}; it must be from 1, the first layer, to almost 0')
        self.heads, self.channels, self.implementation = heads, head_channels(dim, heads), implementation
        channel = jnp.arange(dim) / dim
        steep, gentle = channel**remaining, channel ** (0.5 * remaining)
        start = jnp.stack([1 - steep, 1 - steep, 1 - steep - 0.3 * place, 1 - gentle, 1 - gentle])
        self.mixtures = TokenMixtures(dim, rank=mix_rank, start=start, rngs=rngs)
        narrow = fan_in_normal if orthogonal is None else nnx.initializers.orthogonal(orthogonal)
        self.query, self.key, self.value, self.gate = (
            Linear(dim, dim, initializer=draw, rngs=rngs) for draw in (fan_in_normal, narrow, fan_in_normal, narrow)
        )
        ramp = jnp.arange(dim) / max(dim - 1, 1)
        decay = starting_at(-6 + 5 * ramp ** (0.7 + 1.3 * place))
        self.decay = LowRank(dim, dim, rank=rank, activation='tanh', up=uniform_within(0.01), start=decay, rngs=rngs)
        bonus = place * (1 - ramp) + 0.1 * ((jnp.arange(dim) + 1) % 3 - 1)
        shape = (heads, self.channels)
        self.bonus = param(starting_at(bonus.reshape(shape)), shape, axes=('heads', None), group='dynamics', rngs=rngs)
        self.norm = GroupNorm(self.channels, heads=heads, eps=1e-5 * self.channels, gain=norm_gain, rngs=rngs)
        self.output = Linear(dim, dim, axes=('heads', 'embed'), rngs=rngs)

    def __call__(
        self, x: Sequence, ctx: Context, state: RWKV6State | None = None
    ) -> tuple[Sequence, RWKV6State | None]:
        before, shift = shifted(x, ctx.segments, None if state is None else state.shift)
        inputs, heads = self.mixtures(x, before), self.heads
        r, k, v = (
            by_head(linear(inputs[which]), heads)
            for linear, which in ((self.query, QUERY), (self.key, KEY), (self.value, VALUE))
        )
        log_decay = -jnp.exp(by_head(self.decay(inputs[DECAY]), heads))
        segments = ctx.segments if state is None else ctx.segments_or_ones()
        y, memory = exclusive_linear_attention(
            r,
            k,
            v,
            log_decay,
            self.bonus[...],
            state=None if state is None else carried(state.memory, ctx.segments_or_ones(), state.segment),
            segments=segments,
            implementation=self.implementation,
        )
        if shift is not None:
            state = RWKV6State(memory, shift, ctx.segments_or_ones()[:, -1])
        return self.output(recomputed_beside_products(self._read)(y, inputs[GATE])), state

    def _read(self, y: Heads, x: Sequence) -> Sequence:
        return self.norm(y).reshape(x.shape) * jax.nn.silu(self.gate(x))

    @property
    def divides_time(self) -> bool:
        return True

    def init_state(self, batch: int, length: int, dtype: DTypeLike) -> RWKV6State:
        """Returns an empty memory; its size does not depend on `length`."""
        memory = jnp.zeros((batch, self.heads, self.channels, self.channels), wide_dtype(dtype))
        return RWKV6State(memory, no_shift((batch, self.heads * self.channels), dtype), no_segment(batch))
