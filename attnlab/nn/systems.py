"""Linear time-invariant state-space systems, `x' = A x + B u`, `y = C x`, in steps: the parts of structured models.

Without the direct term `D u`. Complex numbers are kept as their real and imaginary parts. What sets the time
scales is of the group `dynamics`; outputs C are of the group `vector`, as they act on single channels.
"""

import abc
import math
from collections.abc import Sequence as Shape
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Bool, Complex, Float, Inexact

from attnlab.errors import UserError
from attnlab.functional import cores, hippo
from attnlab.functional.precision import wide_dtype
from attnlab.functional.structured import (
    Bilinear,
    Chunk,
    conjugate_parts,
    dense_chunk,
    dense_kernel,
    diagonal_chunk,
    diagonal_kernel,
    from_parts,
    in_chunks,
    parts,
)
from attnlab.module import Module
from attnlab.nn.parameter import check_steps, log_uniform, param, starting_at
from attnlab.typing import Segments, Sequence

SLOWEST = 1e-4
"""The least decay that an eigenvalue starts with; those of finite windows have none, as their low rank decays."""


class System(Module):
    """A linear system from `dim` channels to as many; time-invariant, unless its class says otherwise.

    Made with `causal=False`, where a class takes that, it reads both ways with one set of dynamics: transitions and
    inputs are shared, outputs `C` of what comes later are apart. It then keeps no state.
    """

    @abc.abstractmethod
    def __call__(
        self,
        x: Sequence,
        segments: Segments | None,
        state: Float[Array, 'b ...'] | None = None,
        *,
        implementation: str | None = None,
    ) -> tuple[Sequence, Float[Array, 'b ...'] | None]:
        """Returns `(y, state)`, computed in float32 or better, of which y is too.

        Given a state, that of the document of the first token, it goes on from it; otherwise it starts afresh and
        returns `None`. `implementation` is that of its core.
        """

    @abc.abstractmethod
    def init_state(self, batch: int, dtype: DTypeLike) -> Float[Array, 'b ...']:
        """Returns the state of a system at rest, in float32 or better."""


class Discretised(NamedTuple):
    """A diagonal system in steps: logarithms of transitions, inputs and outputs of every channel and mode."""

    log_transition: Inexact[Array, 'd n']
    inputs: Inexact[Array, 'd n']
    outputs: Inexact[Array, 'd n']


class ModalSystem(System):
    """A system of `state` real states for every channel, in modes that start as HiPPO has them: what S4D and S4 share.

    Modes have negative real parts and are one of each conjugate pair; `copies` of them, with their inputs `B`, serve
    the channels in turn. `dt` is one a channel, log-uniform in `[low, high]` at the start, `C` normal.

    Raises `UserError` for an unknown start, an odd state, steps that are not above 0 and in order, and `copies` that do
    not divide the channels or that `starts` do not divide.

    Args:
      dim: channels.
      state: real states a channel, two a mode.
      starts: names of what modes start as.
      copies: sets of modes; `None`: one a channel.
      low: the least step at the start.
      high: the greatest.
      causal: `False`: a token also reads those after it, its own left out: `sum_{j>0} K'_{j-1} u_{t+j}`, the kernel
        `K'` by outputs of its own.
      rngs: draws the parameters.
    """

    def __init__(
        self,
        dim: int,
        *,
        state: int,
        starts: tuple[str, ...],
        copies: int | None,
        low: float,
        high: float,
        causal: bool,
        rngs: nnx.Rngs,
    ):
        copies = dim if copies is None else copies
        if dim % copies or not starts or copies % len(starts):
            raise UserError(
                f'copies is {copies} for {dim} channels and starts {", ".join(starts) or "none"}: '
                'copies must divide the channels, and the number of starts must divide copies'
            )
        self.state, is_real = state, 'real' in starts
        found = [self.modes(starts[i % len(starts)]) for i in range(copies)]
        rank = max(len(modes.low_rank) for modes in found)
        padded = [np.pad(modes.low_rank, ((0, rank - len(modes.low_rank)), (0, 0))) for modes in found]
        drawn = np.array([starts[i % len(starts)] == 'random' for i in range(copies)])
        self.A_real, self.A_imag = _eigenvalues([modes.eigenvalues for modes in found], is_real, drawn, rngs)
        self.B = _constant(np.stack([modes.inputs for modes in found]), is_real, (None, 'state'), 'dynamics', rngs)
        axes = (None, None, 'state')
        self.P = _constant(np.stack(padded, 1), is_real, axes, 'dynamics', rngs) if rank else None
        shape, along = (dim, found[0].eigenvalues.size), ('mlp', 'state')
        self.C = _normal(shape, is_real, along, rngs)
        self.log_step = _log_step((dim,), ('mlp',), low, high, rngs)
        self.C_later = None if causal else _normal(shape, is_real, along, rngs)

    @abc.abstractmethod
    def modes(self, start: str) -> hippo.Modes:
        """What the modes of a copy start as; speeds of 'random' are drawn instead.

        Raises `UserError` for an unknown start and an odd state.
        """

    def continuous(
        self, dtype: DTypeLike
    ) -> tuple[Float[Array, 'd 1'], Inexact[Array, 'd n'], Inexact[Array, 'd n'], Inexact[Array, 'd n']]:
        """Step, eigenvalues, inputs and outputs of every channel, their real numbers of type `dtype`."""
        step = jnp.exp(self.log_step[...].astype(dtype))[:, None]
        A, B = _values(self.A_real, self.A_imag, dtype), _numbers(self.B, dtype)
        channels = len(step)
        return step, _tiled(A, channels), _tiled(B, channels), _numbers(self.C, dtype)

    def init_state(self, batch: int, dtype: DTypeLike) -> Float[Array, 'b d n']:
        """Returns zeros, float32 or float64."""
        return jnp.zeros((batch, self.log_step.shape[0], self.state), wide_dtype(dtype))


