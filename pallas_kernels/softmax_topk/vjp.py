"""Differentiation shared by the forms of `softmax_topk`."""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

Outputs = tuple[jax.Array, jax.Array]
"""The weights and their indices, `*b k`."""


class Largest(NamedTuple):
    """The result of one sweep over `*b o`: the k largest scores and their indices, `*b k`, and `sum(exp(x - highest))`.

    The sum is `*b 1`; the first of the scores is the highest. Scores and sum are in float32 at least.
    """

    scores: jax.Array
    indices: jax.Array
    total: jax.Array


def differentiable(
    sweep: Callable[[jax.Array, int], Largest], replace: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
) -> Callable[[jax.Array, int], Outputs]:
    """Returns the weights with their gradient, dense in x; `replace(array, indices, entries)` sets k entries of a row.

    With y the softmax and D the sum of `dy y` over the k weights that were returned, `dx = y (dy - D)`, dy being zero
    elsewhere. x, the k weights and indices, and two numbers per row are kept, from which all of y is recomputed.
    """

    def run(x: jax.Array, k: int) -> tuple[jax.Array, ...]:
        scores, indices, total = sweep(x, k)
        empty = scores[..., :1] == -math.inf
        # Separate: their sum, the log-normaliser, would round away the differences of large scores.
        highest, total = jnp.where(empty, 0, scores[..., :1]), jnp.where(empty, 1, total)
        return jnp.exp(scores - highest) / total, indices, highest, total

    @functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
    def softmax_topk(x: jax.Array, k: int) -> Outputs:
        values, indices, *_ = run(x, k)
        return values.astype(x.dtype), indices

    def save(x: jax.Array, k: int) -> tuple[Outputs, tuple[jax.Array, ...]]:
        values, indices, highest, total = run(x, k)
        return (values.astype(x.dtype), indices), (x, values, indices, highest, total)

    def pull(k: int, saved: tuple[jax.Array, ...], gradients: Outputs) -> tuple[jax.Array]:
        x, values, indices, highest, total = saved
        dvalues = gradients[0].astype(values.dtype)
        moment = jnp.sum(dvalues * values, axis=-1, keepdims=True)
        elsewhere = (-moment / total * jnp.exp(x.astype(values.dtype) - highest)).astype(x.dtype)
        here = (values * (dvalues - moment)).astype(x.dtype)
        return (replace(elsewhere, indices, here),)

    softmax_topk.defvjp(save, pull)
    return softmax_topk
