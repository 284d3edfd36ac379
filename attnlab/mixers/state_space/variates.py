"""State-space models of several series at once, with a state along time and one along the variates."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.functional import cores
from attnlab.functional.grids import flatten, required_grid, unflatten
from attnlab.functional.precision import wide_dtype
from attnlab.functional.recomputed import gated
from attnlab.functional.recurrences import of_token_before
from attnlab.mixers.mixer import TwoSided
from attnlab.module import Module
from attnlab.nn.decays import StepSize, log_states
from attnlab.nn.parameter import param
from attnlab.nn.projections import Linear, default_rank
from attnlab.typing import Sequence

Plane = Float[Array, 'b v t d']
"""Channels of every variate at every time."""

LOW, HIGH = 1e-3, 1e-1
"""What step sizes start between; heads divide the range among them, by its logarithm."""


class CoupledScans(Module):
    """One sweep over the variates of two states a channel that drive each other, `h` along time, `g` along variates.

        h_vt = a_1 h_v,t-1 + a_2 g_v,t-1 + p_vt x_vt B_1
        g_vt = a_4 g_v-1,t + a_3 h_v-1,t + q_vt x_vt B_2
        y_vt = h_vt C_1 + g_vt C_2 + D x_vt
        a_1 = exp(-p (r_1 + c_1))   a_2 = (1 - exp(-p c_1)) exp(-p r_2)
        a_4 = exp(-q (r_4 + c_2))   a_3 = (1 - exp(-q c_2)) exp(-q r_3)

    Steps `p` and `q` are a number a channel, `B` and `C` a vector a head, all read from `x_vt`; rates `r` and couplings
    `c` are positive, a number a channel and state. Neither pair of factors is above one in sum, so that no path over
    the grid grows. Rates start at `1, 2, ...` in every channel and couplings at one; steps log-uniform, of the first
    head the smallest. In float32 or better.
    """

    def __init__(self, inner: int, *, heads: int, state: int, dt_rank: int, implementation: str | None, rngs: nnx.Rngs):
        self.heads, self.state, self.implementation = heads, state, implementation
        self.splits = (2 * dt_rank, 2 * dt_rank + 2 * heads * state)
        self.select = Linear(inner, 2 * dt_rank + 4 * heads * state, axes=('mlp', None), rngs=rngs)
        self.steps: Any = nnx.List([Linear(dt_rank, inner, axes=(None, 'mlp'), rngs=rngs) for _ in range(2)])
        edges = [LOW * (HIGH / LOW) ** (head / heads) for head in range(heads + 1)]
        sizes = [
            [StepSize(inner // heads, low=edges[head], high=edges[head + 1], rngs=rngs) for head in range(heads)]
            for _ in range(2)
        ]
        self.step_sizes: Any = nnx.List([nnx.List(each) for each in sizes])
        shape = inner, state
        options: dict[str, Any] = {'axes': ('mlp', 'state'), 'group': 'dynamics', 'rngs': rngs}
        self.rates: Any = nnx.List([param(log_states, shape, **options) for _ in range(4)])
        self.couplings: Any = nnx.List([param(nnx.initializers.zeros, shape, **options) for _ in range(2)])
        self.D = param(nnx.initializers.ones, (inner,), axes=('mlp',), group='dynamics', rngs=rngs)

    def __call__(self, x: Plane) -> Plane:
        wide = x.astype(wide_dtype(x.dtype))
        selected = self.select(x)
        low, B, C = jnp.split(selected, self.splits, axis=-1)
        steps = [
            self._steps(place, linear(part))
            for place, (linear, part) in enumerate(zip(self.steps, jnp.split(low, 2, axis=-1), strict=True))
        ]
        ends = [self._by_channel(each.astype(wide.dtype)) for part in (B, C) for each in jnp.split(part, 2, axis=-1)]
        rates = [jnp.exp(each[...].astype(wide.dtype))[None, None] for each in self.rates]
        couplings = [jnp.exp(each[...].astype(wide.dtype))[None, None] for each in self.couplings]

        def variate(carry: tuple[Array, Array], given: tuple[Array, ...]) -> tuple[tuple[Array, Array], Array]:
            (h, g), (x, p, q, B1, B2, C1, C2) = carry, given
            a1, a2 = _pair(p, rates[0], rates[1], couplings[0])
            a4, a3 = _pair(q, rates[3], rates[2], couplings[1])
            g = a4 * g + a3 * h + (q * x)[..., None] * B2
            driven = a2 * of_token_before(g, None) + (p * x)[..., None] * B1
            flat = (*x.shape[:2], -1)
            run = {'implementation': self.implementation}
            h = cores.linear_scan(driven.reshape(flat), a1.reshape(flat), **run)[0].reshape(driven.shape)
            return (h, g), jnp.sum(h * C1 + g * C2, axis=-1)

        rows = tuple(jnp.moveaxis(each, 1, 0) for each in (wide, *steps, *ends))
        nothing = jnp.zeros((x.shape[0], x.shape[2], x.shape[3], self.state), wide.dtype)
        _, y = jax.lax.scan(jax.checkpoint(variate), (nothing, nothing), rows)
        direct = self.D[...].astype(wide.dtype)[None, None, None] * wide
        return (jnp.moveaxis(y, 0, 1) + direct).astype(x.dtype)

    def _steps(self, place: int, x: Plane) -> Plane:
        """The sizes of steps, by heads."""
        rows = x.reshape(-1, *x.shape[2:])
        parts = jnp.split(rows, self.heads, axis=-1)
        sizes = [size(part) for size, part in zip(self.step_sizes[place], parts, strict=True)]
        return jnp.concatenate(sizes, axis=-1).reshape(x.shape)

    def _by_channel(self, x: Float[Array, 'b v t m']) -> Float[Array, 'b v t d n']:
        """A vector a head as one a channel."""
        heads = x.reshape(*x.shape[:3], self.heads, self.state)
        return jnp.repeat(heads, self.D.shape[0] // self.heads, axis=3)


class VariateTimeSSM(TwoSided):
    """Chimera: two coupled states over a grid of variates and times, in both orders of the variates.

        x, z = split(u W_in)    y = CoupledScans(x) + flip(CoupledScans'(flip(x)))    out = (y silu(z)) W_out

    The first axis of the grid is the variates, which have no order: two sweeps go over them, one from each end, with
    parameters of their own. Along the second, time, no token depends on a later one. Behrouz, Santacatterina and Zabih
    2024, https://arxiv.org/abs/2406.04320, of which no code was released.

    Raises `UserError` for heads that do not divide the inner width, and without a grid of two axes.

    Args:
      dim: model width.
      expand: inner width over model width.
      heads: groups of channels with an input and an output direction of their own, from slow ones to fast ones.
      state: numbers of each state a channel.
      dt_rank: width of the bottlenecks that step sizes are read through; `None`: `dim / 16`, rounded up.
      implementation: of the core; `None`: the default of the platform.
      rngs: draws the parameters.
    """

    def __init__(
        self,
        dim: int,
        *,
        expand: int = 2,
        heads: int = 2,
        state: int = 8,
        dt_rank: int | None = None,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        inner = expand * dim
        if heads < 1 or inner % heads:
            raise UserError(f'heads is {heads}; it must divide the inner width, {expand} times {dim}')
        sizes: dict[str, Any] = {
            'heads': heads,
            'state': state,
            'dt_rank': default_rank(dim, dt_rank),
            'implementation': implementation,
        }
        self.input = Linear(dim, 2 * inner, axes=('embed', 'mlp'), rngs=rngs)
        self.down, self.up = (CoupledScans(inner, **sizes, rngs=rngs) for _ in range(2))
        self.output = Linear(inner, dim, axes=('mlp', 'embed'), rngs=rngs)

    def __call__(self, x: Sequence, ctx: Context, state: None = None) -> tuple[Sequence, None]:
        grid = required_grid(ctx, type(self).__name__, axes=2)
        x, z = jnp.split(self.input(x), 2, axis=-1)
        plane = unflatten(x, grid)
        y = self.down(plane) + jnp.flip(self.up(jnp.flip(plane, 1)), 1)
        return self.output(gated(flatten(y, grid), z)), None


def _pair(step: Array, own: Array, other: Array, coupling: Array) -> tuple[Array, Array]:
    """The factors of a state and of the one that drives it, whose sum is at most one."""
    step = step[..., None]
    return jnp.exp(-step * (own + coupling)), -jnp.expm1(-step * coupling) * jnp.exp(-step * other)