class DiagonalSystem(ModalSystem):
    """A system of `state` real states for every channel, diagonal: S4D.

        K_t = 2 Re sum_n C_n B_n z_n^t    y = K * u

    by `method` 'zoh', `z = exp(dt A)` and `B = (z - 1) / A` times the parameter, or 'bilinear',
    `z = (1 + dt A / 2) / (1 - dt A / 2)` and `dt / (1 - dt A / 2)`. `A` starts as `attnlab.functional.hippo.diagonal`
    has it, for each of `starts` in turn over the channels; 'real' has real modes and stands alone. Without a state it
    is a convolution; with one it runs in chunks.

    Gu et al. 2022, https://arxiv.org/abs/2206.11893. Arguments and errors are those of `ModalSystem`, with `method`, of
    discretisation; raises `UserError` for a bilinear method of real modes too.
    """

    def __init__(
        self,
        dim: int,
        *,
        state: int,
        causal: bool,
        starts: tuple[str, ...] = ('lin',),
        method: Literal['zoh', 'bilinear'] = 'zoh',
        copies: int | None = None,
        low: float = 1e-3,
        high: float = 1e-1,
        rngs: nnx.Rngs,
    ):
        if 'real' in starts and (len(starts) > 1 or method == 'bilinear'):
            raise UserError(
                f'starts are {", ".join(starts)} with method {method!r}; real modes stand alone, and with zoh: '
                'a bilinear step would make fast ones alternate'
            )
        super().__init__(dim, state=state, starts=starts, copies=copies, low=low, high=high, causal=causal, rngs=rngs)
        self.method = method

    def modes(self, start: str) -> hippo.Modes:
        """What the modes of a copy start as, without a low rank."""
        found = hippo.diagonal(start, self.state)
        return found._replace(low_rank=found.low_rank[:0])

    def __call__(
        self,
        x: Sequence,
        segments: Segments | None,
        state: Float[Array, 'b d n'] | None = None,
        *,
        implementation: str | None = None,
    ) -> tuple[Sequence, Float[Array, 'b d n'] | None]:
        dtype = wide_dtype(x.dtype)
        system = self.discretised(dtype)
        y, state = _diagonal(system, x, segments, state, implementation)
        if self.C_later is None:
            return y, state
        later = system._replace(outputs=_numbers(self.C_later, dtype))
        return y + _of_later(_kernel(later, x), x, segments, implementation), None

    def discretised(self, dtype: DTypeLike) -> Discretised:
        """The system in steps, its real numbers of type `dtype`."""
        step, A, B, C = self.continuous(dtype)
        if self.method == 'zoh':
            return Discretised(step * A, jnp.expm1(step * A) / A * B, C)
        left = 1 - step * A / 2
        return Discretised(_log_of_bilinear(step * A / 2), step * B / left, C)


