"""The definition of `selective_scan`, step by step."""

import jax
import jax.numpy as jnp

from pallas_kernels import precision
from pallas_kernels.selective_scan.vjp import Operands, Outputs


def selective_scan(operands: Operands, starts: jax.Array | None) -> Outputs:
    """Returns `y_t = h_t C_t` and the last h of `h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t`.

    h is zero before a token marked in `starts`.
    """
    x, dt, A, B, C, state = (array.astype(precision.accumulator(*operands)) for array in operands)
    if starts is None:
        starts = jnp.zeros(x.shape[:2], bool)

    def step(h: jax.Array, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        x_t, dt_t, B_t, C_t, start_t = inputs
        h = jnp.where(start_t[:, None, None], 0, h)
        h = jnp.exp(dt_t[:, :, None] * A[None]) * h + (dt_t * x_t)[:, :, None] * B_t[:, None, :]
        return h, jnp.einsum('bdn,bn->bd', h, C_t)

    final, y = jax.lax.scan(step, state, tuple(jnp.moveaxis(array, 1, 0) for array in (x, dt, B, C, starts)))
    return jnp.moveaxis(y, 0, 1), final
