"""The softmax that sharpens rows of high entropy (Velickovic et al., 2024, arXiv 2410.01104)."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from pallas_kernels.attention.maps import softmax
from pallas_kernels.attention.maps.base import HIDDEN, Block, Reduce, Statistics, WeightMap


@dataclasses.dataclass(frozen=True)
class AdaptiveSoftmax(WeightMap):
    """`w = softmax(beta s)`, `beta = max(P(H), 1)` where the entropy `H` of `softmax(s)` exceeds a half, else 1.

    `P` is a polynomial, fitted to models that find the maximum of a set; it exceeds 1 for `H` from 0.85 to 5.94 nats,
    about 382 keys of equal weight. Meant for trained models: gradients treat beta as a constant.

    Attributes:
      coefficients: of `P`, highest powers first.
      lowest: the entropy up to which beta is 1.
    """

    coefficients: tuple[float, ...] = (-0.037, 0.481, -2.3, 4.917, -1.791)
    lowest: float = 0.5

    statistics: ClassVar[tuple[str, ...]] = ('pivot', 'beta', 'inverse denominator')
    surveys: ClassVar[bool] = True

    def weights(self, scores: jax.Array, visible: jax.Array) -> jax.Array:
        plain = softmax.row(scores, visible)
        entropy = -jnp.sum(plain * jnp.log(jnp.where(plain > 0, plain, 1)), axis=-1, keepdims=True)
        return softmax.row(scores * jax.lax.stop_gradient(self._beta(entropy)), visible)

    def survey(self, reduce: Reduce) -> Statistics:
        def moments(block: Block, pivot: jax.Array) -> tuple[jax.Array, jax.Array]:
            numerators = softmax.exponentials(block, pivot)
            return numerators, numerators * (block.scores - pivot)

        pivot = jnp.maximum(reduce(lambda block: block.scores, 'max'), HIDDEN)
        total, mean = reduce(moments, ('sum', 'sum'), pivot)
        total = jnp.where(total == 0, 1, total)
        beta = self._beta(jnp.log(total) - mean / total)
        denominator = reduce(_sharpened, 'sum', pivot, beta)
        return pivot, beta, jnp.where(denominator == 0, 0, 1 / jnp.where(denominator == 0, 1, denominator))

    def recompute(self, block: Block, statistics: Statistics) -> jax.Array:
        pivot, beta, inverse = statistics
        return _sharpened(block, pivot, beta) * inverse

    def score_gradient(
        self,
        block: Block,
        weights: jax.Array,
        statistics: Statistics,
        dweights: jax.Array,
        delta: jax.Array,
        companion_delta: Any,
    ) -> jax.Array:
        return statistics[1] * weights * (dweights - delta)

    def _beta(self, entropy: jax.Array) -> jax.Array:
        value = jnp.zeros_like(entropy)
        for coefficient in self.coefficients:
            value = value * entropy + coefficient
        return jnp.where(entropy > self.lowest, jnp.maximum(value, 1), 1)


def _sharpened(block: Block, pivot: jax.Array, beta: jax.Array) -> jax.Array:
    """`exp(beta (s_j - pivot))`, zero where not visible."""
    return jnp.exp(jnp.where(block.visible, beta * (block.scores - pivot), HIDDEN))
