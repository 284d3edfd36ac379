"""Differentiation shared by the forms of `cross_entropy` that hold a part of the logits at a time."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

Statistics = tuple[jax.Array, jax.Array]
"""The log-normaliser of every token and the logit of its label, both `n`."""

Gradients = tuple[jax.Array, jax.Array]
"""The gradients of hidden, `n d`, and of embedding, `o d`, in their types."""


class Known(NamedTuple):
    """The per-token operands of the backward pass, each `n`: `dlogits = scale exp(logits - log Z) - dloss onehot`."""

    labels: jax.Array
    log_normalizers: jax.Array
    scale: jax.Array
    dlosses: jax.Array


def differentiable(
    statistics: Callable[[float | None, jax.Array, jax.Array, jax.Array], Statistics],
    gradients: Callable[[float | None, jax.Array, jax.Array, Known], Gradients],
) -> Callable[..., Statistics]:
    """Returns the statistics with their gradients; both functions are given the soft cap, hidden and embedding first.

    The arguments and the log-normaliser of each token are kept; the logits are recomputed. With p their softmax and
    g, c the gradients of both statistics, theirs is `g p + c onehot(label)`, rounded once: of a sure prediction the two
    terms nearly cancel.
    """

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def run(soft_cap: float | None, hidden: jax.Array, embedding: jax.Array, labels: jax.Array) -> Statistics:
        return statistics(soft_cap, hidden, embedding, labels)

    def save(
        soft_cap: float | None, hidden: jax.Array, embedding: jax.Array, labels: jax.Array
    ) -> tuple[Statistics, tuple[jax.Array, ...]]:
        log_normalizers, chosen = statistics(soft_cap, hidden, embedding, labels)
        return (log_normalizers, chosen), (hidden, embedding, labels, log_normalizers)

    def pull(
        soft_cap: float | None, saved: tuple[jax.Array, ...], dstatistics: Statistics
    ) -> tuple[jax.Array, jax.Array, None]:
        hidden, embedding, labels, log_normalizers = saved
        dlog_normalizers, dchosen = dstatistics
        known = Known(labels, log_normalizers, dlog_normalizers, -dchosen)
        return *gradients(soft_cap, hidden, embedding, known), None

    run.defvjp(save, pull)

    def form(hidden: jax.Array, embedding: jax.Array, labels: jax.Array, *, soft_cap: float | None) -> Statistics:
        return run(soft_cap, hidden, embedding, labels)

    return form


def in_units(known: Known, dtype: DTypeLike) -> tuple[Known, jax.Array | float]:
    """What is known in units in which the gradients of logits fit a type, and that unit; products are in units too.

    Of a mean over many tokens a probability weighs less than the smallest number of float16, 6e-8, as soon as there are
    2^24 logits or so, which was no gradient for all classes but the label. A power of two, so that no bit of others
    changes; types with the range of float32 need none.
    """
    if jnp.finfo(dtype).maxexp > 16:
        return known, 1.0
    weights = jnp.abs(jnp.stack([known.scale, known.dlosses]))
    # What is not finite stays with its tokens. The sum of both is below 2^15, and numbers go up to 2^16.
    largest = jnp.max(jnp.where(jnp.isfinite(weights), weights, 0)) / 2**13
    unit = jax.lax.reduce_precision(largest, exponent_bits=jnp.finfo(largest.dtype).nexp, mantissa_bits=0)
    unit = jnp.where(unit > 0, unit, 1)
    return known._replace(scale=known.scale / unit, dlosses=known.dlosses / unit), unit


def capped(logits: jax.Array, soft_cap: float | None) -> tuple[jax.Array, jax.Array | float]:
    """The soft-capped logits, and their derivative by the logits."""
    if soft_cap is None:
        return logits, 1.0
    parts = jnp.tanh(logits / soft_cap)
    return soft_cap * parts, 1 - parts * parts
