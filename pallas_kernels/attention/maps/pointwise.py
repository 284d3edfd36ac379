"""Maps in which the weight of a key depends on its own score alone."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from pallas_kernels.attention.maps.base import Block, Reduce, Statistics, WeightMap


@dataclasses.dataclass(frozen=True)
class Pointwise(WeightMap):
    """Maps without row statistics."""

    statistics: ClassVar[tuple[str, ...]] = ()
    surveys: ClassVar[bool] = True
    merges: ClassVar[bool] = True

    def merge(self, left: Statistics, right: Statistics) -> tuple[Statistics, jax.Array, jax.Array]:
        return (), jnp.ones(()), jnp.ones(())

    def survey(self, reduce: Reduce) -> Statistics:
        return ()


@dataclasses.dataclass(frozen=True)
class Sigmoid(Pointwise):
    """`w_j = 1 / (1 + exp(-s_j - bias))` (Ramapuram et al., 2024, arXiv 2409.04431).

    Attributes:
      bias: usually minus the logarithm of the training length.
    """

    bias: float = 0.0

    def weights(self, scores: jax.Array, visible: jax.Array) -> jax.Array:
        return jnp.where(visible, jax.nn.sigmoid(scores + self.bias), 0)

    def recompute(self, block: Block, statistics: Statistics) -> jax.Array:
        return jnp.where(block.visible, 1 / (1 + jnp.exp(-block.scores - self.bias)), 0)

    def score_gradient(
        self,
        block: Block,
        weights: jax.Array,
        statistics: Statistics,
        dweights: jax.Array,
        delta: jax.Array,
        companion_delta: Any,
    ) -> jax.Array:
        return weights * (1 - weights) * dweights


@dataclasses.dataclass(frozen=True)
class Relu(Pointwise):
    """`w_j = max(s_j, 0) / n`, `n` the number of keys that the query sees (Wortsman et al., 2023, arXiv 2309.08586)."""

    counts_keys: ClassVar[bool] = True

    def weights(self, scores: jax.Array, visible: jax.Array) -> jax.Array:
        return jnp.where(visible, jax.nn.relu(scores), 0)

    def output_factor(self, counts: jax.Array) -> jax.Array:
        return 1 / jnp.maximum(counts, 1)

    def recompute(self, block: Block, statistics: Statistics) -> jax.Array:
        return jnp.where(block.visible, jnp.maximum(block.scores, 0), 0)

    def score_gradient(
        self,
        block: Block,
        weights: jax.Array,
        statistics: Statistics,
        dweights: jax.Array,
        delta: jax.Array,
        companion_delta: Any,
    ) -> jax.Array:
        return jnp.where(weights > 0, dweights, 0)


@dataclasses.dataclass(frozen=True)
class SquaredRelu(Pointwise):
    """`w_j = max(s_j, 0)^2`, scores scaled by one over the length (Hua et al., 2022, arXiv 2202.10447)."""

    def weights(self, scores: jax.Array, visible: jax.Array) -> jax.Array:
        return jnp.where(visible, jnp.square(jax.nn.relu(scores)), 0)

    def recompute(self, block: Block, statistics: Statistics) -> jax.Array:
        positive = jnp.maximum(block.scores, 0)
        return jnp.where(block.visible, positive * positive, 0)

    def score_gradient(
        self,
        block: Block,
        weights: jax.Array,
        statistics: Statistics,
        dweights: jax.Array,
        delta: jax.Array,
        companion_delta: Any,
    ) -> jax.Array:
        return jnp.where(block.visible, 2 * jnp.maximum(block.scores, 0) * dweights, 0)
