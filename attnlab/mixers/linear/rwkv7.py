"""RWKV-7: a matrix-valued memory whose erasing and writing have keys of their own."""

import math
from collections.abc import Sequence as Shape
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from attnlab.context import Context, FirstValues
from attnlab.errors import UserError
from attnlab.functional import cores
from attnlab.functional.exclusive import own_read
from attnlab.functional.precision import wide_dtype
from attnlab.functional.recomputed import recomputed, recomputed_beside_products, recomputed_method
from attnlab.functional.recurrences import carried, no_segment
from attnlab.mixers.mixer import Mixer
from attnlab.nn.heads import by_head, head_channels
from attnlab.nn.norms import GroupNorm
from attnlab.nn.parameter import param, starting_at, uniform_within
from attnlab.nn.preludes import ShiftState, no_shift, shifted
from attnlab.nn.projections import Linear, LowRank
from attnlab.typing import Heads, Keys, Queries, Segments, Sequence, Values

QUERY, DECAY, KEY, VALUE, RATE, GATE = range(6)
"""The inputs of a layer, each of which mixes a token with the one before it."""

EXPONENTS = (0.2, 0.9, 0.7, 0.7, 0.9, 0.2)
"""How steeply, over the channels, each input starts to take in the token before, in the first layer."""

SLOWEST = math.exp(-0.5)
"""The log decay of a channel lies between minus this and 0."""


class RWKV7State(NamedTuple):
    """What a layer remembers of a stream.

    Attributes:
      memory: float32 or float64, `b h k v`.
      shift: the last token.
      segment: the segment of the last token, `b`; -1 before the first.
    """

    memory: Float[Array, 'b h k v']
    shift: ShiftState
    segment: Int[Array, ' b']


