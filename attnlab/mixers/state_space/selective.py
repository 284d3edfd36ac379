"""Selective state-space models: linear systems whose step size, input and output directions are read from the input."""

from collections.abc import Callable
from collections.abc import Sequence as Shape
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.functional import cores
from attnlab.functional.levels import levels_of, no_levels, read_by_level
from attnlab.functional.precision import wide_dtype
from attnlab.functional.recomputed import gated, recomputed_method
from attnlab.functional.recurrences import carried, no_segment
from attnlab.functional.signed import signed_scan
from attnlab.mixers.mixer import Mixer
from attnlab.module import Module
from attnlab.nn.decays import StepSize, log_rates, log_states
from attnlab.nn.heads import by_head
from attnlab.nn.levels import LevelWeights
from attnlab.nn.norms import RMSNorm
from attnlab.nn.parameter import param, starting_at
from attnlab.nn.preludes import Prelude, ShortConv
from attnlab.nn.projections import Linear, default_rank
from attnlab.nn.systems import System
from attnlab.typing import Heads, Segments, Sequence, State, Values


class SelectiveState(NamedTuple):
    """What a selective state-space model remembers of a stream.

    Attributes:
      memory: the state of the linear system, float32 or float64: `b d n`, or `b h n v` in the scalar-decay form, by
        level where there are levels.
      prelude: the state of the prelude.
      segment: the segment of the last token, `b`; -1 before the first.
    """

    memory: State
    prelude: State
    segment: Int[Array, ' b']


class SelectiveMaps(Module):
    """The maps that choose steps, inputs and outputs of a selective scan of `inner` channels, and the scan by them.

        r, B, C = split(x W_x)    dt = softplus(r W_dt + c)
        h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T    y_t = h_t C_t + D x_t

    With `select_norm` r, B and C are normalised first, each by a norm of its own; `D` starts as `skip` draws it, and is
    left out where that is `None`. With `eigenvalues='signed'` the decay is `2 exp(dt_t A) - 1`, from -1 to 1 (see
    `signed_scan`). Parameters are those of whoever derives from it, under these names.
    """

    def __init__(
        self,
        inner: int,
        *,
        state: int,
        dt_rank: int,
        select_norm: Callable[..., nnx.Module] | None = None,
        skip: nnx.Initializer | None = nnx.initializers.ones,
        eigenvalues: Literal['positive', 'signed'] = 'positive',
        rngs: nnx.Rngs,
    ):
        self.eigenvalues = eigenvalues
        self.splits = (dt_rank, dt_rank + state)
        self.select = Linear(inner, dt_rank + 2 * state, axes=('mlp', None), rngs=rngs)
        self.step = Linear(dt_rank, inner, initializer=_bound_by_fan_in, axes=(None, 'mlp'), rngs=rngs)
        self.step_size = StepSize(inner, rngs=rngs)
        self.A_log = param(log_states, (inner, state), axes=('mlp', 'state'), group='dynamics', rngs=rngs)
        self.D = None if skip is None else param(skip, (inner,), axes=('mlp',), group='dynamics', rngs=rngs)
        norms = [] if select_norm is None else [select_norm(width, rngs=rngs) for width in (dt_rank, state, state)]
        self.select_norms: Any = nnx.List(norms)

    def scan(
        self,
        x: Sequence,
        segments: Segments | None,
        memory: Float[Array, 'b d n'] | None = None,
        *,
        implementation: str | None,
    ) -> tuple[Sequence, Float[Array, 'b d n']]:
        """Returns `y`, and the state after the last token."""
        selected = jnp.split(self.select(x), self.splits, axis=-1)
        if self.select_norms:
            selected = [norm(each) for norm, each in zip(self.select_norms, selected, strict=True)]
        low, B, C = selected
        scan = signed_scan if self.eigenvalues == 'signed' else cores.selective_scan
        return scan(
            x,
            self.step_size(self.step(low)),
            -jnp.exp(self.A_log[...].astype(wide_dtype(x.dtype))),
            B,
            C,
            None if self.D is None else self.D[...],
            state=memory,
            segments=segments,
            implementation=implementation,
        )


