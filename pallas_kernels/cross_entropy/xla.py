"""The portable form of `cross_entropy`: all logits at once where they are few, else a scan over parts of the tokens."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import precision, tiling


class Rule(NamedTuple):
    """What is fixed when a call is traced; see `api.cross_entropy`."""

    z_loss: float
    soft_cap: float | None
    rows: int


def cross_entropy(
    hidden: jax.Array, embedding: jax.Array, labels: jax.Array, *, z_loss: float, soft_cap: float | None
) -> jax.Array:
    """See `reference.cross_entropy`."""
    n, o = hidden.shape[0], embedding.shape[0]
    rows = tiling.cross_entropy(n, o)
    rule = Rule(z_loss, soft_cap, rows or n)
    return _losses(rule, hidden, embedding, labels)[0] if rows is None else _in_parts(rule, hidden, embedding, labels)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_parts(rule: Rule, hidden: jax.Array, embedding: jax.Array, labels: jax.Array) -> jax.Array:
    return _forward(rule, hidden, embedding, labels)[0]


def _forward(rule: Rule, hidden: jax.Array, embedding: jax.Array, labels: jax.Array) -> tuple[jax.Array, tuple]:
    def part(rows: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return _losses(rule, rows[0], embedding, rows[1])

    losses, log_normalizers = jax.lax.map(part, (_parts(rule, hidden), _parts(rule, labels)))
    n = hidden.shape[0]
    return _joined(losses, n), (hidden, embedding, labels, _joined(log_normalizers, n))


def _backward(rule: Rule, kept: tuple, dlosses: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    """Kept are the arguments and one number a token; the logits of each part are computed again."""
    hidden, embedding, labels, log_normalizers = kept
    dtype = precision.accumulator(hidden, embedding)

    def part(dembedding: jax.Array, rows: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        hidden, labels, log_normalizer, dloss = rows
        logits, pull = jax.vjp(lambda x: _capped(x, rule.soft_cap), _products(hidden, embedding))
        weights = jnp.exp(logits - log_normalizer[:, None]) * (1 + 2 * rule.z_loss * log_normalizer)[:, None]
        (dlogits,) = pull(dloss[:, None] * (weights - jax.nn.one_hot(labels, logits.shape[1], dtype=dtype)))
        dlogits = dlogits.astype(hidden.dtype)
        dembedding += jnp.einsum('no,nd->od', dlogits, hidden, preferred_element_type=dtype)
        return dembedding, jnp.einsum('no,od->nd', dlogits, embedding, preferred_element_type=dtype)

    rows = tuple(_parts(rule, array) for array in (hidden, labels, log_normalizers, dlosses))
    dembedding, dhidden = jax.lax.scan(part, jnp.zeros(embedding.shape, dtype), rows)
    return _joined(dhidden, hidden.shape[0]).astype(hidden.dtype), dembedding.astype(embedding.dtype), None


_in_parts.defvjp(_forward, _backward)


def _losses(rule: Rule, hidden: jax.Array, embedding: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The loss and the log-normaliser of every token."""
    logits = _capped(_products(hidden, embedding), rule.soft_cap)
    log_normalizer = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
    return log_normalizer - chosen + rule.z_loss * log_normalizer**2, log_normalizer


def _products(hidden: jax.Array, embedding: jax.Array) -> jax.Array:
    return jnp.einsum('nd,od->no', hidden, embedding, preferred_element_type=precision.accumulator(hidden, embedding))


def _capped(logits: jax.Array, soft_cap: float | None) -> jax.Array:
    return logits if soft_cap is None else soft_cap * jnp.tanh(logits / soft_cap)


def _parts(rule: Rule, array: jax.Array) -> jax.Array:
    """Zeros put behind, then token `i` in part `i % parts`: tokens that lie on different devices stay there."""
    array = jnp.pad(array, ((0, -array.shape[0] % rule.rows), *((0, 0),) * (array.ndim - 1)))
    return array.reshape(rule.rows, -1, *array.shape[1:]).swapaxes(0, 1)


def _joined(parts: jax.Array, n: int) -> jax.Array:
    """The inverse of `_parts`."""
    return parts.swapaxes(0, 1).reshape(-1, *parts.shape[2:])[:n]