class RWKV7(Mixer):
    """The time mixing of RWKV-7, `S_t = (diag(w_t) - (a_t * n_t) n_t^T) S_{t-1} + k_t v_t^T`, read by `S_t^T r_t`.

    Every input mixes a token with the one before it, `x_t + (x_{t-1} - x_t) m`. With `k'` the projected key, `a` in
    (0, 1) a rate and `w` a decay for every channel, both through bottlenecks:

        n = k' p / |k' p|                    the key that is erased
        k = k' (1 + (a - 1) u)               the key that is written
        log w = -exp(-1/2) sigmoid(.)        so that w lies above 0.545
        y_t = W_o (g_t * (norm(S_t^T r_t) + (r_t . c k_t) v_t))

    the norm that of every head with its mean, and `p`, `u`, `c` learned for every channel. The state that is erased
    has not decayed yet. With `value_residual` those of the first layer, `f`, are mixed into the values, by a bottleneck
    too:

        v = v' + sigmoid(.) * (f - v')       above the first layer

    Peng et al. 2025, https://arxiv.org/abs/2503.14456.

    Raises `UserError` for heads that do not divide the width, for `place` or `remaining` outside of [0, 1], and for a
    `value_rank` without `value_residual`.
    """

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        place: float = 0.0,
        remaining: float | None = None,
        norm_gain: float = 1.0,
        rank: int | None = None,
        gate_rank: int | None = None,
        value_residual: bool = False,
        value_rank: int | None = None,
        start: Literal['uniform', 'orthogonal'] = 'uniform',
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        """Makes the projections and the parts.

        Args:
          dim: model width.
          heads: how many memories, each of `dim / heads` keys and values.
          place: of the layer in its model, from 0 for the first to 1 for the last; sets where decays start.
          remaining: of all layers, how many are not below it, from 1 for the first to almost 0; sets where what is
            taken of the token before starts; `None`: `1 - place`.
          norm_gain: what the gains of the norm start at.
          rank: of the bottlenecks of decay and rate; `None`: `2.5 sqrt(dim)` rounded to a multiple of 32, at least 32.
          gate_rank: of that of the gate; `None`: likewise with `5 sqrt(dim)`.
          value_residual: whether the values of the first layer of its stack are mixed into its own.
          value_rank: of the bottleneck by which they are; `None`: likewise with `1.7 sqrt(dim)`.
          start: of the maps of queries, keys and values: uniform within 1/2, 1/20 and 1/2 over the root of the width,
            as the released module, or orthogonal with gains 1, 1/10 and 1, as the training of whole models there.
          implementation: of the core; `None`: the default of the platform.
          rngs: draws the parameters.
        """
        if not 0 <= place <= 1:
            raise UserError(f'the place of RWKV7 is {place}; it must be from 0, the first layer, to 1, the last')
        remaining = 1 - place if remaining is None else remaining
        if not 0 <= remaining <= 1:
            raise UserError(f'remaining of RWKV7 is {remaining}; it must be from 1, the first layer, to almost 0')
        if value_rank is not None and not value_residual:
            raise UserError(
                f'value_rank of RWKV7 is {value_rank}, which is not read without value_residual; leave it out, or give '
                'value_residual=True'
            )
        self.heads, self.channels, self.implementation = heads, head_channels(dim, heads), implementation
        rank = _rank(2.5, dim) if rank is None else rank
        gate_rank = _rank(5.0, dim) if gate_rank is None else gate_rank

        def mixed(key: jax.Array, shape: Shape[int], dtype: DTypeLike) -> Array:
            exponents = remaining * jnp.asarray(EXPONENTS, dtype)
            return 1 - (jnp.arange(dim, dtype=dtype) / dim)[None] ** exponents[:, None]

        self.mix = param(mixed, (len(EXPONENTS), dim), axes=(None, 'embed'), group='vector', rngs=rngs)

        def mapped(gain: float) -> Linear:
            even = start == 'uniform'
            draw = uniform_within(0.5 * gain / math.sqrt(dim)) if even else nnx.initializers.orthogonal(gain)
            return Linear(dim, dim, initializer=draw, rngs=rngs)

        self.query, self.key, self.value = mapped(1.0), mapped(0.1), mapped(1.0)
        ramp, zigzag = _ramp(dim), _zigzag(dim, heads)
        # From 1 in the first layer to 2 in the last.
        steepness = 1 + place**0.3
        decay = -5.5 + 6 * (ramp + 0.5) ** steepness + 2.5 * zigzag
        self.decay = LowRank(dim, dim, rank=rank, activation='tanh', start=starting_at(decay), rngs=rngs)
        rate = starting_at(-0.19 + 0.3 * zigzag + 0.4 * ramp)
        self.rate = LowRank(dim, dim, rank=rank, activation='identity', start=rate, rngs=rngs)
        self.gate = LowRank(dim, dim, rank=gate_rank, activation='sigmoid', rngs=rngs)

        def started(values: Array) -> nnx.Param:
            shape = (heads, self.channels)
            return param(starting_at(values.reshape(shape)), shape, axes=('heads', None), group='vector', rngs=rngs)

        self.erased = started(0.71 - 0.1 * ramp)
        self.written = started(jnp.full(dim, 1.02))
        self.bonus = started(jnp.full(dim, -0.04))
        self.norm = GroupNorm(self.channels, heads=heads, eps=1e-5 * self.channels, gain=norm_gain, rngs=rngs)
        self.output = Linear(dim, dim, axes=('heads', 'embed'), rngs=rngs)
        self.mixes_values = value_residual
        if value_residual:
            value_rank = _rank(1.7, dim) if value_rank is None else value_rank
            mixed_in = starting_at(0.73 - 0.4 * ramp)
            self.mixed_in = LowRank(dim, dim, rank=value_rank, activation='identity', start=mixed_in, rngs=rngs)

    def __call__(
        self, x: Sequence, ctx: Context, state: RWKV7State | None = None
    ) -> tuple[Sequence, RWKV7State | None]:
        inputs, shift = self._inputs(x, ctx.segments, None if state is None else state.shift)
        r, k = (by_head(each, self.heads) for each in (self.query(inputs[QUERY]), self.key(inputs[KEY])))
        v = by_head(self._values(inputs[VALUE], ctx.first_values), self.heads)
        log_decay = _log_decay(by_head(self.decay(inputs[DECAY]), self.heads))
        k, reads, writes = self._keys(k, by_head(self.rate(inputs[RATE]), self.heads))
        core: dict[str, Any] = {'scale': 1.0, 'segments': ctx.segments, 'implementation': self.implementation}
        if state is not None:
            segments = ctx.segments_or_ones()
            core['state'] = carried(state.memory, segments, state.segment)
        y, memory = cores.diagonal_low_rank(r, k, v, reads, writes, log_decay, **core)
        if shift is not None:
            state = RWKV7State(memory, shift, ctx.segments_or_ones()[:, -1])
        return self.output(recomputed_beside_products(self._read)(y, r, k, v, inputs[GATE])), state

    def values(self, x: Sequence, ctx: Context, state: RWKV7State | None = None) -> Sequence:
        """The values of a call before those of the first layer are mixed in, `b t d`."""
        inputs, _ = self._inputs(x, ctx.segments, None if state is None else state.shift)
        return self.value(inputs[VALUE])

    def _values(self, x: Sequence, first: FirstValues | None) -> Sequence:
        if not self.mixes_values or first is None:
            return self.value(x)
        return first.values if first.own else _mixed(self.value(x), first.values, self.mixed_in(x))

    def _read(self, y: Heads, r: Queries, k: Keys, v: Values, x: Sequence) -> Sequence:
        return (self.norm(y) + own_read(r, k, v, self.bonus[...])).reshape(x.shape) * self.gate(x)

    @property
    def divides_time(self) -> bool:
        return True

    def init_state(self, batch: int, length: int, dtype: DTypeLike) -> RWKV7State:
        """Returns an empty memory; its size does not depend on `length`."""
        memory = jnp.zeros((batch, self.heads, self.channels, self.channels), wide_dtype(dtype))
        return RWKV7State(memory, no_shift((batch, self.heads * self.channels), dtype), no_segment(batch))

    @recomputed_method
    def _inputs(
        self, x: Sequence, segments: Segments | None, last: ShiftState | None
    ) -> tuple[list[Sequence], ShiftState | None]:
        before, shift = shifted(x, segments, last)
        wide = wide_dtype(x.dtype)
        mix = self.mix[...].astype(wide)[:, None, None]
        return [x + ((before - x).astype(wide) * part).astype(x.dtype) for part in mix], shift

    @recomputed_method
    def _keys(self, k: Keys, logits: Heads) -> tuple[Keys, Keys, Keys]:
        """The keys that are written, and those by which the memory is read to erase and written to."""
        wide = wide_dtype(k.dtype)
        rate = jax.nn.sigmoid(logits)
        erased = _unit(k.astype(wide) * self._each(self.erased, wide))
        written = k.astype(wide) * (1 + (rate - 1) * self._each(self.written, wide))
        return written.astype(k.dtype), (-erased).astype(k.dtype), (rate * erased).astype(k.dtype)

    def _each(self, parameter: nnx.Param, dtype: DTypeLike) -> Float[Array, '1 1 h k']:
        return parameter[...].astype(dtype)[None, None]


@recomputed
def _log_decay(logits: Heads) -> Heads:
    return -SLOWEST * jax.nn.sigmoid(logits)


@recomputed
def _mixed(v: Sequence, first: Sequence, logits: Sequence) -> Sequence:
    wide = logits.dtype
    return (v + jax.nn.sigmoid(logits) * (first.astype(wide) - v.astype(wide))).astype(v.dtype)


def _unit(x: Heads) -> Heads:
    return x * jax.lax.rsqrt(jnp.maximum(jnp.sum(jnp.square(x), axis=-1, keepdims=True), 1e-24))


def _rank(factor: float, dim: int) -> int:
    return max(32, 32 * round(factor * math.sqrt(dim) / 32))


def _ramp(dim: int) -> Array:
    """From -1/2 at the first channel to 1/2 at the last."""
    return jnp.arange(dim) / max(dim - 1, 1) - 0.5


def _zigzag(dim: int, heads: int) -> Array:
    """The square, with its sign, of the place of a channel in its head, from -1 to 1."""
    place = jnp.tile(2 * _ramp(dim // heads), heads)
    return place * jnp.abs(place)
