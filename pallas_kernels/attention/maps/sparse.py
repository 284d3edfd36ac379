"""Maps with exact zeros: the scores above a threshold share the weight (Peters et al., 2019, arXiv 1905.05702)."""

import abc
import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from pallas_kernels.attention.maps.base import HIDDEN, Block, Reduce, Statistics, WeightMap
from pallas_kernels.attention.maps.ratios import whole_power

STEPS = 64
"""The maximum number of steps towards the threshold: far more than float64 needs."""


@dataclasses.dataclass(frozen=True)
class Thresholded(WeightMap):
    """`w_j = x_j^p`, `x_j = max(s_j / p - tau, 0)`, where `tau` makes the weights add up to 1."""

    statistics: ClassVar[tuple[str, ...]] = ('pivot', 'threshold', 'inverse total of the slopes')
    surveys: ClassVar[bool] = True
    has_companion: ClassVar[bool] = True

    @property
    @abc.abstractmethod
    def exponent(self) -> float:
        """`p`, at least 1."""

    def weights(self, scores: jax.Array, visible: jax.Array) -> jax.Array:
        highest = jnp.max(jnp.where(visible, scores, HIDDEN), axis=-1, keepdims=True, initial=HIDDEN)
        block = Block(scores, visible, jnp.zeros((), int))
        pivot = jax.lax.stop_gradient(highest)

        def total(threshold: jax.Array, exponent: float) -> jax.Array:
            return jnp.sum(power(self._excess(block, pivot, threshold), exponent), axis=-1, keepdims=True)

        def halve(_: int, ends: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            middle = (ends[0] + ends[1]) / 2
            above = total(middle, self.exponent) >= 1
            return jnp.where(above, middle, ends[0]), jnp.where(above, ends[1], middle)

        ends = jax.lax.fori_loop(0, STEPS, halve, (jnp.full_like(pivot, -1), jnp.zeros_like(pivot)))
        found = jax.lax.stop_gradient(ends[0])
        # A Newton step from the solution has the derivative of the solution.
        slope = jax.lax.stop_gradient(self.exponent * total(found, self.exponent - 1))
        threshold = found + (total(found, self.exponent) - 1) / jnp.where(slope == 0, 1, slope)
        return power(self._excess(block, pivot, threshold), self.exponent)

    def survey(self, reduce: Reduce) -> Statistics:
        # Newton's method for the norm `(sum_j x_j^p)^(1 / p) = 1`, which is convex in the threshold: from the left it
        # never steps too far, and where the scores above the threshold are equal, or p = 1, a step is exact.
        pivot = jnp.maximum(reduce(lambda block: block.scores, 'max'), HIDDEN)
        p = self.exponent

        def powers(block: Block, pivot: jax.Array, threshold: jax.Array) -> tuple[jax.Array, jax.Array]:
            excess = self._excess(block, pivot, threshold)
            return power(excess, p), power(excess, p - 1)

        def at(threshold: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            total, slopes = reduce(powers, ('sum', 'sum'), pivot, threshold)
            step = (total - power(total, 1 - 1 / p)) / jnp.where(slopes == 0, 1, slopes)
            # A row that has arrived stays, whatever others in the block still need.
            return threshold, jnp.where(step > jnp.finfo(step.dtype).eps, step, 0), slopes

        def unfinished(state: tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]) -> jax.Array:
            count, (_, step, _) = state
            return (count < STEPS) & jnp.any(step > 0)

        def advance(
            state: tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]],
        ) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
            count, (threshold, step, _) = state
            return count + 1, at(threshold + step)

        _, (threshold, _, slopes) = jax.lax.while_loop(
            unfinished, advance, (jnp.int32(0), at(jnp.full_like(pivot, -1)))
        )
        return pivot, threshold, jnp.where(slopes == 0, 0, 1 / jnp.where(slopes == 0, 1, slopes))

    def _excess(self, block: Block, pivot: jax.Array, threshold: jax.Array) -> jax.Array:
        """`x`."""
        excess = jnp.maximum((block.scores - pivot) * (1 / self.exponent) - threshold, 0)
        return jnp.where(block.visible, excess, 0)

    def recompute(self, block: Block, statistics: Statistics) -> jax.Array:
        pivot, threshold, _ = statistics
        return power(self._excess(block, pivot, threshold), self.exponent)

    def companion(self, block: Block, statistics: Statistics) -> jax.Array:
        return self._slopes(block, statistics) * statistics[2]

    def _slopes(self, block: Block, statistics: Statistics) -> jax.Array:
        pivot, threshold, _ = statistics
        return power(self._excess(block, pivot, threshold), self.exponent - 1)

    def score_gradient(
        self,
        block: Block,
        weights: jax.Array,
        statistics: Statistics,
        dweights: jax.Array,
        delta: jax.Array,
        companion_delta: Any,
    ) -> jax.Array:
        return self._slopes(block, statistics) * (dweights - companion_delta)


@dataclasses.dataclass(frozen=True)
class Sparsemax(Thresholded):
    """`w_j = max(s_j - tau, 0)` (Martins and Astudillo, 2016, arXiv 1602.02068)."""

    @property
    def exponent(self) -> float:
        return 1.0


@dataclasses.dataclass(frozen=True)
class Entmax15(Thresholded):
    """`w_j = max(s_j / 2 - tau, 0)^2`."""

    @property
    def exponent(self) -> float:
        return 2.0


@dataclasses.dataclass(frozen=True)
class Entmax(Thresholded):
    """`w_j = max((alpha - 1) s_j - tau, 0)^(1 / (alpha - 1))`: a softmax as alpha nears 1, `Sparsemax` at 2.

    Attributes:
      alpha: between 1.01 and 2.
    """

    alpha: float = 1.5

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(1.01 <= self.alpha <= 2, 'alpha', 'between 1.01 and 2')

    @property
    def exponent(self) -> float:
        return 1 / (self.alpha - 1)


def power(base: jax.Array, exponent: float) -> jax.Array:
    """`base^exponent` for a base and an exponent that are not negative, 0 where the base is 0."""
    if exponent == 0:
        return jnp.where(base > 0, 1.0, 0.0).astype(base.dtype)
    if exponent <= 8 and exponent == int(exponent):
        return whole_power(base, int(exponent))
    positive = base > 0
    return jnp.where(positive, jnp.exp(exponent * jnp.log(jnp.where(positive, base, 1))), 0)
