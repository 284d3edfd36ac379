"""The portable form of `linear_attention`."""

import jax

from pallas_kernels.linear_attention import reference


def linear_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array | None, state: jax.Array, starts: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """See `reference.linear_attention`."""
    return reference.linear_attention(q, k, v, log_decay, state, starts)
