"""The definition of `cross_entropy`: every logit at once."""

import jax
import jax.numpy as jnp

from pallas_kernels import precision
from pallas_kernels.cross_entropy.vjp import Rule


def cross_entropy(rule: Rule, hidden: jax.Array, embedding: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns `log Z - logits[label] + z_loss (log Z)^2`, `n`; `hidden` is `n d`, `embedding` `o d`, `labels` `n`."""
    dtype = precision.accumulator(hidden, embedding)
    logits = jnp.einsum('nd,od->no', hidden.astype(dtype), embedding.astype(dtype))
    if rule.soft_cap is not None:
        logits = rule.soft_cap * jnp.tanh(logits / rule.soft_cap)
    log_normalizer = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
    return log_normalizer - chosen + rule.z_loss * log_normalizer**2
