"""Pooling of a document's hidden states into one vector."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attnlab.errors import UserError
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


@checked_fields
@dataclasses.dataclass(frozen=True)
class OneToken:
    """The hidden state of one token, such as a class token, in float32.

    Attributes:
      place: its index in the row, from 0.
    """

    place: int = 0

    def __call__(self, hidden: Sequence, where: Bool[Array, 'b t']) -> Float[Array, 'b d']:
        del where
        if not 0 <= self.place < hidden.shape[1]:
            raise UserError(f'place of OneToken is {self.place}; the rows have {hidden.shape[1]} tokens')
        return hidden[:, self.place].astype(jnp.float32)
