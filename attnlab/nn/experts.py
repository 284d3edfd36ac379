"""A channel mixer of several networks, of which every token is sent to a few."""

import abc
import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float, Int

from attnlab.context import PADDING
from attnlab.errors import UserError
from attnlab.functional import experts
from attnlab.functional.penalty import penalised
from attnlab.functional.precision import wide_dtype
from attnlab.module import Module
from attnlab.nn.activations import activation as activation_called
from attnlab.nn.core_units import CoreUnit
from attnlab.nn.mlps import GatedMLP
from attnlab.nn.parameter import param
from attnlab.signature import checked_fields
from attnlab.typing import DropoutKey, Segments, Sequence

EPS = 1e-12
"""Below a squared distance, whose root is differentiated."""


class Gate(abc.ABC):
    """How well each expert suits a token; without parameters of its own."""

    def rows(self, experts: int) -> int:
        """The rows of the router's matrix: one an expert, unless a gate says otherwise."""
        return experts

    @abc.abstractmethod
    def scores(self, x: Float[Array, '*n d'], weight: Float[Array, 'r d']) -> Float[Array, '*n e']:
        """A number for every expert, whose normaliser `z_loss` keeps small."""

    @abc.abstractmethod
    def affinities(self, scores: Float[Array, '*n e']) -> Float[Array, '*n e']:
        """Positive numbers in the order of the scores that sum to one over the experts."""

    def drawn(
        self, scores: Float[Array, '*n e'], x: Float[Array, '*n d'], weight: Float[Array, 'r d'], key: DropoutKey
    ) -> Float[Array, '*n e']:
        """The scores of a step of training: as they are, unless a gate draws noise."""
        del x, weight, key
        return scores


@dataclasses.dataclass(frozen=True)
class SoftmaxGate(Gate):
    """`softmax(W x)`. Shazeer et al. 2017, https://arxiv.org/abs/1701.06538."""

    def scores(self, x: Float[Array, '*n d'], weight: Float[Array, 'r d']) -> Float[Array, '*n e']:
        """`W x`."""
        return jnp.einsum('...d,ed->...e', x, weight)

    def affinities(self, scores: Float[Array, '*n e']) -> Float[Array, '*n e']:
        """The softmax."""
        return jax.nn.softmax(scores, axis=-1)


