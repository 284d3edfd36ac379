"""The portable form of `cross_entropy`."""

import jax

from pallas_kernels.cross_entropy import reference


def cross_entropy(
    hidden: jax.Array, embedding: jax.Array, labels: jax.Array, *, z_loss: float, soft_cap: float | None
) -> jax.Array:
    """See `reference.cross_entropy`."""
    return reference.cross_entropy(hidden, embedding, labels, z_loss=z_loss, soft_cap=soft_cap)
