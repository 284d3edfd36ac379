"""The softmax whose weights are multiplied by their own scores (Zheng et al., 2025, arXiv 2502.18277)."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from pallas_kernels.attention.maps import softmax
from pallas_kernels.attention.maps.base import HIDDEN, Block, Reduce, Scaled, Statistics, WeightMap


@dataclasses.dataclass(frozen=True)
class SelfAdjustSoftmax(WeightMap):
    """`w_j = s_j p_j`, `p = softmax(s)`; the weights have any sign and grow with the scores."""

    statistics: ClassVar[tuple[str, ...]] = ('pivot', 'inverse denominator')
    merges: ClassVar[bool] = True

    def weights(self, scores: jax.Array, visible: jax.Array) -> jax.Array:
        return jnp.where(visible, scores, 0) * softmax.row(scores, visible)

    def block(self, block: Block, pivot: jax.Array) -> tuple[jax.Array, jax.Array]:
        denominators = _exponentials(block, pivot)
        # Where not visible, scores are finite and exponentials zero.
        return block.scores * denominators, denominators

    def finish(self, pivot: jax.Array, denominator: jax.Array) -> tuple[jax.Array, Statistics]:
        return softmax.normalise(pivot, denominator)

    def resume(self, statistics: Statistics) -> tuple[jax.Array, jax.Array]:
        return softmax.resume(statistics)

    def recompute(self, block: Block, statistics: Statistics) -> jax.Array:
        pivot, inverse = statistics
        return block.scores * (_exponentials(block, pivot) * inverse)

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
        return _exponentials(block, pivot) * inverse * ((1 + block.scores) * dweights - delta)


def _exponentials(block: Block, pivot: jax.Array) -> jax.Array:
    """`exp(s_j - pivot)`, zero where not visible, of scores even where these are scaled products.

    A kernel that reads scores anyway thus keeps one array of a block, and not two.
    """
    return softmax.exponentials(
        block if block.scaled is None else block._replace(scaled=Scaled(block.scores, 1)), pivot
    )


@dataclasses.dataclass(frozen=True)
class NormalisedSelfAdjustSoftmax(WeightMap):
    """`w_j = p_j (s_j - a) / (b - a)`, `p = softmax(s)`, `a = min(s_1, ..., 0)`, `b = max(s_1, ..., 0)`.

    Gradients flow through the minimum and the maximum, to the first key that attains it. A query that sees one key
    reads all of it or, where the score is negative, nothing.
    """

    statistics: ClassVar[tuple[str, ...]] = (
        'pivot',
        'inverse denominator',
        'lower end',
        'inverse span',
        'column of the lower end',
        'column of the upper end',
    )
    surveys: ClassVar[bool] = True
    has_companion: ClassVar[bool] = True

    def weights(self, scores: jax.Array, visible: jax.Array) -> jax.Array:
        seen = jnp.where(visible, scores, 0)
        least = jnp.argmin(jnp.where(visible, scores, jnp.inf), axis=-1, keepdims=True)
        greatest = jnp.argmax(jnp.where(visible, scores, -jnp.inf), axis=-1, keepdims=True)
        low = jnp.minimum(jnp.take_along_axis(seen, least, axis=-1), 0)
        span = jnp.maximum(jnp.take_along_axis(seen, greatest, axis=-1), 0) - low
        return softmax.row(scores, visible) * jnp.where(visible, scores - low, 0) / jnp.where(span == 0, 1, span)

    def survey(self, reduce: Reduce) -> Statistics:
        (least, least_column), (greatest, greatest_column) = reduce(
            lambda block: (block.scores, block.scores), ('argmin', 'argmax')
        )
        low, high = jnp.minimum(least, 0), jnp.maximum(greatest, 0)
        span = high - low
        pivot = jnp.maximum(greatest, HIDDEN)
        return (
            *softmax.normalise(pivot, reduce(softmax.exponentials, 'sum', pivot))[1],
            low,
            jnp.where(span == 0, 0, 1 / jnp.where(span == 0, 1, span)),
            jnp.where(low < 0, least_column, -1),
            jnp.where(high > 0, greatest_column, -1),
        )

    def recompute(self, block: Block, statistics: Statistics) -> jax.Array:
        return self._adjusted(block, statistics) * self.companion(block, statistics)

    def _adjusted(self, block: Block, statistics: Statistics) -> jax.Array:
        """`(s_j - a) / (b - a)`, zero where not visible: the span is that of visible scores alone."""
        _, _, low, inverse_span, _, _ = statistics
        return jnp.where(block.visible, (block.scores - low) * inverse_span, 0)

    def companion(self, block: Block, statistics: Statistics) -> jax.Array:
        return softmax.exponentials(block, statistics[0]) * statistics[1]

    def score_gradient(
        self,
        block: Block,
        weights: jax.Array,
        statistics: Statistics,
        dweights: jax.Array,
        delta: jax.Array,
        companion_delta: Any,
    ) -> jax.Array:
        _, _, _, inverse_span, least, greatest = statistics
        inner = (self._adjusted(block, statistics) + inverse_span) * dweights - delta
        column = block.columns.astype(block.scores.dtype)
        # The two ends are never one column: the one is below zero, the other above it.
        at_least = jnp.where(block.visible & (column == least), (delta - companion_delta) * inverse_span, 0)
        at_end = jnp.where(block.visible & (column == greatest), -delta * inverse_span, at_least)
        return self.companion(block, statistics) * inner + at_end
