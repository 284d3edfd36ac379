"""The portable form of `cross_entropy`: all logits at once if they are few, else a scan over parts of the tokens."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels import precision, tiling
from pallas_kernels.cross_entropy import vjp


def statistics(hidden: jax.Array, embedding: jax.Array, labels: jax.Array, *, soft_cap: float | None) -> vjp.Statistics:
    """See `reference.statistics`."""
    rows = tiling.cross_entropy(hidden.shape[0], embedding.shape[0])
    if rows is not None:
        return _in_parts(rows)(hidden, embedding, labels, soft_cap=soft_cap)
    return _statistics(soft_cap, hidden, embedding, labels)


@functools.lru_cache
def _in_parts(rows: int) -> Callable[..., vjp.Statistics]:
    """The form that holds the logits of `rows` tokens at a time."""

    def statistics(
        soft_cap: float | None, hidden: jax.Array, embedding: jax.Array, labels: jax.Array
    ) -> vjp.Statistics:
        def part(rows: tuple[jax.Array, jax.Array]) -> vjp.Statistics:
            return _statistics(soft_cap, rows[0], embedding, rows[1])

        found = jax.lax.map(part, (_parts(rows, hidden), _parts(rows, labels)))
        log_normalizers, chosen = (_joined(parts, hidden.shape[0]) for parts in found)
        return log_normalizers, chosen

    def gradients(soft_cap: float | None, hidden: jax.Array, embedding: jax.Array, known: vjp.Known) -> vjp.Gradients:
        dtype = precision.accumulator(hidden, embedding)
        known, unit = vjp.in_units(known, hidden.dtype)

        def part(dembedding: jax.Array, part: tuple[jax.Array, vjp.Known]) -> tuple[jax.Array, jax.Array]:
            hidden, known = part
            logits, slope = vjp.capped(_products(hidden, embedding), soft_cap)
            weights = jnp.exp(logits - known.log_normalizers[:, None])
            onehot = jax.nn.one_hot(known.labels, logits.shape[1], dtype=dtype)
            dlogits = slope * (known.scale[:, None] * weights - known.dlosses[:, None] * onehot)
            dlogits = dlogits.astype(hidden.dtype)
            dembedding += jnp.einsum('no,nd->od', dlogits, hidden, preferred_element_type=dtype)
            return dembedding, jnp.einsum('no,od->nd', dlogits, embedding, preferred_element_type=dtype)

        parts = jax.tree.map(functools.partial(_parts, rows), (hidden, known))
        dembedding, dhidden = jax.lax.scan(part, jnp.zeros(embedding.shape, dtype), parts)
        dhidden = _joined(dhidden, hidden.shape[0])
        return (unit * dhidden).astype(hidden.dtype), (unit * dembedding).astype(embedding.dtype)

    return vjp.differentiable(statistics, gradients)


def _statistics(soft_cap: float | None, hidden: jax.Array, embedding: jax.Array, labels: jax.Array) -> vjp.Statistics:
    logits, _ = vjp.capped(_products(hidden, embedding), soft_cap)
    return jax.nn.logsumexp(logits, axis=-1), jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]


def _products(hidden: jax.Array, embedding: jax.Array) -> jax.Array:
    return jnp.einsum('nd,od->no', hidden, embedding, preferred_element_type=precision.accumulator(hidden, embedding))


def _parts(rows: int, array: jax.Array) -> jax.Array:
    """Pads with zeros and puts token `i` into part `i % parts`, so that tokens stay on their devices."""
    array = jnp.pad(array, ((0, -array.shape[0] % rows), *((0, 0),) * (array.ndim - 1)))
    return array.reshape(rows, -1, *array.shape[1:]).swapaxes(0, 1)


def _joined(parts: jax.Array, n: int) -> jax.Array:
    """The inverse of `_parts`."""
    return parts.swapaxes(0, 1).reshape(-1, *parts.shape[2:])[:n]
