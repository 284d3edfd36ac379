"""Maps that normalise something other than exponentials."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from pallas_kernels.attention.maps import softmax
from pallas_kernels.attention.maps.base import Block, Statistics, WeightMap


@dataclasses.dataclass(frozen=True)
class Ratio(WeightMap):
    """`w_j = f(s_j) / sum_l f(s_l)` of a positive function."""

    statistics: ClassVar[tuple[str, ...]] = ('inverse denominator',)
    # Below every value, but large enough to divide by.
    start: ClassVar[float] = 1e-30
    merges: ClassVar[bool] = True

    @abc.abstractmethod
    def function(self, scores: jax.Array) -> jax.Array:
        """`f`."""

    @abc.abstractmethod
    def slope(self, scores: jax.Array) -> jax.Array:
        """The derivative of `f`."""

    def weights(self, scores: jax.Array, visible: jax.Array) -> jax.Array:
        values = jnp.where(visible, self.function(scores), 0)
        total = jnp.sum(values, axis=-1, keepdims=True)
        return values / jnp.where(total == 0, 1, total)

    def pivot(self, block: Block) -> jax.Array:
        return jnp.where(block.visible, self.function(block.scores), self.start)

    def rescale(self, old: jax.Array, new: jax.Array) -> jax.Array:
        return old / new

    def block(self, block: Block, pivot: jax.Array) -> tuple[jax.Array, jax.Array]:
        numerators = jnp.where(block.visible, self.function(block.scores) * (1 / pivot), 0)
        return numerators, numerators

    def finish(self, pivot: jax.Array, denominator: jax.Array) -> tuple[jax.Array, Statistics]:
        empty = denominator == 0
        normalizer = jnp.where(empty, 1, denominator)
        return normalizer, (jnp.where(empty, 0, 1 / jnp.where(empty, 1, pivot * normalizer)),)

    def resume(self, statistics: Statistics) -> tuple[jax.Array, jax.Array]:
        # The pivot itself is not kept; the whole sum takes its place, of which the denominator is one.
        empty = statistics[0] == 0
        return jnp.where(empty, self.start, 1 / jnp.where(empty, 1, statistics[0])), jnp.where(empty, 0.0, 1.0)

    def recompute(self, block: Block, statistics: Statistics) -> jax.Array:
        return jnp.where(block.visible, self.function(block.scores) * statistics[0], 0)

    def score_gradient(
        self,
        block: Block,
        weights: jax.Array,
        statistics: Statistics,
        dweights: jax.Array,
        delta: jax.Array,
        companion_delta: Any,
    ) -> jax.Array:
        return jnp.where(block.visible, self.slope(block.scores) * (statistics[0] * (dweights - delta)), 0)


@dataclasses.dataclass(frozen=True)
class StableMax(Ratio):
    """`f(s) = 1 + s` for positive scores, `1 / (1 - s)` for negative ones (Prieto et al., 2025, arXiv 2501.04697)."""

    def function(self, scores: jax.Array) -> jax.Array:
        # One of the two terms is one, or zero.
        return 1 / (1 - jnp.minimum(scores, 0)) + jnp.maximum(scores, 0)

    def highest(self, block: Block, largest: Callable[[jax.Array], jax.Array]) -> jax.Array:
        # It grows with the scores, so that one value a row is enough.
        return jnp.maximum(self.function(softmax.highest(block, largest)), self.start)

    def slope(self, scores: jax.Array) -> jax.Array:
        inverse = 1 / (1 - jnp.minimum(scores, 0))
        return inverse * inverse


@dataclasses.dataclass(frozen=True)
class TaylorSoftmax(Ratio):
    """`f(s) = 1 + s + s^2 / 2`, the exponential series to order 2 (de Brebisson and Vincent, 2015, arXiv 1511.05042).

    Its minimum is at `s = -1`.
    """

    def function(self, scores: jax.Array) -> jax.Array:
        return 0.5 * (1 + (1 + scores) * (1 + scores))

    def slope(self, scores: jax.Array) -> jax.Array:
        return 1 + scores


@dataclasses.dataclass(frozen=True)
class PowerSoftmax(WeightMap):
    """`w_j = r_j^power / (epsilon + sum_l r_l^power)`, `r = s / max |s|` (Zimerman et al., 2024, arXiv 2410.09457).

    A negative score weighs as much as a positive one. No gradient flows through the maximum.

    Attributes:
      power: even and positive.
      epsilon: keeps the division smooth; at least 0.
    """

    power: int = 4
    epsilon: float = 1e-3

    statistics: ClassVar[tuple[str, ...]] = ('inverse pivot', 'inverse denominator')
    start: ClassVar[float] = 0.0
    merges: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.power > 0 and self.power % 2 == 0, 'power', 'an even positive number')
        self._require(self.epsilon >= 0, 'epsilon', 'at least 0')

    def weights(self, scores: jax.Array, visible: jax.Array) -> jax.Array:
        highest = jnp.max(jnp.where(visible, jnp.abs(scores), 0), axis=-1, keepdims=True, initial=0.0)
        ratios = jnp.where(visible, scores, 0) / jax.lax.stop_gradient(_nonzero(highest))
        powers = ratios**self.power
        return powers / _nonzero(self.epsilon + jnp.sum(powers, axis=-1, keepdims=True))

    def pivot(self, block: Block) -> jax.Array:
        return jnp.where(block.visible, jnp.abs(block.scores), 0)

    def rescale(self, old: jax.Array, new: jax.Array) -> jax.Array:
        return whole_power(old / _nonzero(new), self.power)

    def block(self, block: Block, pivot: jax.Array) -> tuple[jax.Array, jax.Array]:
        powers = whole_power(jnp.where(block.visible, block.scores, 0) * (1 / _nonzero(pivot)), self.power)
        return powers, powers

    def finish(self, pivot: jax.Array, denominator: jax.Array) -> tuple[jax.Array, Statistics]:
        normalizer = _nonzero(self.epsilon + denominator)
        # Where no score differs from zero no weight does, and zero tells such a row from others.
        return normalizer, (jnp.where(pivot == 0, 0, 1 / _nonzero(pivot)), 1 / normalizer)

    def resume(self, statistics: Statistics) -> tuple[jax.Array, jax.Array]:
        inverse_pivot, inverse = statistics
        empty = inverse_pivot == 0
        return jnp.where(empty, 0, 1 / _nonzero(inverse_pivot)), jnp.where(empty, 0, 1 / inverse - self.epsilon)

    def recompute(self, block: Block, statistics: Statistics) -> jax.Array:
        inverse_pivot, inverse = statistics
        return whole_power(jnp.where(block.visible, block.scores, 0) * inverse_pivot, self.power) * inverse

    def score_gradient(
        self,
        block: Block,
        weights: jax.Array,
        statistics: Statistics,
        dweights: jax.Array,
        delta: jax.Array,
        companion_delta: Any,
    ) -> jax.Array:
        inverse_pivot, inverse = statistics
        ratios = jnp.where(block.visible, block.scores, 0) * inverse_pivot
        slopes = self.power * whole_power(ratios, self.power - 1) * (inverse_pivot * inverse)
        return slopes * (dweights - delta)


@dataclasses.dataclass(frozen=True)
class Softpick(WeightMap):
    """`w_j = max(e_j, 0) / (epsilon + sum_l |e_l|)`, `e_j = exp(s_j - m) - exp(-m)` (Zuhri et al., 2025).

    `m = max(s_1, ..., 0)`, through which no gradient flows; arXiv 2504.20966. A score of zero or less weighs nothing.

    Attributes:
      epsilon: positive.
    """

    epsilon: float = 1e-6

    statistics: ClassVar[tuple[str, ...]] = ('pivot', 'inverse denominator')
    start: ClassVar[float] = 0.0
    merges: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.epsilon > 0, 'epsilon', 'a positive number')

    def weights(self, scores: jax.Array, visible: jax.Array) -> jax.Array:
        highest = jnp.max(jnp.where(visible, scores, 0), axis=-1, keepdims=True, initial=0.0)
        highest = jax.lax.stop_gradient(highest)
        shifted = jnp.where(visible, jnp.exp(jnp.where(visible, scores, 0) - highest) - jnp.exp(-highest), 0)
        return jax.nn.relu(shifted) / (self.epsilon + jnp.sum(jnp.abs(shifted), axis=-1, keepdims=True))

    def highest(self, block: Block, largest: Callable[[jax.Array], jax.Array]) -> jax.Array:
        return softmax.highest(block, largest, self.start)

    def block(self, block: Block, pivot: jax.Array) -> tuple[jax.Array, jax.Array]:
        shifted = jnp.where(block.visible, softmax.unmasked(block, pivot) - jnp.exp(-pivot), 0)
        return jnp.maximum(shifted, 0), jnp.abs(shifted)

    def finish(self, pivot: jax.Array, denominator: jax.Array) -> tuple[jax.Array, Statistics]:
        normalizer = self.epsilon + denominator
        return normalizer, (pivot, 1 / normalizer)

    def resume(self, statistics: Statistics) -> tuple[jax.Array, jax.Array]:
        pivot, inverse = statistics
        return pivot, jnp.maximum(1 / inverse - self.epsilon, 0)

    def recompute(self, block: Block, statistics: Statistics) -> jax.Array:
        pivot, inverse = statistics
        # Where a key is not visible, what is left of zero is below it.
        return jnp.maximum(softmax.exponentials(block, pivot) * inverse - jnp.exp(-pivot) * inverse, 0)

    def score_gradient(
        self,
        block: Block,
        weights: jax.Array,
        statistics: Statistics,
        dweights: jax.Array,
        delta: jax.Array,
        companion_delta: Any,
    ) -> jax.Array:
        pivot, inverse = statistics
        signs = block.scores if block.scaled is None else block.scaled.products
        signed = jnp.where(signs > 0, dweights - delta, jnp.where(signs < 0, delta, 0))
        return softmax.exponentials(block, pivot) * inverse * signed


def whole_power(base: jax.Array, exponent: int) -> jax.Array:
    """`base^exponent` by multiplications, `exponent` at least 1."""
    half = base if exponent < 4 else whole_power(base, exponent // 2)
    if exponent < 4:
        return base if exponent == 1 else base * whole_power(base, exponent - 1)
    return half * half * base if exponent % 2 else half * half


def _nonzero(array: jax.Array) -> jax.Array:
    return jnp.where(array == 0, 1, array)
