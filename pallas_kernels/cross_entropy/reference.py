"""The definition of `cross_entropy`: every logit at once."""

import jax
import jax.numpy as jnp

from pallas_kernels import precision


def statistics(
    hidden: jax.Array, embedding: jax.Array, labels: jax.Array, *, soft_cap: float | None
) -> tuple[jax.Array, jax.Array]:
    """Returns `log Z` and `logits[label]`, both `n`; `hidden` is `n d`, `embedding` `o d`, `labels` `n`."""
    dtype = precision.accumulator(hidden, embedding)
    logits = jnp.einsum('nd,od->no', hidden.astype(dtype), embedding.astype(dtype))
    if soft_cap is not None:
        logits = soft_cap * jnp.tanh(logits / soft_cap)
    chosen = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
    return jax.nn.logsumexp(logits, axis=-1), chosen
