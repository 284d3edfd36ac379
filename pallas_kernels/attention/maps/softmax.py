"""The softmax, and maps that are a softmax of other scores."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from pallas_kernels.attention.maps.base import HIDDEN, Block, Statistics, WeightMap


@dataclasses.dataclass(frozen=True)
class Softmax(WeightMap):
    """`w_j = exp(s_j) / sum_l exp(s_l)` (online: Milakov and Gimelshein, 2018, arXiv 1805.02867)."""

    # Apart: in their logarithm's sum, scores of 1e4 would leave the denominator three digits.
    statistics: ClassVar[tuple[str, ...]] = ('pivot', 'inverse denominator')
    takes_sink: ClassVar[bool] = True

    def weights(self, scores: jax.Array, visible: jax.Array) -> jax.Array:
        highest = jnp.max(jnp.where(visible, scores, HIDDEN), axis=-1, keepdims=True, initial=HIDDEN)
        numerators = jnp.exp(jnp.where(visible, scores - jax.lax.stop_gradient(highest), HIDDEN))
        denominator = jnp.sum(numerators, axis=-1, keepdims=True)
        return numerators / jnp.where(denominator == 0, 1, denominator)

    def dense(self, block: Block) -> tuple[jax.Array, Statistics]:
        # Written so, XLA on CPU takes it for one operation; with a select more it does not.
        seen = jnp.where(block.visible, block.scores, HIDDEN)
        pivot = jnp.max(seen, axis=-1, keepdims=True)
        numerators = jnp.exp(seen - pivot)
        denominator = jnp.sum(numerators, axis=-1, keepdims=True)
        return numerators / denominator, (pivot, 1 / denominator)

    def block(self, block: Block, pivot: jax.Array) -> tuple[jax.Array, jax.Array]:
        numerators = jnp.exp(jnp.where(block.visible, block.scores - pivot, HIDDEN))
        return numerators, numerators

    def finish(self, pivot: jax.Array, denominator: jax.Array) -> tuple[jax.Array, Statistics]:
        empty = denominator == 0
        normalizer = jnp.where(empty, 1, denominator)
        return normalizer, (pivot, jnp.where(empty, 0, 1 / normalizer))

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
        return jnp.exp(jnp.where(block.visible, block.scores - pivot, HIDDEN)) * inverse

    def score_gradient(
        self,
        block: Block,
        weights: jax.Array,
        statistics: Statistics,
        dweights: jax.Array,
        delta: jax.Array,
        companion_delta: jax.Array | None,
    ) -> jax.Array:
        return weights * (dweights - delta)
