"""The definition of `linear_scan`, step by step."""

import jax
import jax.numpy as jnp

from pallas_kernels import precision


def linear_scan(x: jax.Array, decay: jax.Array, state: jax.Array, reverse: bool) -> tuple[jax.Array, jax.Array]:
    """Returns every h of `h_t = decay_t h_{t-1} + x_t`, `b t d`, and the last one computed, `b d`.

    `x` is `b t d`, `decay` broadcastable to it, `state` is `b d`.
    """
    operands = (x, decay, state)
    x, decay, state = (array.astype(precision.accumulator(*operands)) for array in operands)

    def step(h: jax.Array, inputs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x_t, decay_t = inputs
        h = decay_t * h + x_t
        return h, h

    decay = jnp.broadcast_to(decay, x.shape)
    final, h = jax.lax.scan(step, state, (jnp.moveaxis(x, 1, 0), jnp.moveaxis(decay, 1, 0)), reverse=reverse)
    return jnp.moveaxis(h, 0, 1), final
