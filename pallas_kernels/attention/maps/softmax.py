"""The softmax, the softmax of rescaled scores, and functions of its weights."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from pallas_kernels.attention.maps.base import HIDDEN, Block, Reduce, Statistics, WeightMap

LOG2E = math.log2(math.e)


def row(scores: jax.Array, visible: jax.Array) -> jax.Array:
    """The softmax of whole rows, zero where not visible."""
    highest = jnp.max(jnp.where(visible, scores, HIDDEN), axis=-1, keepdims=True, initial=HIDDEN)
    numerators = exponentials(Block(scores, visible, jnp.zeros((), int)), jax.lax.stop_gradient(highest))
    denominator = jnp.sum(numerators, axis=-1, keepdims=True)
    return numerators / jnp.where(denominator == 0, 1, denominator)


def exponentials(block: Block, pivot: jax.Array) -> jax.Array:
    """`exp(s_j - pivot)`, zero where not visible.

    In base 2 a large pivot is rounded once more, by as much as a score of its size is, and alike for all keys of a row:
    weights keep their digits where numerators and denominators are both from here.
    """
    power, exponents = _exponents(block, pivot)
    return power(jnp.where(block.visible, exponents, HIDDEN))


def unmasked(block: Block, pivot: jax.Array) -> jax.Array:
    """`exp(s_j - pivot)`, which may be infinite where not visible."""
    power, exponents = _exponents(block, pivot)
    return power(exponents)


def _exponents(block: Block, pivot: jax.Array) -> tuple[Callable[[jax.Array], jax.Array], jax.Array]:
    if block.scaled is None:
        return jnp.exp, block.scores - pivot
    products, scale = block.scaled
    return jnp.exp2, scale * LOG2E * products - LOG2E * pivot


def highest(block: Block, largest: Callable[[jax.Array], jax.Array], start: float = HIDDEN) -> jax.Array:
    """The largest score of every row, `start` where none is larger; of products, where scores are these, scaled."""
    if block.scaled is None:
        return largest(jnp.where(block.visible, block.scores, start))
    products, scale = block.scaled
    return scale * largest(jnp.where(block.visible, products, start))


def normalise(pivot: jax.Array, denominator: jax.Array) -> tuple[jax.Array, Statistics]:
    """The divisor of sums of exponentials, and its statistics: the pivot, and one over the denominator.

    If they were summed into one logarithm, a pivot of 1e4 would leave three digits to the denominator.
    """
    empty = denominator == 0
    normalizer = jnp.where(empty, 1, denominator)
    return normalizer, (pivot, jnp.where(empty, 0, 1 / normalizer))


def resume(statistics: Statistics) -> tuple[jax.Array, jax.Array]:
    """The pivot and the denominator that `normalise` was given."""
    pivot, inverse = statistics
    return pivot, jnp.where(inverse == 0, 0, 1 / jnp.where(inverse == 0, 1, inverse))


def survey(reduce: Reduce) -> Statistics:
    """The statistics of `normalise`, found before the weights."""
    pivot = jnp.maximum(reduce(lambda block: block.scores, 'max'), HIDDEN)
    return normalise(pivot, reduce(exponentials, 'sum', pivot))[1]


@dataclasses.dataclass(frozen=True)
class Softmax(WeightMap):
    """`w_j = exp(s_j) / sum_l exp(s_l)` (online: Milakov and Gimelshein, 2018, arXiv 1805.02867)."""

    statistics: ClassVar[tuple[str, ...]] = ('pivot', 'inverse denominator')
    takes_sink: ClassVar[bool] = True
    merges: ClassVar[bool] = True

    def weights(self, scores: jax.Array, visible: jax.Array) -> jax.Array:
        return row(scores, visible)

    def dense(self, block: Block) -> tuple[jax.Array, Statistics]:
        # In this form XLA on CPU fuses it into one operation; with another select it does not. Hidden keys are below
        # the least pivot, so that they weigh nothing even where every visible score is below it, too.
        seen = jnp.where(block.visible, block.scores, 2 * HIDDEN)
        pivot = jnp.max(seen, axis=-1, keepdims=True, initial=HIDDEN)
        numerators = jnp.exp(seen - pivot)
        # The largest numerator is one, unless all are zero; XLA joins a maximum to the sum, but not a select.
        denominator = jnp.maximum(jnp.sum(numerators, axis=-1, keepdims=True), 1)
        return numerators / denominator, (pivot, 1 / denominator)

    def highest(self, block: Block, largest: Callable[[jax.Array], jax.Array]) -> jax.Array:
        return highest(block, largest)

    def block(self, block: Block, pivot: jax.Array) -> tuple[jax.Array, jax.Array]:
        numerators = exponentials(block, pivot)
        return numerators, numerators

    def finish(self, pivot: jax.Array, denominator: jax.Array) -> tuple[jax.Array, Statistics]:
        return normalise(pivot, denominator)

    def resume(self, statistics: Statistics) -> tuple[jax.Array, jax.Array]:
        return resume(statistics)

    def merge_sink(self, statistics: Statistics, sink: jax.Array) -> tuple[Statistics, jax.Array, jax.Array]:
        pivot, inverse = statistics
        highest = jnp.maximum(pivot, sink)
        empty = inverse == 0
        keys = jnp.where(empty, 0, jnp.exp(pivot - highest) / jnp.where(empty, 1, inverse))
        itself = jnp.exp(sink - highest)
        total = keys + itself
        merged = jnp.where(total == 0, 0, 1 / jnp.where(total == 0, 1, total))
        return (highest, merged), keys * merged, itself * merged

    def recompute(self, block: Block, statistics: Statistics) -> jax.Array:
        pivot, inverse = statistics
        return exponentials(block, pivot) * inverse

    def score_gradient(
        self,
        block: Block,
        weights: jax.Array,
        statistics: Statistics,
        dweights: jax.Array,
        delta: jax.Array,
        companion_delta: Any,
    ) -> jax.Array:
        return weights * (dweights - delta)


@dataclasses.dataclass(frozen=True)
class ScalableSoftmax(Softmax):
    """`w = softmax(scale log(n) s)`, `n` the number of keys that the query sees (Nakanishi, 2025, arXiv 2501.19399).

    A learned scale is a temperature: `scale_h log(n_i)`, with `n` from `visible_counts`, for `Softmax`.

    Attributes:
      scale: factor of the logarithm; it multiplies the products of queries and keys, not the biases.
    """

    scale: float = 1.0
    counts_keys: ClassVar[bool] = True

    def query_factor(self, counts: jax.Array) -> jax.Array:
        return self.scale * jnp.log(jnp.maximum(counts, 1))


@dataclasses.dataclass(frozen=True)
class ClippedSoftmax(WeightMap):
    """`w = clip((zeta - gamma) softmax(s) + gamma, 0, 1)` (Bondarenko et al., 2023, arXiv 2306.12929).

    Clipped weights pass no gradient.

    Attributes:
      zeta: at least 1.
      gamma: at most 0; usually minus 12 over the training length.
    """

    zeta: float = 1.0
    gamma: float = 0.0

    statistics: ClassVar[tuple[str, ...]] = ('pivot', 'inverse denominator')
    surveys: ClassVar[bool] = True
    has_companion: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.zeta >= 1, 'zeta', 'at least 1')
        self._require(self.gamma <= 0, 'gamma', 'at most 0')

    def weights(self, scores: jax.Array, visible: jax.Array) -> jax.Array:
        stretched = (self.zeta - self.gamma) * row(scores, visible) + self.gamma
        return jnp.where(stretched <= 0, 0, jnp.where(stretched >= 1, 1, stretched)) * visible

    def survey(self, reduce: Reduce) -> Statistics:
        return survey(reduce)

    def recompute(self, block: Block, statistics: Statistics) -> jax.Array:
        return jnp.maximum(jnp.minimum(self._stretched(block, statistics) + self.gamma, 1), 0)

    def companion(self, block: Block, statistics: Statistics) -> jax.Array:
        stretched = self._stretched(block, statistics)
        return jnp.where((stretched > -self.gamma) & (stretched < 1 - self.gamma), stretched, 0)

    def _stretched(self, block: Block, statistics: Statistics) -> jax.Array:
        pivot, inverse = statistics
        return exponentials(block, pivot) * ((self.zeta - self.gamma) * inverse)

    def score_gradient(
        self,
        block: Block,
        weights: jax.Array,
        statistics: Statistics,
        dweights: jax.Array,
        delta: jax.Array,
        companion_delta: Any,
    ) -> jax.Array:
        stretch = self.zeta - self.gamma
        both = self.companion(block, statistics) * dweights
        return both - self._stretched(block, statistics) * (companion_delta / stretch)
