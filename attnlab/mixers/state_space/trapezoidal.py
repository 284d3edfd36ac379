"""State-space models whose input enters by the trapezoidal rule and whose states are rotated by what is read."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.functional.precision import wide_dtype
from attnlab.functional.recomputed import gated, recomputed, recomputed_method
from attnlab.functional.recurrences import carried, document_starts, no_segment
from attnlab.functional.rotary import rotate_by_angles
from attnlab.functional.trapezoid import Ranked, accumulated_angles, trapezoidal_attention
from attnlab.mixers.mixer import Mixer
from attnlab.nn.decays import StepSize
from attnlab.nn.norms import RMSNorm
from attnlab.nn.parameter import param
from attnlab.nn.preludes import ShiftState, no_shift, shifted
from attnlab.nn.projections import Linear
from attnlab.typing import Sequence

LEAST_RATE = 1e-4
"""The smallest rate of decay, per unit of step."""


class TrapezoidalState(NamedTuple):
    """What the model remembers of a stream.

    Attributes:
      memory: what all tokens but the last have written, decayed up to the last; float32 or float64.
      angle: by which the last token's keys are rotated, radians; likewise.
      before: the keys, values and weights of the last token, which the next one writes.
      segment: the segment of the last token, `b`; -1 before the first.
    """

    memory: Float[Array, 'b h k v']
    angle: Float[Array, 'b h n']
    before: tuple[ShiftState, ...]
    segment: Int[Array, ' b']


class TrapezoidalSSM(Mixer):
    """Mamba-3: Mamba-2 without a convolution, its input entering by the trapezoidal rule, its state rotated.

        z, x, B, C, r, s, l, u = split(u W_in)         dt = softplus(r + c)       A = -max(g(s), 1e-4)
        phi_t = phi_{t-1} + pi tanh(u_t) dt_t          k, q = rotate(norm(B) + b, phi), rotate(norm(C) + d, phi)
        S_t = e^{A dt_t} (S_{t-1} + (1 - m_t) dt_t k_{t-1} x_{t-1}^T) + m_t dt_t k_t x_t^T,     m = sigmoid(l)
        y_t = S_t^T q_t + D x_t                        out = norm(y) * silu(z) W_out

    with `g(s) = 1 + s` above 0 and `1 / (1 - s)` below. A, `dt`, `m` and `phi` are of every head; `u` is shared by all.
    With `rank` more than 1 a token writes and reads that many times: `B` and `C` of every rank, values `x * x_r`, gates
    `z * z_r`, and outputs `sum_r y_r * o_r`, with learned `x_r`, `z_r`, `o_r`. Biases `b` and `d`, of every head and
    rank, start at one; `x_r` and `o_r` at one over the rank, `z_r` and `D` at one.
    Lahoti et al. 2026, https://arxiv.org/abs/2603.15569.

    Raises `UserError` unless `head_dim` divides the inner width, and `fraction` of the states is an even number.
    """

    def __init__(
        self,
        dim: int,
        *,
        expand: int = 2,
        head_dim: int = 64,
        state: int = 128,
        rank: int = 1,
        fraction: float = 0.5,
        norm: Callable[..., nnx.Module] | None = None,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        """Makes the maps.

        Args:
          dim: model width.
          expand: inner width over model width.
          head_dim: channels a head.
          state: channels of `B` and `C`.
          rank: writes and reads a token and head.
          fraction: the part of the channels of `B` and `C` that is rotated, the first of them, in neighbouring pairs.
          norm: made as `norm(head_dim, heads=, rngs=)`, applied to every head before the gate; `None`: without.
          implementation: of the core; `None`: the default of the platform.
          rngs: draws the parameters.
        """
        inner = expand * dim
        if inner % head_dim:
            raise UserError(f'head_dim is {head_dim}; it must divide the inner width, {expand} times {dim}')
        rotated = round(fraction * state)
        if not 0 < fraction <= 1 or rotated != fraction * state or rotated % 2:
            raise UserError(
                f'fraction {fraction} of a state of {state} is {fraction * state:g}; it must be an even number of '
                'channels, of at most all'
            )
        self.heads, self.head_dim, self.state, self.rank, self.rotated = (
            inner // head_dim,
            head_dim,
            state,
            rank,
            rotated,
        )
        self.implementation = implementation
        widths = (inner, inner, rank * state, rank * state, *(self.heads,) * 3, rotated // 2)
        self.splits = tuple(int(place) for place in np.cumsum(widths)[:-1])
        self.input = Linear(dim, sum(widths), axes=('embed', 'mlp'), rngs=rngs)
        self.step_size = StepSize(self.heads, rngs=rngs)
        self.key_norm, self.query_norm = (RMSNorm(state, eps=1e-5, rngs=rngs) for _ in range(2))
        ones = nnx.initializers.ones
        of_ranks, axes = (rank, self.heads), (None, 'heads', None)
        self.key_bias, self.query_bias = (
            param(ones, (*of_ranks, state), axes=axes, group='vector', rngs=rngs) for _ in range(2)
        )
        share = nnx.initializers.constant(1 / rank)
        self.rank_values: Any
        self.rank_gates: Any
        self.rank_outputs: Any
        self.rank_values, self.rank_gates, self.rank_outputs = (
            param(start, (*of_ranks, head_dim), axes=axes, group='vector', rngs=rngs) if rank > 1 else None
            for start in (share, ones, share)
        )
        self.D = param(ones, (self.heads,), axes=('heads',), group='dynamics', rngs=rngs)
        self.norm = None if norm is None else norm(head_dim, heads=self.heads, rngs=rngs)
        self.output = Linear(inner, dim, axes=('mlp', 'embed'), rngs=rngs)

    def __call__(
        self, x: Sequence, ctx: Context, state: TrapezoidalState | None = None
    ) -> tuple[Sequence, TrapezoidalState | None]:
        wide = wide_dtype(x.dtype)
        z, v, B, C, step, rate, part, turn = jnp.split(self.input(x), self.splits, axis=-1)
        dt, part = self.step_size(step), jax.nn.sigmoid(part.astype(wide))
        log_decay = -jnp.maximum(_rate(rate.astype(wide)), LEAST_RATE) * dt
        angles = self._angles(turn.astype(wide), dt, ctx, state)
        k = self._rotated(self.key_norm, self.key_bias, B, angles)
        q = self._rotated(self.query_norm, self.query_bias, C, angles)
        v, z = (each.reshape(*x.shape[:2], 1, self.heads, -1) for each in (v, z))
        v = _of_ranks(v, self.rank_values)
        now = part * dt
        earlier = state.before if state is not None else (None,) * 3
        moved = [shifted(each, ctx.segments, last) for each, last in zip((k, v, now), earlier, strict=True)]
        before, kept = zip(*moved, strict=True)
        y, memory = trapezoidal_attention(
            q,
            k,
            v,
            log_decay,
            now,
            (1 - part) * dt,
            before,
            state=None if state is None else carried(state.memory, ctx.segments_or_ones(), state.segment),
            segments=ctx.segments,
            implementation=self.implementation,
        )
        y = self._with_direct(y, v)
        if self.norm is not None:
            y = self.norm(y.reshape(x.shape[0], -1, *y.shape[3:])).reshape(y.shape)
        if state is not None:
            state = TrapezoidalState(memory, angles[:, -1], kept, ctx.segments_or_ones()[:, -1])
        return self.output(self._gated(y, z).reshape(*x.shape[:2], -1)), state

    def init_state(self, batch: int, length: int, dtype: DTypeLike) -> TrapezoidalState:
        """Returns the state of a system at rest; its size does not depend on `length`."""
        wide = wide_dtype(dtype)
        keys, values = ((batch, self.rank, self.heads, channels) for channels in (self.state, self.head_dim))
        before = (no_shift(keys, dtype), no_shift(values, dtype), no_shift((batch, self.heads), wide))
        return TrapezoidalState(
            jnp.zeros((batch, self.heads, self.state, self.head_dim), wide),
            jnp.zeros((batch, self.heads, self.rotated // 2), wide),
            before,
            no_segment(batch),
        )

    def _angles(
        self, turn: Float[Array, 'b t n'], dt: Float[Array, 'b t h'], ctx: Context, state: TrapezoidalState | None
    ) -> Float[Array, 'b t h n']:
        steps = np.pi * jnp.tanh(turn)[:, :, None] * dt[..., None]
        if state is None:
            starts = None if ctx.segments is None else document_starts(ctx.segments)
            return accumulated_angles(steps, starts, jnp.zeros_like(steps[:, 0]))
        return accumulated_angles(steps, document_starts(ctx.segments_or_ones(), state.segment), state.angle)

    def _rotated(
        self, norm: RMSNorm, bias: nnx.Param, x: Float[Array, 'b t f'], angles: Float[Array, 'b t h n']
    ) -> Ranked:
        """Keys or queries of every rank and head: normalised, with a bias, then rotated."""
        b, t, _ = x.shape

        @recomputed
        def rotated(x: Float[Array, 'b t f'], angles: Float[Array, 'b t h n']) -> Ranked:
            # Cast after it is spread over tokens, so that its gradient is summed over them in its own type.
            shifts = jnp.broadcast_to(bias[...], (b, t, *bias.shape)).astype(x.dtype)
            ranked = norm(x.reshape(b, t, self.rank, 1, self.state)) + shifts
            ranked = ranked.reshape(b, t * self.rank, self.heads, self.state)
            turns = jnp.repeat(angles, self.rank, axis=1)
            first = rotate_by_angles(ranked[..., : self.rotated], turns, interleaved=True)
            ranked = jnp.concatenate([first, ranked[..., self.rotated :]], axis=-1)
            return ranked.reshape(b, t, self.rank, self.heads, self.state)

        return rotated(x, angles)

    @recomputed_method
    def _with_direct(self, y: Float[Array, 'b t r h v'], v: Float[Array, 'b t r h v']) -> Float[Array, 'b t r h v']:
        return (y + self.D[...].astype(y.dtype)[None, None, None, :, None] * v.astype(y.dtype)).astype(v.dtype)

    @recomputed_method
    def _gated(self, y: Float[Array, 'b t r h v'], z: Float[Array, 'b t 1 h v']) -> Float[Array, 'b t h v']:
        return jnp.sum(_of_ranks(gated(y, _of_ranks(z, self.rank_gates)), self.rank_outputs), axis=2)


def _of_ranks(x: Float[Array, 'b t #r h v'], factors: nnx.Param | None) -> Float[Array, 'b t r h v']:
    if factors is None:
        return x
    # As biases are spread.
    return x * jnp.broadcast_to(factors[...], (*x.shape[:2], *factors.shape)).astype(x.dtype)


def _rate(x: Float[Array, '...']) -> Float[Array, '...']:
    """`1 + x` above 0, `1 / (1 - x)` below: positive, and smooth to the first derivative."""
    return jnp.where(x >= 0, 1 + x, 1 / (1 - jnp.minimum(x, 0)))