def _log_of_bilinear(z: Inexact[Array, 'd n']) -> Inexact[Array, 'd n']:
    """`log (1 + z) / (1 - z)`, to all digits where modes are slow and the quotient is near one."""
    if not jnp.iscomplexobj(z):
        return jnp.log((1 + z) / (1 - z))
    size = jnp.square(z.real) + jnp.square(z.imag)
    rate = jnp.log1p(4 * z.real / (1 - 2 * z.real + size)) / 2
    return jax.lax.complex(rate, jnp.arctan2(2 * z.imag, 1 - size))


class DampedAverage(System):
    """A damped moving average of every channel in `state` dimensions: MEGA's.

        h_t = p b x_t + (1 - p a) h_{t-1}    y_t = g . h_t / sqrt(state)

    with `p = sigmoid` and `a = sigmoid` of parameters, drawn with a standard deviation of 0.2; `b` starts near 1, -1,
    1 and so on, `g` normal. It runs as `DiagonalSystem` does. Ma et al. 2023, https://arxiv.org/abs/2209.10655.
    """

    def __init__(self, dim: int, *, state: int, rngs: nnx.Rngs):
        def inputs(key: jax.Array, shape: Shape[int], dtype: DTypeLike) -> Array:
            signs = jnp.where(jnp.arange(state) % 2, -1.0, 1.0)
            return (signs[None] + 0.02 * jax.random.normal(key, shape)).astype(dtype)

        shape, axes = (dim, state), ('mlp', 'state')
        normal = nnx.initializers.normal
        self.decay, self.damping = (param(normal(0.2), shape, axes=axes, group='dynamics', rngs=rngs) for _ in range(2))
        self.input = param(inputs, shape, axes=axes, group='vector', rngs=rngs)
        self.output = param(normal(1.0), shape, axes=axes, group='vector', rngs=rngs)

    def __call__(
        self,
        x: Sequence,
        segments: Segments | None,
        state: Float[Array, 'b d n'] | None = None,
        *,
        implementation: str | None = None,
    ) -> tuple[Sequence, Float[Array, 'b d n'] | None]:
        dtype = wide_dtype(x.dtype)
        taken, damped = (jax.nn.sigmoid(each[...].astype(dtype)) for each in (self.decay, self.damping))
        log_transition, inputs = jnp.log1p(-taken * damped), taken * self.input[...].astype(dtype)
        # Systems read twice the real part.
        outputs = self.output[...].astype(dtype) / (2 * math.sqrt(self.output.shape[1]))
        return _diagonal(Discretised(log_transition, inputs, outputs), x, segments, state, implementation)

    def init_state(self, batch: int, dtype: DTypeLike) -> Float[Array, 'b d n']:
        """Returns zeros, float32 or float64."""
        return jnp.zeros((batch, *self.output.shape), wide_dtype(dtype))


