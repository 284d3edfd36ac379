"""The selective scan whose decays may be negative, which that of `cores`, by the logarithms of decays, cannot be."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from attnlab.functional import cores
from attnlab.functional.precision import wide_dtype
from attnlab.functional.recomputed import recomputed
from attnlab.typing import Segments, Sequence


def signed_scan(
    x: Sequence,
    dt: Float[Array, 'b t d'],
    A: Float[Array, 'd n'],
    B: Float[Array, 'b t n'],
    C: Float[Array, 'b t n'],
    D: Float[Array, ' d'] | None = None,
    *,
    state: Float[Array, 'b d n'] | None = None,
    segments: Segments | None = None,
    implementation: str | None = None,
) -> tuple[Sequence, Float[Array, 'b d n']]:
    """`h_t = (2 exp(dt_t A) - 1) h_{t-1} + dt_t x_t B_t`, `y_t = h_t C_t + D x_t`: decays from -1 to 1.

    A `linear_scan` of the `d n` states, which are held for every token while it runs, and computed again in the
    backward pass. Arguments and results are those of `pallas_kernels.selective_scan`; `implementation` is of the scan.
    Grazzi et al. 2024, https://arxiv.org/abs/2411.12537.
    """
    dtype = wide_dtype(x.dtype)
    rows, length, channels = x.shape
    states = A.shape[1]
    if state is None:
        state = jnp.zeros((rows, channels, states), dtype)

    @recomputed
    def run(x: Array, dt: Array, A: Array, B: Array, C: Array, state: Array) -> tuple[Array, Array]:
        decay = 2 * jnp.exp(dt[..., None] * A[None, None]) - 1
        written = (dt * x)[..., None] * B[:, :, None]
        h, last = cores.linear_scan(
            written.reshape(rows, length, -1),
            decay.reshape(rows, length, -1),
            state=state.reshape(rows, -1),
            segments=segments,
            implementation=implementation,
        )
        y = jnp.einsum('btdn,btn->btd', h.reshape(written.shape), C, precision='highest')
        return y, last.reshape(state.shape)

    wide = x.astype(dtype)
    y, last = run(wide, *(each.astype(dtype) for each in (dt, A, B, C, state)))
    if D is not None:
        y = y + wide * D.astype(dtype)[None, None]
    return y.astype(x.dtype), last
