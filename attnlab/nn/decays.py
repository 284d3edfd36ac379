"""Decays: how fast a memory forgets, as natural logarithms of at most zero."""

import math
from collections.abc import Sequence as Shape

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from attnlab.errors import UserError
from attnlab.functional.precision import wide_dtype
from attnlab.functional.recomputed import recomputed, recomputed_method
from attnlab.module import Module
from attnlab.nn.heads import by_head, head_channels
from attnlab.nn.parameter import check_steps, inverse_softplus, log_uniform, param
from attnlab.nn.positions import Alibi
from attnlab.nn.projections import Linear
from attnlab.typing import Sequence


class RetentionDecay(Module):
    """A fixed decay for every head: `log(1 - 2^(-5 - h))`, `h` from 0, the same at every token.

    Sun et al. 2023, https://arxiv.org/abs/2307.08621.
    """

    def __init__(self, dim: int, *, heads: int, key_dim: int, rngs: nnx.Rngs):
        del dim, key_dim, rngs
        self.heads = heads

    def __call__(self, x: Sequence) -> Float[Array, 'h']:
        return jnp.log1p(-jnp.exp2(-5.0 - jnp.arange(self.heads, dtype=wide_dtype(x.dtype))))


class SlopeDecay(Module):
    """A fixed decay for every head, `-s_h (1 - depth + 1e-5)`, with the slopes `s` of ALiBi, the same at every token.

    `depth` is that of the layer, from 0 for the first to 1 for the last, which hardly forgets.
    Qin et al. 2023, https://arxiv.org/abs/2307.14995. Raises `UserError` for a `depth` out of range.
    """

    def __init__(self, dim: int, *, heads: int, key_dim: int, depth: float = 0.0, rngs: nnx.Rngs):
        del dim, key_dim, rngs
        if not 0 <= depth <= 1:
            raise UserError(f'the depth of SlopeDecay is {depth}; it must be from 0, the first layer, to 1, the last')
        self.heads, self.depth = heads, depth

    def __call__(self, x: Sequence) -> Float[Array, 'h']:
        return -jnp.asarray(Alibi().slopes(self.heads) * (1 - self.depth + 1e-5), wide_dtype(x.dtype))


class LowRankDecay(Module):
    """A decay for every key channel, computed from the input: `logsigmoid(x W_1 W_2 + c) / temperature`.

    `W_1` has `rank` columns, a bottleneck; the temperature keeps the decays near one. The result is float32 or wider.
    Raises `UserError` for a temperature that is not positive. Yang et al. 2024, https://arxiv.org/abs/2312.06635.
    """

    def __init__(
        self, dim: int, *, heads: int, key_dim: int, rank: int = 16, temperature: float = 16.0, rngs: nnx.Rngs
    ):
        if temperature <= 0:
            raise UserError(f'temperature of LowRankDecay is {temperature}; it must be positive')
        self.heads = heads
        self.temperature = temperature
        self.down = Linear(dim, rank, axes=('embed', None), rngs=rngs)
        self.up = Linear(rank, heads * key_dim, bias=True, axes=(None, 'heads'), rngs=rngs)

    def __call__(self, x: Sequence) -> Float[Array, 'b t h k']:
        return by_head(fading(self.up(self.down(x)), self.temperature), self.heads)


class ChannelDecay(Module):
    """A decay for every key channel, or every slot, `logsigmoid(x W) / temperature`, in float32 or better.

    The decay that `gsa` computes itself, as a part, for `gates.decay=` of `raven`: Zhang et al. 2024,
    https://arxiv.org/abs/2409.07146. Raises `UserError` for a temperature that is not positive.
    """

    def __init__(self, dim: int, *, heads: int, key_dim: int, temperature: float = 8.0, rngs: nnx.Rngs):
        if temperature <= 0:
            raise UserError(f'temperature of ChannelDecay is {temperature}; it must be positive')
        self.heads, self.temperature = heads, temperature
        self.linear = Linear(dim, heads * key_dim, rngs=rngs)

    def __call__(self, x: Sequence) -> Float[Array, 'b t h k']:
        return by_head(fading(self.linear(x), self.temperature), self.heads)


def fading(logits: Float[Array, '*b f'], temperature: float) -> Float[Array, '*b f']:
    """Decays `log sigmoid(logits) / temperature`, in float32 or better."""
    return recomputed(lambda z: jax.nn.log_sigmoid(z.astype(wide_dtype(z.dtype))) / temperature)(logits)


class StepSize(Module):
    """The positive step of a discretised recurrence, `softplus(x + c)`, in float32 or better.

    At the start `softplus(c)` is log-uniform in `[low, high]`, so that time scales span that range.
    Gu and Dao 2023, https://arxiv.org/abs/2312.00752. Raises `UserError` unless `0 < low <= high`.
    """

    def __init__(self, dim: int, *, low: float = 1e-3, high: float = 1e-1, rngs: nnx.Rngs):
        check_steps(low, high)

        def bias(key: jax.Array, shape: Shape[int], dtype: DTypeLike) -> Array:
            return inverse_softplus(log_uniform(key, shape, low, high)).astype(dtype)

        self.bias = param(bias, (dim,), axes=('heads',), group='dynamics', rngs=rngs)

    @recomputed_method
    def __call__(self, x: Float[Array, 'b t d']) -> Float[Array, 'b t d']:
        return jax.nn.softplus(self.shifted(x))

    def shifted(self, x: Float[Array, 'b t d']) -> Float[Array, 'b t d']:
        """What the step is the softplus of, `x + c`."""
        wide = x.astype(wide_dtype(x.dtype))
        return wide + jnp.broadcast_to(self.bias[...].astype(wide.dtype), x.shape)