class LowRankSystem(ModalSystem):
    """A system of `state` real states for every channel, normal plus low rank: S4.

        A = V (Lambda - P P^*) V^*,    bilinear in steps of dt

    A basis of `attnlab.functional.hippo.BASES` for each of `starts` in turn over the channels, with `P` beside `Lambda`
    and `B`. Without a state it is a convolution with powers of the matrix in steps; with one it runs in chunks, or by
    one step in time linear in the states. The matrix is a contraction, as `Lambda` decays and `P P^*` is taken off, so
    that its powers keep their digits; the paper's sums over the modes at every frequency (Cauchy products) lose them in
    gradients, where modes hardly decay without their low rank. Parameters are those of the recurrence, at every length.

    Gu et al. 2022, https://arxiv.org/abs/2111.00396. Arguments and errors are those of `ModalSystem`.
    """

    P: nnx.Param

    def __init__(
        self,
        dim: int,
        *,
        state: int,
        causal: bool,
        starts: tuple[str, ...] = ('legs',),
        copies: int | None = 1,
        low: float = 1e-3,
        high: float = 1e-1,
        rngs: nnx.Rngs,
    ):
        super().__init__(dim, state=state, starts=starts, copies=copies, low=low, high=high, causal=causal, rngs=rngs)

    def modes(self, start: str) -> hippo.Modes:
        """What the modes of a copy start as."""
        return hippo.modes(start, self.state)

    def __call__(
        self,
        x: Sequence,
        segments: Segments | None,
        state: Float[Array, 'b d n'] | None = None,
        *,
        implementation: str | None = None,
    ) -> tuple[Sequence, Float[Array, 'b d n'] | None]:
        dtype = wide_dtype(x.dtype)
        eigenvalues, low_rank, inputs = self.scaled(dtype)
        system, outputs = Bilinear.of(eigenvalues, low_rank), conjugate_parts(_numbers(self.C, dtype))
        if state is not None and x.shape[1] == 1:
            written = parts(inputs)[None] * x[:, 0, :, None]
            state = state + system.solve(system.applied(state) + written)
            return jnp.einsum('dn,bdn->bd', outputs, state, precision='highest')[:, None], state
        change, written = system.change(dtype), system.solve(parts(inputs))

        def chunk(steps: int) -> Chunk:
            return dense_chunk(change, written, outputs, steps)

        if state is not None:
            return in_chunks(chunk, x.astype(dtype), segments, state, implementation=implementation)
        kernel = dense_kernel(change, written, outputs, max(1, x.shape[1]))
        y = _convolved(x, kernel, segments, implementation)
        if self.C_later is None:
            return y, None
        kernel = dense_kernel(change, written, conjugate_parts(_numbers(self.C_later, dtype)), max(1, x.shape[1]))
        return y + _of_later(kernel, x, segments, implementation), None

    def scaled(self, dtype: DTypeLike) -> tuple[Complex[Array, 'd n'], Complex[Array, 'r d n'], Complex[Array, 'd n']]:
        """Eigenvalues, low rank and inputs in units of the step of every channel."""
        step, A, B, _ = self.continuous(dtype)
        P = jnp.stack([_tiled(row, len(step)) for row in _numbers(self.P, dtype)])
        return step * A, jnp.sqrt(step)[None] * P, step * B


