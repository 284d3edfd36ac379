"""Fast weights: the losses that a linear memory is trained on while it reads, and how gradients change it.

A memory `W` maps keys to what they stand for, `z = W^T k`. Gradients of a mini-batch of tokens are all taken at the
weights before it. What is carried along of the gradients, such as their sum, is called the memory's momentum.
"""

import abc
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float, Int

from attnlab.errors import UserError
from attnlab.functional.precision import wide_dtype
from attnlab.module import Module
from attnlab.nn.initialization import logit
from attnlab.nn.norms import GroupNorm
from attnlab.nn.parameter import param
from attnlab.nn.projections import Linear
from attnlab.typing import Heads, Keys, Queries, Sequence, Values

Weights = Float[Array, 'b h m v']


class Memory(NamedTuple):
    """The weights of a memory before its mini-batch, after the latest token, and their momentum."""

    start: Weights
    weights: Weights
    momentum: Weights


class Plan(NamedTuple):
    """How a mini-batch changes weights and momentum, linear in its gradients `D_j`; see `Descent.plan`.

    Attributes:
      kept: of the weights before the mini-batch, in those after token i.
      added: of the momentum before it, in those weights; `None` where none is carried into a mini-batch.
      steps: of `-D_j`, j up to i, in those weights.
      momentum_kept: of the momentum before it, in that after the last token.
      momentum_steps: of `-D_j` in that.
    """

    kept: Float[Array, 'b c h']
    added: Float[Array, 'b c h'] | None
    steps: Float[Array, 'b h c c']
    momentum_kept: Float[Array, 'b h'] | None = None
    momentum_steps: Float[Array, 'b c h'] | None = None


class InnerLoss(Module):
    """The loss that the memory is trained on, and how its output is read; made as `loss(channels, heads=, rngs=)`."""

    @abc.abstractmethod
    def __call__(self, z: Heads, k: Keys, v: Values) -> Float[Array, 'b t h']:
        """Returns the loss of every token's `z = W^T k`."""

    @abc.abstractmethod
    def read(self, z: Heads, q: Queries) -> Heads:
        """Returns what the memory gives to queries, from `z = W^T q`."""

    def gradient(self, z: Heads, k: Keys, v: Values) -> Heads:
        """Returns the gradient of the loss with respect to `z`; that with respect to `W` is `k` times it."""
        return jax.grad(lambda z: jnp.sum(self(z, k, v)))(z)


class SquaredError(InnerLoss):
    """`|z - v|^2`; reads are `z`. Behrouz, Zhong and Mirrokni 2024, https://arxiv.org/abs/2501.00663."""

    def __init__(self, channels: int, *, heads: int, rngs: nnx.Rngs):
        del channels, heads, rngs

    def __call__(self, z: Heads, k: Keys, v: Values) -> Float[Array, 'b t h']:
        return jnp.sum(jnp.square(z - v), axis=-1)

    def read(self, z: Heads, q: Queries) -> Heads:
        return z


class NormedResidual(InnerLoss):
    """`|k + norm(z) - v|^2 / 2` with a learned norm of every head; reads are `q + norm(z)`.

    Sun et al. 2024, https://arxiv.org/abs/2407.04620.
    """

    def __init__(self, channels: int, *, heads: int, eps: float = 1e-6, rngs: nnx.Rngs):
        self.norm = GroupNorm(channels, heads=heads, eps=eps, rngs=rngs)

    def __call__(self, z: Heads, k: Keys, v: Values) -> Float[Array, 'b t h']:
        return jnp.sum(jnp.square(k + self.norm(z) - v), axis=-1) / 2

    def read(self, z: Heads, q: Queries) -> Heads:
        return q + self.norm(z)


class Descent(Module):
    """How gradients change a memory, made as `descent(dim, heads=, channels=, chunk=, rngs=)`.

    `chunk` is the number of tokens of a mini-batch. `advance` is the definition, token by token, and `plan` the same
    for a whole mini-batch.
    """

    @abc.abstractmethod
    def rates(self, x: Sequence, place: Int[Array, 'b t']) -> Any:
        """Returns arrays `b t h`, in float32 or better, from the input and the places in their mini-batches, from 0."""

    @abc.abstractmethod
    def advance(self, memory: Memory, gradient: Weights, rates: Any, first: Bool[Array, 'b 1 1 1']) -> Memory:
        """Returns the memory after a token with rates `b h 1 1`, the `first` of its mini-batch or not."""

    @abc.abstractmethod
    def plan(self, rates: Any) -> Plan:
        """Returns the plan of a whole mini-batch with rates `b c h`."""


class AverageRates(NamedTuple):
    """Steps, and the factors of their sums."""

    step: Array
    factor: Array


