"""Differentiation shared by the forms of `cross_entropy`."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Rule:
    """What is fixed when a call is traced; see `api.cross_entropy`."""

    z_loss: float
    soft_cap: float | None


Form = Callable[[Rule, jax.Array, jax.Array, jax.Array], jax.Array]
"""From hidden, `n d`, embedding, `o d`, and labels, `n`, to the loss, `n`."""

Forward = Callable[[Rule, jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]
"""From the same to the loss and what the form keeps besides its arguments."""

Backward = Callable[[Rule, jax.Array, jax.Array, jax.Array, Any, jax.Array], tuple[jax.Array, jax.Array]]
"""From the same, what was kept, and the gradient of the loss to those of hidden and embedding."""


def differentiable(forward: Forward, backward: Backward) -> Form:
    """Returns the form with its gradient."""

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def cross_entropy(rule: Rule, hidden: jax.Array, embedding: jax.Array, labels: jax.Array) -> jax.Array:
        return forward(rule, hidden, embedding, labels)[0]

    def save(rule: Rule, *arguments: jax.Array):
        loss, kept = forward(rule, *arguments)
        return loss, (*arguments, kept)

    def pull(rule: Rule, saved, dloss: jax.Array):
        return *backward(rule, *saved, dloss), None

    cross_entropy.defvjp(save, pull)
    return cross_entropy