@dataclasses.dataclass(frozen=True)
class NoisyGate(SoftmaxGate):
    """`softmax(W x)`, and in training `softmax(W x + xi softplus(V x))`, `xi` standard normal for every expert.

    How far chance moves the choice is learned: the rows of V follow those of W in the router's matrix. Shazeer et al.
    2017, https://arxiv.org/abs/1701.06538, who start both at zero and balance loads by penalties of their own.
    """

    def rows(self, experts: int) -> int:
        """Two an expert."""
        return 2 * experts

    def scores(self, x: Float[Array, '*n d'], weight: Float[Array, 'r d']) -> Float[Array, '*n e']:
        """`W x`."""
        return super().scores(x, weight[: len(weight) // 2])

    def drawn(
        self, scores: Float[Array, '*n e'], x: Float[Array, '*n d'], weight: Float[Array, 'r d'], key: DropoutKey
    ) -> Float[Array, '*n e']:
        """With noise."""
        spread = jax.nn.softplus(super().scores(x, weight[len(weight) // 2 :]))
        return scores + jax.random.normal(key, scores.shape, scores.dtype) * spread


@checked_fields
@dataclasses.dataclass(frozen=True)
class SmallTemperatureGate(SoftmaxGate):
    """`softmax((W x + xi) / T)` with a small temperature T, `xi` normal in training and zero in evaluation.

    Where one expert has nearly all the weight, little gradient reaches the scores of others; noise of the standard
    deviation `noise`, in the units of the scores, lets them be chosen by chance. After the sparse-noisy softmax of
    Zhang and Ding, https://arxiv.org/abs/2306.06855, whose noise is not known to us: a reconstruction from its
    abstract, as `attnlab.nn.dense_maps.NoisySmallTemperature` is for attention.

    Raises `UserError` for a temperature that is not positive, and a negative noise.
    """

    temperature: float = 0.1
    noise: float = 1.0

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise UserError(f'the temperature of SmallTemperatureGate is {self.temperature}; it must be positive')
        if self.noise < 0:
            raise UserError(f'the noise of SmallTemperatureGate is {self.noise}; it must be at least 0')

    def affinities(self, scores: Float[Array, '*n e']) -> Float[Array, '*n e']:
        """The softmax, sharpened."""
        return jax.nn.softmax(scores / self.temperature, axis=-1)

    def drawn(
        self, scores: Float[Array, '*n e'], x: Float[Array, '*n d'], weight: Float[Array, 'r d'], key: DropoutKey
    ) -> Float[Array, '*n e']:
        """With noise."""
        del x, weight
        return scores + self.noise * jax.random.normal(key, scores.shape, scores.dtype)


@checked_fields
@dataclasses.dataclass(frozen=True)
class TemperedGate(SoftmaxGate):
    """`softmax(f(W x) / T)` with a learned temperature T, the exponential of the first number of the router's last row.

    With f the identity, W and T may grow together and nothing is changed, so that neither can be known from samples; a
    nonlinear f tells them apart. The dense-to-sparse gates of Nguyen, Akbarian and Ho 2024,
    https://arxiv.org/abs/2401.13875.

    Attributes:
      activation: the name of f, one without parameters.

    Raises `UserError` for an unknown name.
    """

    activation: str = 'identity'

    def __post_init__(self) -> None:
        activation_called(self.activation)

    def rows(self, experts: int) -> int:
        """One an expert, and that of the temperature."""
        return experts + 1

    def scores(self, x: Float[Array, '*n d'], weight: Float[Array, 'r d']) -> Float[Array, '*n e']:
        """`f(W x) / T`."""
        found = activation_called(self.activation)(super().scores(x, weight[:-1]))
        return found * jnp.exp(-weight[-1, 0])


@dataclasses.dataclass(frozen=True)
class SigmoidGate(SoftmaxGate):
    """`sigmoid(W x)` over its sum. DeepSeek-AI 2024, https://arxiv.org/abs/2412.19437, without its balancing bias."""

    def affinities(self, scores: Float[Array, '*n e']) -> Float[Array, '*n e']:
        """From logarithms, since all sigmoids may underflow."""
        return jax.nn.softmax(jax.nn.log_sigmoid(scores), axis=-1)


@dataclasses.dataclass(frozen=True)
class LaplaceGate(Gate):
    """`softmax(-|x - a_e|)` for the rows `a_e` of W: one level of Nguyen et al. 2024, https://arxiv.org/abs/2410.02935."""

    def scores(self, x: Float[Array, '*n d'], weight: Float[Array, 'r d']) -> Float[Array, '*n e']:
        """Minus the distances."""
        apart = x[..., None, :] - weight.reshape(*[1] * (x.ndim - 1), *weight.shape)
        return -jnp.sqrt(jnp.sum(jnp.square(apart), axis=-1) + EPS)

    def affinities(self, scores: Float[Array, '*n e']) -> Float[Array, '*n e']:
        """The softmax."""
        return jax.nn.softmax(scores, axis=-1)


@checked_fields
@dataclasses.dataclass(frozen=True)
class HierarchicalGate(Gate):
    """`p(g | x) p(e | g, x)` of expert e in group g, each factor by a gate of its own.

    The router's first rows are those of the groups, the others those of the experts, group by group.
    Nguyen et al. 2024, https://arxiv.org/abs/2410.02935, whose outer and inner gates are softmax or Laplace.

    Attributes:
      groups: how many groups there are.
      outer: the gate of groups, whose normaliser `z_loss` keeps small.
      inner: the gate of the experts of a group.

    Raises `UserError` for a gate of another kind.
    """

    groups: int = 2
    outer: Gate = SoftmaxGate()
    inner: Gate = LaplaceGate()

    def __post_init__(self) -> None:
        for name, gate in (('outer', self.outer), ('inner', self.inner)):
            if type(gate) not in (SoftmaxGate, LaplaceGate):
                raise UserError(f'{name} of HierarchicalGate is {gate}; it must be SoftmaxGate or LaplaceGate')

    def rows(self, experts: int) -> int:
        """One a group and one an expert. Raises `UserError` for groups that would not be of equal size."""
        if self.groups < 1 or experts % self.groups:
            raise UserError(f'groups is {self.groups}; it must divide experts, which is {experts}')
        return self.groups + experts

    def scores(self, x: Float[Array, '*n d'], weight: Float[Array, 'r d']) -> Float[Array, '*n e']:
        """The group's score plus the logarithm of the expert's share of it: their softmax is the product."""
        outer = self.outer.scores(x, weight[: self.groups])
        scores = self.inner.scores(x, weight[self.groups :])
        inner = scores.reshape(*x.shape[:-1], self.groups, scores.shape[-1] // self.groups)
        return (outer[..., None] + jax.nn.log_softmax(inner, axis=-1)).reshape(scores.shape)

    def affinities(self, scores: Float[Array, '*n e']) -> Float[Array, '*n e']:
        """The softmax."""
        return jax.nn.softmax(scores, axis=-1)


class Routing(NamedTuple):
    """Where tokens go.

    Attributes:
      experts: of every token, the best first.
      weights: of their outputs; 0 for one that has no room.
      kept: which of them have room.
      load: how many tokens were sent to each expert, those without room too.
      dropped: how many of them had no room.
      penalty: of the router, a sum over tokens that are no padding.
    """

    experts: Int[Array, '*n k']
    weights: Float[Array, '*n k']
    kept: Bool[Array, '*n k']
    load: Int[Array, ' e']
    dropped: Int[Array, '']
    penalty: Float[Array, '']


class MixtureOfExperts(Module):
    """`y = sum_{e in top k} w_e f_e(x)`, `f_e` a gated network of its own: `(f(x W_g) * (x W_u)) W_d`.

    `w` are the gate's affinities of the k best, over their sum where k is more than 1 (over all experts, where it
    is 1, so that the gate learns). Equal affinities are taken in the order of the experts. The router computes in
    float32. Training adds the gradients of `balance E sum_e share_e mean(p_e)`, with `share` the part of the choices
    that fell on e, and of `z_loss (log sum exp(scores))^2`, both as means over tokens that are no padding.
    With a `capacity` an expert takes `ceil(capacity k n / E)` of the n tokens of a batch, first choices first and then
    in their order; what has no room adds nothing, and is counted by `routing`. Then tokens depend on others of
    their batch, and rows cannot be told apart. Shares and room are those of a part where a step takes its batch in
    parts (`config.accumulate`). Nothing of a choice is kept between calls: in streaming the n tokens are those of a
    step, so that one token of one row always has room, and decoding is that of a model without a capacity, after a
    prompt that is read with one.
    Fedus, Zoph and Shazeer 2022, https://arxiv.org/abs/2101.03961; Zoph et al. 2022, https://arxiv.org/abs/2202.08906.

    Args:
      dim: model width.
      experts: their number.
      active: the number k of experts of a token.
      hidden: hidden width of an expert; `None`: that of `GatedMLP` over k, rounded up to a multiple of 64.
      shared: the number of experts that every token is sent to besides; `None`: none.
      gate: a `Gate`.
      capacity: see above; `None`: every token has room.
      balance: weight of the penalty of uneven loads.
      z_loss: weight of the penalty of large scores.
      activation: the nonlinearity f, one without parameters.

    Raises `UserError` for more active experts than there are, a capacity that is not positive, and negative weights.
    """

    routes = True

    def __init__(
        self,
        dim: int,
        *,
        experts: int = 8,
        active: int = 2,
        hidden: int | None = None,
        shared: int | None = None,
        gate: Gate = SoftmaxGate(),
        capacity: float | None = None,
        balance: float = 1e-2,
        z_loss: float = 1e-3,
        activation: str | CoreUnit = 'silu',
        rngs: nnx.Rngs,
    ):
        activation_called(activation)
        if active > experts:
            raise UserError(f'active is {active}; it must be at most experts, which is {experts}')
        if capacity is not None and capacity <= 0:
            raise UserError(f'capacity is {capacity}; it must be positive, or None for room for all')
        for name, value in (('balance', balance), ('z_loss', z_loss)):
            if value < 0:
                raise UserError(f'{name} is {value}; it must be at least 0')
        hidden = 64 * -(-8 * dim // (3 * 64 * active)) if hidden is None else hidden
        self.experts, self.active, self.gate, self.capacity = experts, active, gate, capacity
        self.balance, self.z_loss, self.activation = balance, z_loss, activation
        start = nnx.initializers.variance_scaling(1.0, 'fan_in', 'normal', batch_axis=(0,))
        self.router = param(
            nnx.initializers.normal(dim**-0.5),
            (gate.rows(experts), dim),
            axes=(None, 'embed'),
            group='vector',
            rngs=rngs,
        )
        up, down = ('experts', 'embed', 'mlp'), ('experts', 'mlp', 'embed')
        self.gates = param(start, (experts, dim, hidden), axes=up, rngs=rngs)
        self.up = param(start, (experts, dim, hidden), axes=up, rngs=rngs)
        self.down = param(start, (experts, hidden, dim), axes=down, rngs=rngs)
        self.shared = (
            None if shared is None else GatedMLP(dim, hidden=shared * hidden, activation=activation, rngs=rngs)
        )

    @property
    def limited(self) -> bool:
        """Whether several tokens that are read at once may leave one of them without room."""
        # A token chooses an expert once, so that room for all tokens is room for all choices.
        return self.capacity is not None and self.capacity * self.active < self.experts

    def __call__(
        self,
        x: Sequence,
        key: DropoutKey | None = None,
        labels: Float[Array, ''] | None = None,
        segments: Segments | None = None,
        *,
        trains: bool = True,
    ) -> Sequence:
        """The mixture; a gate that draws noise in training draws it from `key`, and none without one.

        `labels` and `segments` are those of the context, which the penalty of the router needs
        (`attnlab.functional.penalty`); it is that of training, of which nothing else that is differentiated has any.
        """
        real = None if segments is None else segments != PADDING
        routing = self.routing(x, key, real)
        networks = (self.gates[...].astype(x.dtype), self.up[...].astype(x.dtype), self.down[...].astype(x.dtype))
        activation = activation_called(self.activation)
        y = experts.mixed(x, routing.experts, routing.weights, routing.kept, networks, activation=activation)
        y = y if self.shared is None else y + self.shared(x)
        if not trains:
            return y
        return penalised(y, routing.penalty, x[..., 0].size if real is None else jnp.sum(real), labels)

    def routing(
        self, x: Float[Array, '*n d'], key: DropoutKey | None = None, real: Bool[Array, '*n'] | None = None
    ) -> Routing:
        """Where the tokens go, and how many found no room; `key` as in a call, `real` those that are no padding."""
        self.check_width(x, self.router.shape[1])
        wide = x.astype(wide_dtype(x.dtype))
        with jax.default_matmul_precision('highest'):
            weight = self.router[...].astype(wide.dtype)
            scores = self.gate.scores(wide, weight)
            if key is not None:
                scores = self.gate.drawn(scores, wide, weight, key)
        affinities = self.gate.affinities(scores)
        real = jnp.ones_like(scores[..., 0], jnp.bool_) if real is None else real
        # Of scores, whose order is that of affinities where these are not all zero. Not `top_k`, for which XLA gathers
        # the rows of all devices.
        chosen = jnp.argsort(scores, axis=-1, stable=True, descending=True)[..., : self.active]
        weights = jnp.take_along_axis(affinities, chosen, axis=-1)
        if self.active > 1:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        load = jnp.sum(jax.nn.one_hot(chosen, self.experts, dtype=jnp.int32), axis=tuple(range(chosen.ndim)))
        kept = self._kept(chosen, load)
        return Routing(
            chosen,
            jnp.where(kept, weights, 0),
            kept,
            load,
            jnp.sum(~kept, dtype=jnp.int32),
            self._penalty(scores, affinities, chosen, real),
        )

    def _kept(self, chosen: Int[Array, '*n k'], load: Int[Array, ' e']) -> Bool[Array, '*n k']:
        """Which choices have room: of an expert the first in the order of choices, then of tokens."""
        if self.capacity is None:
            return jnp.ones_like(chosen, jnp.bool_)
        room = math.ceil(self.capacity * chosen.size / self.experts)
        flat = chosen.reshape(-1, self.active)
        order = experts.by_expert(flat)
        # Sorted by expert, a choice's place less that of the expert's first one is its place in the queue.
        queue = jnp.arange(order.size) - (jnp.cumsum(load) - load)[flat.T.reshape(-1)[order]]
        return experts.back(queue < room, order, flat.shape).reshape(chosen.shape)

    def _penalty(
        self,
        scores: Float[Array, '*n e'],
        affinities: Float[Array, '*n e'],
        chosen: Int[Array, '*n k'],
        real: Bool[Array, '*n'],
    ) -> Float[Array, '']:
        """Sums over real tokens of both penalties."""
        tokens = tuple(range(real.ndim))
        sent = jnp.sum(jax.nn.one_hot(chosen, self.experts, dtype=scores.dtype), axis=-2)
        share = jnp.sum(sent, axis=tokens, where=real[..., None]) / (jnp.maximum(jnp.sum(real), 1) * self.active)
        uneven = self.experts * jnp.sum(share * jnp.sum(affinities, axis=tokens, where=real[..., None]))
        large = jnp.sum(jnp.square(jax.nn.logsumexp(scores, axis=-1)), where=real)
        return self.balance * uneven + self.z_loss * large
