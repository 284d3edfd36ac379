"""A penalty in training on how far layers turn the residual stream."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from attnlab.blocks.residual import Streams
from attnlab.context import PADDING, Context
from attnlab.errors import UserError
from attnlab.functional.penalty import penalised
from attnlab.signature import checked_fields


@checked_fields
@dataclasses.dataclass(frozen=True)
class Alignment:
    """The penalty `weight sum_l (1 - cos(h_l, h_{l-1}))` a token, `h_l` the stream after layer `l`.

    It makes the states of successive layers alike; that layers become less linear by it is what Razzhigaev et al. 2024
    report, https://arxiv.org/abs/2405.12250. In training alone: losses are reported without it.

    Attributes:
      weight: of the penalty.
    """

    weight: float

    def __post_init__(self) -> None:
        """Raises `UserError` for a weight below 0."""
        if not 0 <= self.weight < math.inf:
            raise UserError(f'weight of Alignment is {self.weight}; it must be a number of at least 0')

    def __call__(self, before: Streams, after: Streams, ctx: Context) -> Streams:
        """The streams after a layer; differentiation adds the gradient of its mean over real tokens."""
        if ctx.deterministic:
            return after
        there = ctx.segments_or_ones() != PADDING
        leaves, structure = jax.tree.flatten(after)
        old = jax.tree.leaves(before)
        turned = (_turned(one, other, there) for one, other in zip(old, leaves, strict=True))
        amount = sum(turned, jnp.float32(0)) / len(leaves)
        first = penalised(leaves[0], self.weight * amount, jnp.sum(there), ctx.labels)
        return jax.tree.unflatten(structure, [first, *leaves[1:]])


def _turned(before: Any, after: Any, there: jax.Array) -> jax.Array:
    """The sum over tokens of one minus the cosine, on average over streams."""
    x, y = (each.astype(jnp.float32) for each in (before, after))
    sizes = jnp.sqrt(jnp.sum(x**2, axis=-1) * jnp.sum(y**2, axis=-1) + 1e-12)
    turned = 1 - jnp.sum(x * y, axis=-1) / sizes
    turned = turned.reshape(*there.shape, -1).mean(axis=-1)
    return jnp.sum(jnp.where(there, turned, 0))