class AverageDescent(Descent):
    """Weights less an average of the mini-batch's gradients so far, `W_i = W_0 - u_i sum_(j <= i) s_j D_j`.

    `s = rate sigmoid(x W + c) / channels`, one a head, and `u_i = max(0, 1 / i + d_i)` for the place i in the
    mini-batch, from 1, `d` learned and zero at the start. Sun et al. 2024, https://arxiv.org/abs/2407.04620.
    Raises `UserError` for a `rate` that is not positive.
    """

    def __init__(self, dim: int, *, heads: int, channels: int, chunk: int, rate: float = 1.0, rngs: nnx.Rngs):
        if rate <= 0:
            raise UserError(f'rate of AverageDescent is {rate}; it must be positive, to descend')
        self.rate = rate / channels
        self.step = Linear(dim, heads, bias=True, rngs=rngs)
        self.offsets = param(nnx.initializers.zeros, (chunk,), axes=(None,), group='dynamics', rngs=rngs)

    def rates(self, x: Sequence, place: Int[Array, 'b t']) -> AverageRates:
        wide = wide_dtype(x.dtype)
        step = self.rate * jax.nn.sigmoid(self.step(x).astype(wide))
        offsets = self.offsets[...].astype(wide)
        factors = jnp.maximum(1 / jnp.arange(1, len(offsets) + 1, dtype=wide) + offsets, 0)
        return AverageRates(step, jnp.broadcast_to(factors[place][..., None], step.shape))

    def advance(self, memory: Memory, gradient: Weights, rates: AverageRates, first: Bool[Array, 'b 1 1 1']) -> Memory:
        total = jnp.where(first, jnp.zeros_like(memory.momentum), memory.momentum) - rates.step * gradient
        return Memory(memory.start, memory.start + rates.factor * total, total)

    def plan(self, rates: AverageRates) -> Plan:
        step, factor = (jnp.moveaxis(each, -1, 1) for each in rates)
        steps = jnp.tril(factor[..., :, None] * step[..., None, :])
        return Plan(kept=jnp.ones_like(rates.step), added=None, steps=steps)


class MomentumRates(NamedTuple):
    """Steps, and the logarithms of what is kept of momentum and of weights."""

    step: Array
    log_momentum: Array
    log_kept: Array


class MomentumDescent(Descent):
    """Momentum and forgetting, `S_t = m_t S_{t-1} - s_t D_t`, `W_t = (1 - f_t) W_{t-1} + S_t`.

    `m` and `f` are logistic functions of `x W + c`, one a head, which start near `momentum` and `forget`;
    `s = (1 - m) sigmoid(x W) / chunk`, so that the steps of a mini-batch add up to at most one gradient: all of them
    are taken at the same weights. Of `SquaredError`, and a key of length one that repeats, half a gradient is the value
    itself, one the error with its sign turned, and more would make it grow.
    Raises `UserError` for a `momentum` or `forget` that is not between 0 and 1.
    Behrouz, Zhong and Mirrokni 2024, https://arxiv.org/abs/2501.00663.
    """

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        channels: int,
        chunk: int,
        momentum: float = 0.5,
        forget: float = 0.01,
        rngs: nnx.Rngs,
    ):
        del channels
        self.chunk = chunk
        self.step, self.momentum, self.forget = (Linear(dim, heads, rngs=rngs) for _ in range(3))
        self.momentum_bias, self.forget_bias = (
            param(logit(f'{name} of MomentumDescent', start), (heads,), axes=('heads',), group='dynamics', rngs=rngs)
            for name, start in (('momentum', momentum), ('forget', forget))
        )

    def rates(self, x: Sequence, place: Int[Array, 'b t']) -> MomentumRates:
        wide = wide_dtype(x.dtype)
        momentum, forget = (
            linear(x).astype(wide) + bias[...].astype(wide)[None, None]
            for linear, bias in ((self.momentum, self.momentum_bias), (self.forget, self.forget_bias))
        )
        step = jax.nn.sigmoid(-momentum) * jax.nn.sigmoid(self.step(x).astype(wide)) / self.chunk
        return MomentumRates(step, jax.nn.log_sigmoid(momentum), jax.nn.log_sigmoid(-forget))

    def advance(self, memory: Memory, gradient: Weights, rates: MomentumRates, first: Bool[Array, 'b 1 1 1']) -> Memory:
        momentum = jnp.exp(rates.log_momentum) * memory.momentum - rates.step * gradient
        return Memory(memory.start, jnp.exp(rates.log_kept) * memory.weights + momentum, momentum)

    def plan(self, rates: MomentumRates) -> Plan:
        momentum, kept = (jnp.cumsum(each, axis=1) for each in (rates.log_momentum, rates.log_kept))
        # From each token's momentum to the weights after token i, and from its gradient to the momentum after it.
        to_weights, to_momentum = _between(kept), _between(momentum) * jnp.moveaxis(rates.step, -1, 1)[..., None, :]
        return Plan(
            kept=jnp.exp(kept),
            added=jnp.einsum('bhcj,bjh->bch', to_weights, jnp.exp(momentum), precision='highest'),
            steps=jnp.matmul(to_weights, to_momentum, precision='highest'),
            momentum_kept=jnp.exp(momentum[:, -1]),
            momentum_steps=jnp.moveaxis(to_momentum[:, :, -1], 1, -1),
        )


def _between(logs: Float[Array, 'b c h']) -> Float[Array, 'b h c c']:
    """Products of factors after j up to i, from the cumulative sums of their logarithms; zero for later j."""
    logs = jnp.moveaxis(logs, -1, 1)
    differences = logs[..., :, None] - logs[..., None, :]
    lower = jnp.tril(jnp.ones(differences.shape[-2:], bool))[None, None]
    return jnp.exp(jnp.where(lower, differences, -jnp.inf))
