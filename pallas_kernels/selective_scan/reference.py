"""The definition of `selective_scan`: one step after the other."""

import jax
import jax.numpy as jnp


def selective_scan(
    x: jax.Array, dt: jax.Array, A: jax.Array, B: jax.Array, C: jax.Array, state: jax.Array, keep: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns `y_t = h_t C_t`, `b t d`, and the last h, `b d n`, of `h_t = keep_t exp(dt_t A) h_{t-1} + dt_t x_t B_t`.

    `x`, `dt` are `b t d`; `A` is `d n`; `B`, `C` are `b t n`; `state` is `b d n`; `keep`, `b t`, is 0 where a document
    begins and 1 elsewhere. All of one type.
    """

    def step(h: jax.Array, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        x_t, dt_t, B_t, C_t, keep_t = inputs
        decay = keep_t[:, None, None] * jnp.exp(dt_t[:, :, None] * A[None])
        h = decay * h + (dt_t * x_t)[:, :, None] * B_t[:, None, :]
        return h, jnp.einsum('bdn,bn->bd', h, C_t)

    inputs = tuple(jnp.moveaxis(array, 1, 0) for array in (x, dt, B, C, keep))
    final, y = jax.lax.scan(step, state, inputs)
    return jnp.moveaxis(y, 0, 1), final
