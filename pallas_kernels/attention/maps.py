"""Weight maps: how the scores of one query become the weights of its keys.

A map is written twice. `weights` is its definition over a whole row, which the reference differentiates. The other methods
are the same map block by block, for the template that never holds a whole row: it keeps for every query a pivot (a running
maximum), a denominator and an accumulator, and goes over the keys as

    pivot' = max(pivot, map.pivot(scores)),   r = map.rescale(pivot, pivot')
    numerators, denominators = map.block(scores, visible, pivot')
    denominator = r denominator + sum_j denominators_j,   accumulator = r accumulator + sum_j numerators_j v_j

and at the end returns `accumulator / normalizer` with `normalizer, statistic = map.finish(pivot, denominator)`. The
statistic, one number a row, is all that the backward pass gets: `map.recompute` makes the weights of a block from it and
`map.score_gradient` their gradient. Everything is elementwise over blocks `... t s`; row quantities have the shape `... t 1`.
"""

import abc
import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class WeightMap(abc.ABC):
    """What the attention template asks of a map; the methods that are not abstract suit maps built on exponentials.

    Attributes:
      soft_cap: the scaled products of queries and keys are first bounded to `soft_cap tanh(scores / soft_cap)` (Gemma team,
        2024, arXiv 2408.00118), before biases and masks; `None`: not bounded.
    """

    soft_cap: float | None = None

    start = -jnp.inf
    """Where the running maximum begins."""

    @abc.abstractmethod
    def weights(self, scores: jax.Array, visible: jax.Array) -> jax.Array:
        """The definition: the weights of whole rows, zero where not visible; zero rows where nothing is visible."""

    def pivot(self, scores: jax.Array, visible: jax.Array) -> jax.Array:
        """The statistic of a block whose running maximum keeps `block` within range."""
        return jnp.max(scores, axis=-1, keepdims=True, where=visible, initial=self.start)

    def rescale(self, old: jax.Array, new: jax.Array) -> jax.Array:
        """What numerators and denominators made with the pivot `old` are multiplied by when the pivot becomes `new`."""
        return jnp.exp(old - finite(new))

    @abc.abstractmethod
    def block(self, scores: jax.Array, visible: jax.Array, pivot: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The numerators and the denominators of a block, zero where not visible."""

    @abc.abstractmethod
    def finish(self, pivot: jax.Array, denominator: jax.Array) -> tuple[jax.Array, jax.Array]:
        """What the accumulator is divided by, never zero, and the statistic kept for the backward pass."""

    @abc.abstractmethod
    def recompute(self, scores: jax.Array, visible: jax.Array, statistic: jax.Array) -> jax.Array:
        """The weights of a block, zero where not visible."""

    @abc.abstractmethod
    def score_gradient(
        self, scores: jax.Array, weights: jax.Array, statistic: jax.Array, dweights: jax.Array, delta: jax.Array
    ) -> jax.Array:
        """The gradient of the scores of a block, whatever where not visible; `delta` is `sum_j weights_j dweights_j`."""


def finite(pivot: jax.Array) -> jax.Array:
    """The pivot, or zero for rows that have seen no key, so that `-inf - -inf` never happens."""
    return jnp.where(pivot == -jnp.inf, 0, pivot)


@dataclasses.dataclass(frozen=True)
class Softmax(WeightMap):
    """`w_j = exp(s_j) / sum_l exp(s_l)` (online: Milakov and Gimelshein, 2018, arXiv 1805.02867)."""

    def weights(self, scores: jax.Array, visible: jax.Array) -> jax.Array:
        pivot = finite(jax.lax.stop_gradient(self.pivot(scores, visible)))
        numerators = jnp.where(visible, jnp.exp(jnp.where(visible, scores - pivot, 0)), 0)
        denominator = jnp.sum(numerators, axis=-1, keepdims=True)
        return numerators / jnp.where(denominator == 0, 1, denominator)

    def block(self, scores: jax.Array, visible: jax.Array, pivot: jax.Array) -> tuple[jax.Array, jax.Array]:
        numerators = jnp.exp(jnp.where(visible, scores - finite(pivot), -jnp.inf))
        return numerators, numerators

    def finish(self, pivot: jax.Array, denominator: jax.Array) -> tuple[jax.Array, jax.Array]:
        empty = denominator == 0
        normalizer = jnp.where(empty, 1, denominator)
        # An infinite log-normaliser makes every weight of a row without visible keys zero.
        return normalizer, jnp.where(empty, jnp.inf, finite(pivot) + jnp.log(normalizer))

    def recompute(self, scores: jax.Array, visible: jax.Array, statistic: jax.Array) -> jax.Array:
        return jnp.exp(jnp.where(visible, scores - statistic, -jnp.inf))

    def score_gradient(
        self, scores: jax.Array, weights: jax.Array, statistic: jax.Array, dweights: jax.Array, delta: jax.Array
    ) -> jax.Array:
        return weights * (dweights - delta)
