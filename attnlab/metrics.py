"""Metrics are sums and counts that merge; a mean is taken once, at the end."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int


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
    def of(cls, values: Float[Array, '*b'], weights: Float[Array, '*b'], axis: int | None = None) -> 'Average':
        """The parts over everything, or over one axis."""
        return cls(jnp.sum(values * weights, axis), jnp.sum(weights, axis))

    def merge(self, other: 'Average') -> 'Average':
        """The parts of the two populations together."""
        return Average(self.total + other.total, self.count + other.count)

    def mean(self) -> Any:
        """`total / count`, NaN where nothing was counted."""
        with np.errstate(invalid='ignore'):
            return self.total / self.count


def proportion(name: str, right: Float[Array, 'b n'], weights: Float[Array, 'b n']) -> dict[str, Average]:
    """The share of labels that are right, `name`, and what its noise follows from, `name_products`.

    The labels of one example are not independent, so that the share's noise is that of a ratio over examples: with
    `r_i` labels right of `n_i` in example `i`, the products are the means of `r_i^2`, `r_i n_i` and `n_i^2` over the
    examples that have labels. `attnlab.evals.measured.of_examples` makes an interval of them.
    """
    found, asked = jnp.sum(right * weights, axis=1), jnp.sum(weights, axis=1)
    products = jnp.stack([jnp.sum(one) for one in (found * found, found * asked, asked * asked)])
    examples = jnp.full(3, jnp.sum(asked > 0), products.dtype)
    return {name: Average.of(right, weights), f'{name}{PRODUCTS}': Average(products, examples)}


def likeliest(logits: Float[Array, '*b o'], labels: Int[Array, '*b']) -> Bool[Array, '*b']:
    """Whether a label has the greatest logit, the first of equal ones: `argmax(logits) == label`.

    By comparisons, which compilers for CPUs vectorise; `argmax` takes three times as long over 8,192 classes. Where a
    logit is NaN no label has it.
    """
    own = jnp.take_along_axis(logits, labels[..., None], axis=-1)
    first = jax.lax.broadcasted_iota(labels.dtype, logits.shape, logits.ndim - 1) < labels[..., None]
    return jnp.all(jnp.where(first, logits < own, logits <= own), axis=-1)


def overlap(found: Bool[Array, '*b'], there: Bool[Array, '*b'], weights: Float[Array, '*b']) -> Average:
    """Intersection over union, summed over everything first: the share of what either has that both have."""
    return Average(jnp.sum((found & there) * weights), jnp.sum((found | there) * weights))


PRODUCTS = '_products'
"""How the names of the products end that belong to a proportion."""


def perplexity(nats: float) -> float:
    """`exp(loss)`, infinite where that overflows, NaN of NaN."""
    return math.inf if nats >= 700 else math.exp(nats)


def bits(nats: float) -> float:
    """Nats to bits."""
    return nats / math.log(2)
