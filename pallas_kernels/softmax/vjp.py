"""Parts shared by the implementations of `softmax`: its gradient, its pivot, and the view of an array as rows."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

Forward = Callable[[jax.Array, jax.Array | None], jax.Array]
"""From x and the mask of selected entries, `*b o`, to the weights."""

Backward = Callable[[jax.Array, jax.Array], jax.Array]
"""From the weights and their gradient, `*b o`, to the gradient of x."""


def differentiable(forward: Forward, backward: Backward) -> Forward:
    """Returns the softmax with its gradient, `dx = y (dy - sum(dy y))`.

    The weights y are kept; nothing is recomputed. An entry that is not selected has no weight and no gradient; the same
    holds for a row without entries.
    """

    @jax.custom_vjp
    def softmax(x: jax.Array, where: jax.Array | None) -> jax.Array:
        return forward(x, where)

    def save(x: jax.Array, where: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        y = forward(x, where)
        return y, y

    def pull(y: jax.Array, dy: jax.Array) -> tuple[jax.Array, None]:
        return backward(y, dy), None

    softmax.defvjp(save, pull)
    return softmax


def pivot(highest: jax.Array) -> jax.Array:
    """The number subtracted from the scores of rows, finite also for rows of minus infinity."""
    return jnp.where(highest == -math.inf, 0, highest)


def on_rows(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Returns a function of arrays `*b o` from one of arrays `n o`; `None` stays `None`."""

    def on_all(x: jax.Array, *others: jax.Array | None) -> jax.Array:
        o = x.shape[-1]
        return function(*(None if array is None else array.reshape(-1, o) for array in (x, *others))).reshape(x.shape)

    return on_all
