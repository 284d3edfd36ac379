"""The portable form of `linear_scan`."""

import jax
import jax.numpy as jnp


def linear_scan(x: jax.Array, decay: jax.Array, state: jax.Array, *, reverse: bool) -> tuple[jax.Array, jax.Array]:
    """See `api.linear_scan`; shapes as in `reference`, decay broadcastable to `b t d`."""
    decay = jnp.broadcast_to(decay, x.shape)
    if x.shape[1] == 0:
        return x, state
    first = -1 if reverse else 0
    x = x.at[:, first].add(decay[:, first] * state)
    _, h = jax.lax.associative_scan(
        lambda left, right: (right[0] * left[0], right[0] * left[1] + right[1]), (decay, x), axis=1, reverse=reverse
    )
    return h, h[:, 0 if reverse else -1]
