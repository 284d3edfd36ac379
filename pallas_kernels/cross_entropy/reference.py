"""The definition of `cross_entropy`: every logit at once."""

import jax
import jax.numpy as jnp

from pallas_kernels import precision


def cross_entropy(
    hidden: jax.Array, embedding: jax.Array, labels: jax.Array, *, z_loss: float, soft_cap: float | None
) -> jax.Array:
    """Returns `log Z - logits[label] + z_loss (log Z)^2`, `n`; `hidden` is `n d`, `embedding` `o d`, `labels` `n`."""
    dtype = precision.accumulator(hidden, embedding)
    logits = jnp.einsum('nd,od->no', hidden.astype(dtype), embedding.astype(dtype))
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    log_normalizer = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
    return log_normalizer - chosen + z_loss * log_normalizer**2
