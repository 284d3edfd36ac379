"""Pooling of a document's hidden states into one vector."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attnlab.signature import checked_fields
from attnlab.typing import Sequence


@checked_fields
@dataclasses.dataclass(frozen=True)
class MeanPool:
    """The weighted mean over time: `sum_t w_t x_t / max(sum_t w_t, 1)`, in float32; zero for an empty document."""

    def __call__(self, hidden: Sequence, where: Bool[Array, 'b t']) -> Float[Array, 'b d']:
        weights = where.astype(jnp.float32)
        total = jnp.einsum('b t d, b t -> b d', hidden.astype(jnp.float32), weights)
        return total / jnp.maximum(jnp.sum(weights, axis=1, keepdims=True), 1.0)
