"""Per-query statistics in the backward pass of `attention` on Hopper, and the weights and gradients of a tile."""

from typing import Any, NamedTuple

import jax

from pallas_kernels.attention.mosaic_gpu.sm90 import Call, Scored


class Known(NamedTuple):
    """The statistics of every query, vectors `b h t`.

    Attributes:
      statistics: those of the weight map.
      delta: `sum_j weights_j dweights_j`.
      companion_delta: the same with the second weights, or `None`.
    """

    statistics: tuple[Any, ...]
    delta: Any
    companion_delta: Any


def weights_of(call: Call, scored: Scored, known: Known) -> jax.Array:
    """The weights of a tile, recomputed; `known` are its statistics of every query."""
    statistics = tuple(call.spread(vector, 0) for vector in known.statistics)
    return call.rule.weights.recompute(scored.block, statistics)


def score_gradient(call: Call, scored: Scored, known: Known, weights: jax.Array, dweights: jax.Array) -> jax.Array:
    """The gradients of the scores of a tile."""
    spread = jax.tree.map(lambda vector: call.spread(vector, 0), known)
    return call.rule.weights.score_gradient(
        scored.block, weights, spread.statistics, dweights, spread.delta, spread.companion_delta
    )
