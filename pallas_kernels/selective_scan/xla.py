"""The portable form of `selective_scan`."""

import jax

from pallas_kernels.selective_scan import reference


def selective_scan(
    x: jax.Array, dt: jax.Array, A: jax.Array, B: jax.Array, C: jax.Array, state: jax.Array, keep: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """See `reference.selective_scan`."""
    return reference.selective_scan(x, dt, A, B, C, state, keep)
