"""Weight maps: how the scores of one query become the weights of its keys.

A map is written twice. `weights` is its definition over a whole row, which the reference differentiates. The other
methods are the same map block by block, for the template that never holds a whole row: it keeps for every query a
pivot (a running maximum), a denominator and an accumulator, and goes over the keys as

    pivot' = max(pivot, map.pivot(scores)),   r = map.rescale(pivot, pivot')
    numerators, denominators = map.block(scores, visible, pivot')
    denominator = r denominator + sum_j denominators_j,   accumulator = r accumulator + sum_j numerators_j v_j

and at the end returns `accumulator / normalizer` with `normalizer, statistic = map.finish(pivot, denominator)`. The
statistic, one number a row, is all that the backward pass gets: `map.recompute` makes the weights of a block from it
and `map.score_gradient` their gradient. Everything is elementwise over blocks `... t s`; row quantities have the shape
`... t 1`.
"""

import abc
import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

HIDDEN = -1e30
"""The score of a hidden key: its exponential is zero, and unlike minus infinity it may be subtracted from itself."""


@dataclasses.dataclass(frozen=True)
class WeightMap(abc.ABC):
    """What the attention template asks of a map; the methods that are not abstract suit maps built on exponentials.

    Attributes:
      soft_cap: the scaled products of queries and keys are first bounded to `soft_cap tanh(scores / soft_cap)` (Gemma
        team, 2024, arXiv 2408.00118), before biases and masks; `None`: not bounded.
    """

    soft_cap: float | None = None

    start: ClassVar[float] = HIDDEN
    """Where the running maximum begins."""

    @abc.abstractmethod
    def weights(self, scores: jax.Array, visible: jax.Array) -> jax.Array:
        """The definition: the weights of whole rows, zero where not visible; zero rows where nothing is visible."""

    def pivot(self, scores: jax.Array, visible: jax.Array) -> jax.Array:
        """The statistic of a block whose running maximum keeps `block` within range."""
        return jnp.max(jnp.where(visible, scores, self.start), axis=-1, keepdims=True, initial=self.start)

    def rescale(self, old: jax.Array, new: jax.Array) -> jax.Array:
        """What numerators and denominators made with the pivot `old` are multiplied by when the pivot becomes `new`."""
        return jnp.exp(old - new)

    @abc.abstractmethod
    def block(self, scores: jax.Array, visible: jax.Array, pivot: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The numerators and the denominators of a block, zero where not visible."""

    @abc.abstractmethod
    def finish(self, pivot: jax.Array, denominator: jax.Array) -> tuple[jax.Array, jax.Array]:
        """What the accumulator is divided by, never zero, and the statistic kept for the backward pass."""

    def dense(self, scores: jax.Array, visible: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The weights of whole rows and their statistic; where a row sees no key, anything finite."""
        pivot = self.pivot(scores, visible)
        numerators, denominators = self.block(scores, visible, pivot)
        normalizer, statistic = self.finish(pivot, jnp.sum(denominators, axis=-1, keepdims=True))
        return numerators / normalizer, statistic

    @abc.abstractmethod
    def recompute(self, scores: jax.Array, visible: jax.Array, statistic: jax.Array) -> jax.Array:
        """The weights of a block, zero where not visible."""

    @abc.abstractmethod
    def score_gradient(
        self,
        scores: jax.Array,
        visible: jax.Array,
        weights: jax.Array,
        statistic: jax.Array,
        dweights: jax.Array,
        delta: jax.Array,
    ) -> jax.Array:
        """The gradient of the scores of a block, zero where not visible; `delta` is `sum_j weights_j dweights_j`."""


@dataclasses.dataclass(frozen=True)
class Softmax(WeightMap):
    """`w_j = exp(s_j) / sum_l exp(s_l)` (online: Milakov and Gimelshein, 2018, arXiv 1805.02867)."""

    def weights(self, scores: jax.Array, visible: jax.Array) -> jax.Array:
        numerators = self.block(scores, visible, jax.lax.stop_gradient(self.pivot(scores, visible)))[0]
        denominator = jnp.sum(numerators, axis=-1, keepdims=True)
        return numerators / jnp.where(denominator == 0, 1, denominator)

    def dense(self, scores: jax.Array, visible: jax.Array) -> tuple[jax.Array, jax.Array]:
        # Written so, XLA on CPU takes it for one operation; with a select more it does not.
        seen = jnp.where(visible, scores, HIDDEN)
        pivot = jnp.max(seen, axis=-1, keepdims=True)
        numerators = jnp.exp(seen - pivot)
        denominator = jnp.sum(numerators, axis=-1, keepdims=True)
        return numerators / denominator, pivot + jnp.log(denominator)

    def block(self, scores: jax.Array, visible: jax.Array, pivot: jax.Array) -> tuple[jax.Array, jax.Array]:
        numerators = jnp.exp(jnp.where(visible, scores - pivot, HIDDEN))
        return numerators, numerators

    def finish(self, pivot: jax.Array, denominator: jax.Array) -> tuple[jax.Array, jax.Array]:
        empty = denominator == 0
        normalizer = jnp.where(empty, 1, denominator)
        return normalizer, jnp.where(empty, 0, pivot + jnp.log(normalizer))

    def recompute(self, scores: jax.Array, visible: jax.Array, statistic: jax.Array) -> jax.Array:
        return jnp.exp(jnp.where(visible, scores - statistic, HIDDEN))

    def score_gradient(
        self,
        scores: jax.Array,
        visible: jax.Array,
        weights: jax.Array,
        statistic: jax.Array,
        dweights: jax.Array,
        delta: jax.Array,
    ) -> jax.Array:
        return weights * (dweights - delta)
