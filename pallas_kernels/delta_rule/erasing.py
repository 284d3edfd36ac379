"""The portable form of `delta_rule` with erase keys of their own, one of `diagonal_low_rank`."""

import jax
import jax.numpy as jnp

from pallas_kernels.diagonal_low_rank import xla


def delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    beta: jax.Array,
    log_decay: jax.Array | None,
    state: jax.Array,
    starts: jax.Array | None,
    scale: float,
    erase: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """See `reference.delta_rule`.

    `S_t = diag(d_t) S_{t-1} + k_t (beta_t v_t - (beta_t d_t e_t)^T S_{t-1})^T`: what is read of the state before it
    decays is read for keys that have decayed, which are no longer than `beta_t e_t`.
    """
    heads, dtype = state.shape[1], state.dtype
    erase, v = (jnp.repeat(array.astype(dtype), heads // array.shape[2], axis=2) for array in (erase, v))
    weighted = beta[..., None]
    reads = -weighted * erase if log_decay is None else -weighted * jnp.exp(log_decay) * erase
    return xla.diagonal_low_rank(q, k, weighted * v, reads, None, log_decay, state, starts, scale)