class SharedSystem(System):
    """One diagonal system of `state` real states for all channels, in and out: S5, run as a scan.

        h_t = exp(Lambda dt) h_{t-1} + ((exp(Lambda dt) - 1) / Lambda) (B u_t)    y_t = 2 Re C h_t

    The modes are one of each conjugate pair of `blocks` copies of the normal part of LegS; `B` starts as a random
    real map in its basis, of variance one over the states, `C` as one whose real and imaginary parts each have that
    variance; both are truncated, as in the released code. `dt` is one a mode, log-uniform in `[low, high]` at the
    start. Eigenvalues are free, as in the released code, unless it clips them: training may move them to growth.

    Smith et al. 2023, https://arxiv.org/abs/2208.04933. Raises `UserError` unless twice `blocks` divides `state`, and
    for other `outputs` than these.

    Args:
      dim: channels.
      state: real states, two a mode.
      blocks: copies of LegS, of `state / blocks` states each.
      low: the least step at the start.
      high: the greatest.
      outputs: what `C` starts as: 'states', as above; 'map', with a variance of one over states times channels;
        'modes', normal in the modes, of parts with a variance of a half. `trunc_standard_normal`, `lecun_normal` and
        `complex_normal` of the released code.
      greatest: the greatest real part of eigenvalues, such as -1e-4, beyond which they are clipped; `None`: free.
      causal: `False`: a second scan of the same inputs, from the end, is read by outputs of its own.
      rngs: draws the parameters.
    """

    def __init__(
        self,
        dim: int,
        *,
        state: int,
        causal: bool,
        blocks: int = 1,
        low: float = 1e-3,
        high: float = 1e-1,
        outputs: Literal['states', 'map', 'modes'] = 'states',
        greatest: float | None = None,
        rngs: nnx.Rngs,
    ):
        if state % (2 * blocks):
            raise UserError(f'state is {state} with {blocks} blocks; twice the number of blocks must divide it')
        self.state, self.greatest = state, greatest
        basis = hippo.modes('legs', state // blocks)
        count = state // 2
        eigenvalues = np.tile(basis.eigenvalues, blocks)
        # The real basis of a block, as rows of V^*; those of other blocks are zero.
        change = np.kron(np.eye(blocks), basis.vectors.conj().T)

        def inputs(key: jax.Array, shape: Shape[int], dtype: DTypeLike) -> Array:
            drawn = nnx.initializers.lecun_normal()(key, (state, dim), dtype)
            return _stacked(jnp.asarray(change, _complex(dtype)) @ drawn, dtype)

        def read(key: jax.Array, shape: Shape[int], dtype: DTypeLike) -> Array:
            if outputs == 'modes':
                return nnx.initializers.normal(math.sqrt(0.5))(key, shape, dtype)
            apart = {'states': (0,), 'map': ()}[outputs]
            drawn = nnx.initializers.lecun_normal(batch_axis=apart)(key, (dim, state, 2), dtype)
            drawn = jax.lax.complex(drawn[..., 0], drawn[..., 1])
            return _stacked(drawn @ jnp.asarray(change.conj().T, _complex(dtype)), dtype)

        axes = ('state',)
        self.A_real = _fixed(eigenvalues.real, axes, 'dynamics', rngs)
        self.A_imag = _fixed(eigenvalues.imag, axes, 'dynamics', rngs)
        self.B = param(inputs, (count, dim, 2), axes=('state', 'embed', None), group='dynamics', rngs=rngs)
        shape, along = (dim, count, 2), ('embed', 'state', None)
        self.C = param(read, shape, axes=along, group='vector', rngs=rngs)
        self.log_step = _log_step((count,), axes, low, high, rngs)
        self.C_later = None if causal else param(read, shape, axes=along, group='vector', rngs=rngs)

    def __call__(
        self,
        x: Sequence,
        segments: Segments | None,
        state: Float[Array, 'b n'] | None = None,
        *,
        implementation: str | None = None,
    ) -> tuple[Sequence, Float[Array, 'b n'] | None]:
        x = x.astype(wide_dtype(x.dtype))
        real = self.A_real[...].astype(x.dtype)
        real = real if self.greatest is None else jnp.minimum(real, self.greatest)
        A = jax.lax.complex(real, self.A_imag[...].astype(x.dtype))
        step = jnp.exp(self.log_step[...].astype(x.dtype))
        decay = jnp.exp(step * A)
        written = _mapped(x, (decay - 1) / A, self.B)
        h, state = _scanned(written, decay, segments, state, implementation)
        if self.C_later is None:
            return 2 * _read(h, self.C), state
        later = _scanned_back(written, decay, segments, implementation)
        return 2 * (_read(h, self.C) + _read(later, self.C_later)), None

    def init_state(self, batch: int, dtype: DTypeLike) -> Float[Array, 'b n']:
        """Returns zeros, float32 or float64."""
        return jnp.zeros((batch, self.state), wide_dtype(dtype))


class RingSystem(System):
    """One diagonal system of `state` complex modes for all channels, discrete, its eigenvalues in a ring: the LRU.

        h_t = lambda h_{t-1} + gamma (B u_t)    y_t = Re C h_t    lambda = exp(-exp(nu) + i exp(theta))

    `|lambda|` starts uniform by area in `[low, high]`, its angle uniform in `[0, turn]`, and `gamma`, a parameter,
    at `sqrt(1 - |lambda|^2)`, so that white noise keeps its size; `B` and `C` are normal.

    Orvieto et al. 2023, https://arxiv.org/abs/2303.06349. Raises `UserError` unless `0 <= low < high < 1`, and
    for a turn that is not positive.

    Args:
      dim: channels.
      state: complex modes.
      low: the inner radius at the start.
      high: the outer.
      turn: the greatest angle at the start, in radians.
      causal: as of `SharedSystem`.
      rngs: draws the parameters.
    """

    def __init__(
        self,
        dim: int,
        *,
        state: int,
        causal: bool,
        low: float = 0.9,
        high: float = 0.999,
        turn: float = 2 * math.pi,
        rngs: nnx.Rngs,
    ):
        if not 0 <= low < high < 1:
            raise UserError(f'a ring from {low} to {high}; radii must be from 0, in order, and below 1')
        if turn <= 0:
            raise UserError(f'turn of RingSystem is {turn}; it must be above 0')
        self.state = state

        def rate(key: jax.Array, shape: Shape[int], dtype: DTypeLike) -> Array:
            square = jax.random.uniform(key, shape, dtype, minval=max(low, 1e-6) ** 2, maxval=high**2)
            return jnp.log(-jnp.log(square) / 2)

        def angle(key: jax.Array, shape: Shape[int], dtype: DTypeLike) -> Array:
            return jnp.log(turn * jax.random.uniform(key, shape, dtype, minval=1e-6))

        axes, modes = ('state',), (state,)
        self.log_rate = param(rate, modes, axes=axes, group='dynamics', rngs=rngs)
        self.log_angle = param(angle, modes, axes=axes, group='dynamics', rngs=rngs)
        gain = jnp.log(-jnp.expm1(-2 * jnp.exp(self.log_rate[...]))) / 2
        self.log_gain = param(lambda *_: gain, modes, axes=axes, group='dynamics', rngs=rngs)
        spread = nnx.initializers.normal
        B, C = spread(1 / math.sqrt(2 * dim)), spread(1 / math.sqrt(state))
        self.B = param(B, (state, dim, 2), axes=('state', 'embed', None), group='dynamics', rngs=rngs)
        shape, along = (dim, state, 2), ('embed', 'state', None)
        self.C = param(C, shape, axes=along, group='vector', rngs=rngs)
        self.C_later = None if causal else param(C, shape, axes=along, group='vector', rngs=rngs)

    def __call__(
        self,
        x: Sequence,
        segments: Segments | None,
        state: Float[Array, 'b n'] | None = None,
        *,
        implementation: str | None = None,
    ) -> tuple[Sequence, Float[Array, 'b n'] | None]:
        x = x.astype(wide_dtype(x.dtype))
        rate, angle, gain = (
            jnp.exp(each[...].astype(x.dtype)) for each in (self.log_rate, self.log_angle, self.log_gain)
        )
        decay = jnp.exp(jax.lax.complex(-rate, angle))
        written = _mapped(x, gain, self.B)
        h, state = _scanned(written, decay, segments, state, implementation)
        if self.C_later is None:
            return _read(h, self.C), state
        return _read(h, self.C) + _read(_scanned_back(written, decay, segments, implementation), self.C_later), None

    def init_state(self, batch: int, dtype: DTypeLike) -> Float[Array, 'b m']:
        """Returns zeros, float32 or float64."""
        return jnp.zeros((batch, 2 * self.state), wide_dtype(dtype))


def _diagonal(
    system: Discretised,
    x: Sequence,
    segments: Segments | None,
    state: Float[Array, 'b d n'] | None,
    implementation: str | None,
) -> tuple[Sequence, Float[Array, 'b d n'] | None]:
    """A diagonal system as a convolution, or from a state in chunks."""
    log_transition, inputs, outputs = system
    if state is None:
        return _convolved(x, _kernel(system, x), segments, implementation), None

    def chunk(steps: int) -> Chunk:
        return diagonal_chunk(log_transition, inputs, outputs, steps)

    return in_chunks(chunk, x.astype(wide_dtype(x.dtype)), segments, state, implementation=implementation)


def _convolved(
    x: Sequence, kernel: Float[Array, 'w d'], segments: Segments | None, implementation: str | None
) -> Sequence:
    """The convolution in float32 or better, of x in the digits that it has: kernels multiply few of them faster."""
    wide = wide_dtype(x.dtype)
    return cores.long_conv(x, kernel, segments=segments, dtype=wide, implementation=implementation)


def _kernel(system: Discretised, x: Sequence) -> Float[Array, 't d']:
    """The kernel of a diagonal system over as many tokens as the input has."""
    return diagonal_kernel(system.log_transition, system.inputs * system.outputs, max(1, x.shape[1]))


def _of_later(
    kernel: Float[Array, 't d'], x: Sequence, segments: Segments | None, implementation: str | None
) -> Sequence:
    """`y_t = sum_{j>0} K_{j-1} x_{t+j}` within documents: the convolution of the row from its end, a token later."""
    back = None if segments is None else jnp.flip(segments, 1)
    taps = jnp.concatenate([jnp.zeros_like(kernel[:1]), kernel[:-1]])
    return jnp.flip(_convolved(jnp.flip(x, 1), taps, back, implementation), 1)


def _scanned_back(
    written: Complex[Array, 'b t n'], decay: Complex[Array, ' n'], segments: Segments | None, implementation: str | None
) -> Complex[Array, 'b t n']:
    return cores.linear_scan(written, decay, segments=segments, reverse=True, implementation=implementation)[0]


def _scanned(
    written: Complex[Array, 'b t n'],
    decay: Complex[Array, ' n'],
    segments: Segments | None,
    state: Float[Array, 'b m'] | None,
    implementation: str | None,
) -> tuple[Complex[Array, 'b t n'], Float[Array, 'b m'] | None]:
    first = None if state is None else from_parts(state)
    h, last = cores.linear_scan(written, decay, state=first, segments=segments, implementation=implementation)
    return h, None if state is None else parts(last)


def _mapped(x: Sequence, gains: Inexact[Array, ' n'], weights: nnx.Param) -> Complex[Array, 'b t n']:
    """`gains (W x)`, W of complex weights `n d 2`, as one real product."""
    W = gains[:, None] * _numbers(weights, x.dtype)
    return from_parts(jnp.einsum('btd,nd->btn', x, jnp.concatenate([W.real, W.imag]), precision='highest'))


def _read(h: Complex[Array, 'b t n'], weights: nnx.Param) -> Sequence:
    """`Re (C h)`, C of complex weights `d n 2`, as one real product."""
    outputs = conjugate_parts(_numbers(weights, h.real.dtype)) / 2
    return jnp.einsum('btn,dn->btd', parts(h), outputs, precision='highest')


def _tiled(x: Inexact[Array, 's n'], channels: int) -> Inexact[Array, 'd n']:
    """One of the copies for every channel, in turn."""
    return jnp.tile(x, (channels // x.shape[0], 1))


def _eigenvalues(
    found: list[np.ndarray], is_real: bool, drawn: Bool[np.ndarray, 's'], rngs: nnx.Rngs
) -> tuple[nnx.Param, nnx.Param | None]:
    """Parameters of eigenvalues: logarithms of rates of decay, and angular speeds but of real ones.

    Speeds of copies that are `drawn` are exponentials of normal numbers.
    """
    values = np.stack(found)
    axes = (None, 'state')
    rates = _fixed(np.log(np.maximum(-values.real, SLOWEST)), axes, 'dynamics', rngs)

    def speeds(key: jax.Array, shape: Shape[int], dtype: DTypeLike) -> Array:
        random = -jnp.exp(jax.random.normal(key, shape, dtype))
        return jnp.where(drawn[:, None], random, jnp.asarray(values.imag, dtype))

    return rates, None if is_real else param(speeds, values.shape, axes=axes, group='dynamics', rngs=rngs)


def _values(rate: nnx.Param, angle: nnx.Param | None, dtype: DTypeLike) -> Inexact[Array, 's n']:
    """Eigenvalues of parameters as `_eigenvalues` makes them."""
    real = -jnp.exp(rate[...].astype(dtype))
    return real if angle is None else jax.lax.complex(real, angle[...].astype(dtype))


def _numbers(x: nnx.Param, dtype: DTypeLike) -> Inexact[Array, '...']:
    """The numbers of a parameter whose last dimension is their parts, one or two."""
    value = x[...].astype(dtype)
    return value[..., 0] if value.shape[-1] == 1 else jax.lax.complex(value[..., 0], value[..., 1])


def _stacked(x: Inexact[Array, '...'], dtype: DTypeLike) -> Float[Array, '... 2']:
    return jnp.stack([x.real, x.imag], axis=-1).astype(dtype)


def _complex(dtype: DTypeLike) -> DTypeLike:
    return jnp.promote_types(dtype, jnp.complex64)


def _fixed(value: np.ndarray, axes: tuple[str | None, ...], group: str, rngs: nnx.Rngs) -> nnx.Param:
    """A parameter that starts from a value."""
    return param(starting_at(value), value.shape, axes=axes, group=group, rngs=rngs)


def _constant(value: np.ndarray, is_real: bool, axes: tuple[str | None, ...], group: str, rngs: nnx.Rngs) -> nnx.Param:
    """A parameter of real or complex numbers that starts from a value, its parts last."""
    stacked = np.stack([value.real] if is_real else [value.real, value.imag], axis=-1)
    return param(starting_at(stacked), stacked.shape, axes=(*axes, None), group=group, rngs=rngs)


def _normal(shape: tuple[int, ...], is_real: bool, axes: tuple[str | None, ...], rngs: nnx.Rngs) -> nnx.Param:
    """Complex numbers whose parts have a variance of a half, or their real parts."""
    draw = nnx.initializers.normal(math.sqrt(0.5))
    return param(draw, (*shape, 1 if is_real else 2), axes=(*axes, None), group='vector', rngs=rngs)


def _log_step(shape: tuple[int, ...], axes: tuple[Any, ...], low: float, high: float, rngs: nnx.Rngs) -> nnx.Param:
    check_steps(low, high)

    def draw(key: jax.Array, shape: Shape[int], dtype: DTypeLike) -> Array:
        return jnp.log(log_uniform(key, shape, low, high)).astype(dtype)

    return param(draw, shape, axes=axes, group='dynamics', rngs=rngs)
