"""Metrics are sums and counts that merge; a mean is taken once, at the end."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Average:
    """A weighted mean in parts, of any shape, such as one mean a position.

    Attributes:
      total: `sum w x`, jax or numpy.
      count: `sum w`, of the same shape.
    """

    total: Any
    count: Any

    @classmethod
    def of(cls, values: Float[Array, 'b t'], weights: Float[Array, 'b t'], axis: int | None = None) -> 'Average':
        """The parts over everything, or over one axis."""
        return cls(jnp.sum(values * weights, axis), jnp.sum(weights, axis))

    def merge(self, other: 'Average') -> 'Average':
        """The parts of the two populations together."""
        return Average(self.total + other.total, self.count + other.count)

    def mean(self) -> Any:
        """`total / count`, NaN where nothing was counted."""
        return self.total / self.count


def perplexity(nats: float) -> float:
    """`exp(loss)`, infinite where that overflows."""
    return math.exp(nats) if nats < 700 else math.inf


def bits(nats: float) -> float:
    """Nats to bits."""
    return nats / math.log(2)
