"""The portable form of `cross_entropy`: all logits at once when they are few, else a scan over groups of tokens.

The scan keeps one number a token, and computes the logits of a group again in the backward pass (compare Wijmans et al.,
2025, arXiv 2411.09009).
"""

import jax
import jax.numpy as jnp

from pallas_kernels import precision, tiling
from pallas_kernels.cross_entropy import vjp
from pallas_kernels.cross_entropy.vjp import Rule

Kept = tuple[jax.Array, jax.Array | None]
"""The log-normaliser, `n`, and the logits, `n o`, when there are few."""


def forward(rule: Rule, hidden: jax.Array, embedding: jax.Array, labels: jax.Array) -> tuple[jax.Array, Kept]:
    """Returns the loss and what the backward pass uses."""
    n, rows = hidden.shape[0], tiling.cross_entropy(hidden.shape[0], embedding.shape[0]).rows
    if n <= rows:
        logits = _logits(rule, hidden, embedding)
        loss, log_normalizer = _loss(rule, logits, labels)
        return loss, (log_normalizer, logits)

    def group(_: None, inputs: tuple[jax.Array, jax.Array]) -> tuple[None, tuple[jax.Array, jax.Array]]:
        hidden, labels = inputs
        return None, _loss(rule, _logits(rule, hidden, embedding), labels)

    _, (loss, log_normalizer) = jax.lax.scan(group, None, (_grouped(hidden, rows), _grouped(labels, rows)))
    return loss.reshape(-1)[:n], (log_normalizer.reshape(-1)[:n], None)


def backward(
    rule: Rule, hidden: jax.Array, embedding: jax.Array, labels: jax.Array, kept: Kept, dloss: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the gradients of hidden and embedding."""
    log_normalizer, logits = kept
    n, rows = hidden.shape[0], tiling.cross_entropy(hidden.shape[0], embedding.shape[0]).rows
    if n <= rows:
        dlogits = _dlogits(rule, logits, labels, log_normalizer, dloss)
        dhidden, dembedding = _pull(dlogits, hidden, embedding)
        return dhidden.astype(hidden.dtype), dembedding.T.astype(embedding.dtype)

    def group(total: jax.Array, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        hidden, labels, log_normalizer, dloss = inputs
        dlogits = _dlogits(rule, _logits(rule, hidden, embedding), labels, log_normalizer, dloss)
        dhidden, dembedding = _pull(dlogits, hidden, embedding)
        return total + dembedding, dhidden.astype(hidden.dtype)

    total = jnp.zeros(embedding.shape[::-1], dloss.dtype)
    inputs = tuple(_grouped(array, rows) for array in (hidden, labels, log_normalizer, dloss))
    total, dhidden = jax.lax.scan(group, total, inputs)
    return dhidden.reshape(-1, hidden.shape[1])[:n], total.T.astype(embedding.dtype)


cross_entropy = vjp.differentiable(forward, backward)


def _logits(rule: Rule, hidden: jax.Array, embedding: jax.Array) -> jax.Array:
    dtype = precision.accumulator(hidden, embedding)
    logits = jnp.einsum('nd,od->no', hidden.astype(dtype), embedding.astype(dtype))
    return logits if rule.soft_cap is None else rule.soft_cap * jnp.tanh(logits / rule.soft_cap)


def _loss(rule: Rule, logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    log_normalizer = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
    return log_normalizer - chosen + rule.z_loss * log_normalizer**2, log_normalizer


def _dlogits(
    rule: Rule, logits: jax.Array, labels: jax.Array, log_normalizer: jax.Array, dloss: jax.Array
) -> jax.Array:
    """The gradient of the logits before the cap."""
    probabilities = jnp.exp(logits - log_normalizer[:, None])
    chosen = labels[:, None] == jnp.arange(logits.shape[1])[None]
    dlog_normalizer = dloss * (1 + 2 * rule.z_loss * log_normalizer)
    dlogits = dlog_normalizer[:, None] * probabilities - jnp.where(chosen, dloss[:, None], 0)
    return dlogits if rule.soft_cap is None else dlogits * (1 - (logits / rule.soft_cap) ** 2)


def _pull(dlogits: jax.Array, hidden: jax.Array, embedding: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The gradients of hidden, `n d`, and of the transposed embedding, `d o`."""
    dhidden = jnp.einsum('no,od->nd', dlogits, embedding.astype(dlogits.dtype))
    return dhidden, jnp.einsum('nd,no->do', hidden.astype(dlogits.dtype), dlogits)


def _grouped(array: jax.Array, rows: int) -> jax.Array:
    """`n ...` as `groups rows ...`, zeros behind."""
    array = jnp.pad(array, ((0, -array.shape[0] % rows),) + ((0, 0),) * (array.ndim - 1))
    return array.reshape(-1, rows, *array.shape[1:])