class StepDecay(Module):
    """Mamba-2's decay, one a head: `-exp(A_log) softplus(x W + c)`, in float32 or better.

    `exp(A_log)` starts uniform in `[0, 16]`, `softplus(c)` as in `StepSize`.
    Dao and Gu 2024, https://arxiv.org/abs/2405.21060; Yang et al. 2025, https://arxiv.org/abs/2412.06464.
    """

    def __init__(self, dim: int, *, heads: int, key_dim: int, rngs: nnx.Rngs):
        del key_dim
        self.linear = Linear(dim, heads, rngs=rngs)
        self.step_size = StepSize(heads, rngs=rngs)
        self.A_log = log_rates(heads, 0.0, rngs)

    def __call__(self, x: Sequence) -> Float[Array, 'b t h']:
        step = self.step_size(self.linear(x))
        return -jnp.exp(self.A_log[...].astype(step.dtype))[None, None] * step


class LowRankStepDecay(Module):
    """A decay for every key channel, computed through a bottleneck: `-exp(A_log_h) softplus(x W_1 W_2 + c)`.

    In float32 or better. `W_1` has as many columns as a key has channels; `A_log` is one number a head, its exponential
    uniform in `[1, 16]` at the start; `c` is one a channel, as in `StepSize`.
    Kimi Team 2025, https://arxiv.org/abs/2510.26692.

    With a `floor` the logarithm stays above it, `floor sigmoid(exp(A_log_h) (x W_1 W_2 + c))`, and `A_log` starts at 0:
    the safe gate of flash-linear-attention, https://github.com/fla-org/flash-linear-attention, whose floor is -5.
    Raises `UserError` for a `floor` that is not below 0.
    """

    def __init__(self, dim: int, *, heads: int, key_dim: int, floor: float | None = None, rngs: nnx.Rngs):
        if floor is not None and not -math.inf < floor < 0:
            raise UserError(f'the floor of LowRankStepDecay is {floor}; it must be None or below 0, such as -5.0')
        self.floor = floor
        self.down = Linear(dim, key_dim, axes=('embed', None), rngs=rngs)
        self.up = Linear(key_dim, heads * key_dim, axes=(None, 'heads'), rngs=rngs)
        self.step_size = StepSize(heads * key_dim, rngs=rngs)
        if floor is None:
            self.A_log = log_rates(heads, 1.0, rngs)
        else:
            self.A_log = param(nnx.initializers.zeros, (heads,), axes=('heads',), group='dynamics', rngs=rngs)

    def __call__(self, x: Sequence) -> Float[Array, 'b t h k']:
        return self._fading(self.up(self.down(x)))

    @recomputed_method
    def _fading(self, x: Float[Array, 'b t f']) -> Float[Array, 'b t h k']:
        rate = jnp.exp(self.A_log[...].astype(wide_dtype(x.dtype)))[None, None, :, None]
        if self.floor is None:
            return -rate * by_head(self.step_size(x), rate.shape[2])
        return self.floor * jax.nn.sigmoid(rate * by_head(self.step_size.shifted(x), rate.shape[2]))


def log_rates(heads: int, low: float, rngs: nnx.Rngs) -> nnx.Param:
    """The logarithms, finite, of numbers that start uniform in `[low, 16]`."""

    def log_of_uniform(key: jax.Array, shape: Shape[int], dtype: DTypeLike) -> Array:
        return jnp.log(jnp.maximum(jax.random.uniform(key, shape, dtype, low, 16.0), jnp.finfo(dtype).tiny))

    return param(log_of_uniform, (heads,), axes=('heads',), group='dynamics', rngs=rngs)


def log_states(key: jax.Array, shape: Shape[int], dtype: DTypeLike) -> Array:
    """The logarithms of 1 to `n` in every channel, the real part of S4D."""
    del key
    return jnp.broadcast_to(jnp.log(jnp.arange(1, shape[1] + 1, dtype=dtype))[None], tuple(shape))


class ForgetGate(Module):
    """The logarithm of a forget gate for every head, `log sigmoid(x W + c)`, in float32 or better.

    `c` starts at 0, hence the gate near a half. Lin et al. 2025, https://arxiv.org/abs/2503.02130.
    """

    def __init__(self, dim: int, *, heads: int, key_dim: int | None = None, rngs: nnx.Rngs):
        del key_dim
        self.linear = Linear(dim, heads, bias=True, rngs=rngs)

    def __call__(self, x: Sequence) -> Float[Array, 'b t h']:
        return jax.nn.log_sigmoid(self.linear(x).astype(wide_dtype(x.dtype)))


class ScaledForgetGate(ForgetGate):
    """`ForgetGate` divided by the root of `dim / heads`, as the scores that it is added to are, in float32 or better.

    So PaTH has it in its released code: Yang et al. 2025, https://arxiv.org/abs/2505.16381. Raises `UserError` for
    heads that do not divide the width.
    """

    def __init__(self, dim: int, *, heads: int, key_dim: int | None = None, rngs: nnx.Rngs):
        super().__init__(dim, heads=heads, key_dim=key_dim, rngs=rngs)
        self.scale = head_channels(dim, heads) ** -0.5

    def __call__(self, x: Sequence) -> Float[Array, 'b t h']:
        return self.scale * super().__call__(x)