class SelectiveSSM(SelectiveMaps, Mixer):
    """Mamba: a diagonal state-space model with `state` states a channel, gated, its inner width `expand * dim`.

        x, z = split(u W_in)               x = prelude(x)
        r, B, C = split(x W_x)             dt = softplus(r W_dt + c)
        h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T
        y_t = (h_t C_t + D x_t) silu(z_t)  out = y W_out

    `A = -exp(A_log)`, at the start `-n` for the states `n` from 1, in every channel; `dt` starts log-uniform in
    `[0.001, 0.1]`, `D` at one. The scan is in float32 or better. Gu and Dao 2023, https://arxiv.org/abs/2312.00752.

    Args:
      dim: model width.
      expand: inner width over model width.
      state: states a channel.
      dt_rank: width of the bottleneck that step sizes are read through; `None`: `dim / 16`, rounded up.
      select_norm: made as `select_norm(width, rngs=rngs)`, one each for `r`, `B` and `C` (Lieber et al. 2024,
        https://arxiv.org/abs/2403.19887); `None`: without.
      eigenvalues: of the transitions: `positive`, `exp(dt A)`, from 0 to 1, or `signed`, `2 exp(dt A) - 1`, from -1,
        with which one layer can count modulo two. These are a scan of all states, which takes their memory a token.
        Grazzi et al. 2024, https://arxiv.org/abs/2411.12537.
      prelude: made as `prelude(inner, rngs=rngs)`.
      implementation: of the core; `None`: the default of the platform.
      rngs: draws the parameters.
    """

    def __init__(
        self,
        dim: int,
        *,
        expand: int = 2,
        state: int = 16,
        dt_rank: int | None = None,
        select_norm: Callable[..., nnx.Module] | None = None,
        eigenvalues: Literal['positive', 'signed'] = 'positive',
        prelude: Callable[..., Prelude] = ShortConv,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        inner = expand * dim
        self.input = Linear(dim, 2 * inner, axes=('embed', 'mlp'), rngs=rngs)
        self.prelude = prelude(inner, rngs=rngs)
        super().__init__(
            inner,
            state=state,
            dt_rank=default_rank(dim, dt_rank),
            select_norm=select_norm,
            eigenvalues=eigenvalues,
            rngs=rngs,
        )
        self.implementation = implementation
        self.output = Linear(inner, dim, axes=('mlp', 'embed'), rngs=rngs)

    def __call__(
        self, x: Sequence, ctx: Context, state: SelectiveState | None = None
    ) -> tuple[Sequence, SelectiveState | None]:
        x, z = jnp.split(self.input(x), 2, axis=-1)
        x, prelude = self.prelude(x, ctx.segments, None if state is None else state.prelude)
        before = None if state is None else carried(state.memory, ctx.segments_or_ones(), state.segment)
        y, memory = self.scan(x, ctx.segments, before, implementation=self.implementation)
        if state is not None:
            state = SelectiveState(memory, prelude, ctx.segments_or_ones()[:, -1])
        return self.output(gated(y, z)), state

    @property
    def divides_time(self) -> bool:
        return True

    def init_state(self, batch: int, length: int, dtype: DTypeLike) -> SelectiveState:
        """Returns the state of a system at rest; its size does not depend on `length`."""
        memory = jnp.zeros((batch, *self.A_log.shape), wide_dtype(dtype))
        return SelectiveState(memory, self.prelude.init_state(batch, dtype), no_segment(batch))


class SelectiveSystem(SelectiveMaps, System):
    """A linear system of `state` states for every channel, whose steps, inputs and outputs it reads from its input: S6.

        r, B, C = split(x W_x)    dt = softplus(r W_dt + c)
        h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t^T    y_t = h_t C_t

    It starts as Mamba's does (see `SelectiveSSM`). Gu and Dao 2023, https://arxiv.org/abs/2312.00752.

    Raises `UserError` unless it is causal.

    Args:
      dim: channels.
      state: states a channel.
      causal: `True`: it reads forwards alone.
      dt_rank: width of the bottleneck that step sizes are read through; `None`: `dim / 16`, rounded up.
      rngs: draws the parameters.
    """

    def __init__(self, dim: int, *, state: int, causal: bool, dt_rank: int | None = None, rngs: nnx.Rngs):
        if not causal:
            raise UserError('causal of SelectiveSystem is False; it must be True: a row of both ways is zoo=bi_s6')
        super().__init__(dim, state=state, dt_rank=default_rank(dim, dt_rank), skip=None, rngs=rngs)

    def __call__(
        self,
        x: Sequence,
        segments: Segments | None,
        state: Float[Array, 'b d n'] | None = None,
        *,
        implementation: str | None = None,
    ) -> tuple[Sequence, Float[Array, 'b d n'] | None]:
        wide = x.astype(wide_dtype(x.dtype))
        y, after = self.scan(wide, segments, state, implementation=implementation)
        return y, None if state is None else after

    def init_state(self, batch: int, dtype: DTypeLike) -> Float[Array, 'b d n']:
        """Returns zeros, float32 or float64."""
        return jnp.zeros((batch, *self.A_log.shape), wide_dtype(dtype))


class StateSpaceDual(Mixer):
    """Mamba-2: a state-space model whose decay is one number a head, which makes it linear attention.

        z, (x, B, C), r = split(u W_in)    x, B, C = prelude(x, B, C)
        dt = softplus(r + c)               log a = -exp(A_log) dt
        S_t = a_t S_{t-1} + B_t (dt_t x_t)^T
        y_t = S_t^T C_t + D x_t            out = norm(y * silu(z)) W_out

    `B` and `C`, of `state` channels, are the keys and queries, shared by all heads; there are `expand * dim / head_dim`
    heads. `A` starts as `rates` says, `dt` log-uniform in `[0.001, 0.1]`, `D` at one; each is one number a head.
    The norm is over all heads. Dao and Gu 2024, https://arxiv.org/abs/2405.21060.

    With `levels` the past is divided into blocks of doubling length, and the read is a weighted sum of reads of each
    (see `read_by_level`); the state then grows with the logarithm of the length it is made for, beyond which a call
    gives NaN. Guo et al. 2025, https://arxiv.org/abs/2506.04761.

    Raises `UserError` unless `head_dim` divides the inner width.

    Args:
      dim: model width.
      expand: inner width over model width.
      head_dim: channels a head.
      state: channels of `B` and `C`.
      rates: where `A` starts: `drawn`, uniform in `[1, 16]`, or `counted`, 1, 2, 3 and so on over the heads.
      levels: made as `levels(dim, heads=, rngs=)`; gives the weights of the levels of the past.
      prelude: made as `prelude(inner + 2 * state, rngs=rngs)`.
      norm: made as `norm(inner, rngs=rngs)`; `None`: without.
      implementation: of the core; `None`: the default of the platform.
      rngs: draws the parameters.
    """

    def __init__(
        self,
        dim: int,
        *,
        expand: int = 2,
        head_dim: int = 64,
        state: int = 128,
        rates: Literal['drawn', 'counted'] = 'drawn',
        levels: Callable[..., LevelWeights] | None = None,
        prelude: Callable[..., Prelude] = ShortConv,
        norm: Callable[..., nnx.Module] | None = RMSNorm,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        inner = expand * dim
        if inner % head_dim:
            raise UserError(f'head_dim is {head_dim}; it must divide the inner width, {expand} times {dim}')
        self.heads, self.state = inner // head_dim, state
        self.inner, self.implementation = inner, implementation
        self.input = Linear(dim, 2 * inner + 2 * state + self.heads, axes=('embed', 'mlp'), rngs=rngs)
        self.prelude = prelude(inner + 2 * state, rngs=rngs)
        self.step_size = StepSize(self.heads, rngs=rngs)
        self.A_log = log_rates(self.heads, 1.0, rngs) if rates == 'drawn' else _counted_rates(self.heads, rngs)
        self.D = param(nnx.initializers.ones, (self.heads,), axes=('heads',), group='dynamics', rngs=rngs)
        self.norm = None if norm is None else norm(inner, rngs=rngs)
        self.levels = None if levels is None else levels(dim, heads=self.heads, rngs=rngs)
        self.output = Linear(inner, dim, axes=('mlp', 'embed'), rngs=rngs)

    def __call__(
        self, x: Sequence, ctx: Context, state: SelectiveState | None = None
    ) -> tuple[Sequence, SelectiveState | None]:
        inner = self.inner
        z, xBC, step = jnp.split(self.input(x), (inner, 2 * inner + 2 * self.state), axis=-1)
        xBC, prelude = self.prelude(xBC, ctx.segments, None if state is None else state.prelude)
        values, B, C = jnp.split(xBC, (inner, inner + self.state), axis=-1)
        values = by_head(values, self.heads)
        dt = self.step_size(step)
        written = dt.astype(x.dtype)[..., None] * values
        log_decay = -jnp.exp(self.A_log[...].astype(dt.dtype))[None, None] * dt

        def run(v: Values, **given: Any) -> tuple[Heads, Array]:
            core = {'scale': 1.0, 'implementation': self.implementation}
            return cores.linear_attention(C[:, :, None], B[:, :, None], v, log_decay, **core, **given)

        memory: State
        if self.levels is None:
            before = None if state is None else carried(state.memory, ctx.segments_or_ones(), state.segment)
            y, memory = run(written, state=before, segments=ctx.segments)
        else:
            given = {} if state is None else {'state': state.memory, 'last': state.segment}
            y, memory = read_by_level(run, written, self.levels(x), segments=ctx.segments, **given)
        if state is not None:
            state = SelectiveState(memory, prelude, ctx.segments_or_ones()[:, -1])
        return self.output(self._read(y, values, z)), state

    @recomputed_method
    def _read(self, y: Heads, values: Values, z: Float[Array, 'b t f']) -> Float[Array, 'b t f']:
        # In the type of D, so that its gradient is summed over tokens in float32.
        y = y + (self.D[...][None, None, :, None] * values).astype(y.dtype)
        y = y.reshape(z.shape) * jax.nn.silu(z)
        return y if self.norm is None else self.norm(y)

    @property
    def divides_time(self) -> bool:
        return self.levels is None

    def init_state(self, batch: int, length: int, dtype: DTypeLike) -> SelectiveState:
        """Returns the state of a system at rest; its size depends on `length` where there are levels."""
        shape = (self.heads, self.state, self.inner // self.heads)
        memory: State = jnp.zeros((batch, *shape), wide_dtype(dtype))
        if self.levels is not None:
            memory = no_levels(batch, min(levels_of(length), self.levels.count - 1), shape, dtype)
        return SelectiveState(memory, self.prelude.init_state(batch, dtype), no_segment(batch))


def _bound_by_fan_in(key: jax.Array, shape: Shape[int], dtype: DTypeLike) -> Array:
    """Uniform within plus or minus one over the root of the number of inputs."""
    bound = shape[0] ** -0.5
    return jax.random.uniform(key, shape, dtype, -bound, bound)


def _counted_rates(heads: int, rngs: nnx.Rngs) -> nnx.Param:
    """The logarithms of 1, 2, 3 and so on over the heads."""
    start = starting_at(jnp.log(jnp.arange(1, heads + 1, dtype=jnp.float32)))
    return param(start, (heads,), axes=('heads',), group='dynamics', rngs=rngs)
