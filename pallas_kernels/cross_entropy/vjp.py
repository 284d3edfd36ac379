"""Differentiation shared by the forms of `cross_entropy` that hold a part of the logits at a time."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

Statistics = tuple[jax.Array, jax.Array]
"""The log-normaliser of every token and the logit of its label, both `n`."""

Gradients = tuple[jax.Array, jax.Array]
"""The gradients of hidden, `n d`, and of embedding, `o d`, in their types."""


class Rule(NamedTuple):
    """The static parameters of a call; see `api.cross_entropy`."""

    z_loss: float
    soft_cap: float | None


class Known(NamedTuple):
    """The per-token operands of the backward pass, each `n`: `dlogits = scale exp(logits - log Z) - dloss onehot`."""

    labels: jax.Array
    log_normalizers: jax.Array
    scale: jax.Array
    dlosses: jax.Array


def differentiable(
    statistics: Callable[[float | None, jax.Array, jax.Array, jax.Array], Statistics],
    gradients: Callable[[float | None, jax.Array, jax.Array, Known], Gradients],
) -> Callable[..., jax.Array]:
    """Returns the loss with its gradient; both functions are given the soft cap, hidden and embedding first.

    The arguments and the log-normaliser of each token are kept; the logits are recomputed. With p their
    softmax and g the gradient of the loss, theirs is `g (1 + 2 z_loss log Z) p - g onehot(label)`.
    """

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def losses(rule: Rule, hidden: jax.Array, embedding: jax.Array, labels: jax.Array) -> jax.Array:
        return save(rule, hidden, embedding, labels)[0]

    def save(
        rule: Rule, hidden: jax.Array, embedding: jax.Array, labels: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        log_normalizers, chosen = statistics(rule.soft_cap, hidden, embedding, labels)
        exists = (labels >= 0) & (labels < embedding.shape[0])
        losses = log_normalizers - jnp.where(exists, chosen, jnp.nan) + rule.z_loss * log_normalizers**2
        return losses, (hidden, embedding, labels, log_normalizers)

    def pull(rule: Rule, saved: tuple[jax.Array, ...], dlosses: jax.Array) -> tuple[jax.Array, jax.Array, None]:
        hidden, embedding, labels, log_normalizers = saved
        known = Known(labels, log_normalizers, dlosses * (1 + 2 * rule.z_loss * log_normalizers), dlosses)
        return *gradients(rule.soft_cap, hidden, embedding, known), None

    losses.defvjp(save, pull)

    def cross_entropy(
        hidden: jax.Array, embedding: jax.Array, labels: jax.Array, *, z_loss: float, soft_cap: float | None
    ) -> jax.Array:
        return losses(Rule(z_loss, soft_cap), hidden, embedding, labels)

    return cross_entropy


def capped(logits: jax.Array, soft_cap: float | None) -> tuple[jax.Array, jax.Array | float]:
    """The soft-capped logits, and their derivative by the logits."""
    if soft_cap is None:
        return logits, 1.0
    parts = jnp.tanh(logits / soft_cap)
    return soft_cap * parts, 1 - parts * parts
