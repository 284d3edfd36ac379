"""`delta_rule` with erase keys of their own, by forms of `diagonal_low_rank`: its kernels, and a step alone."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Form = Callable[..., tuple[jax.Array, jax.Array]]


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
    *,
    run: Form,
    operands: jnp.dtype | None = None,
) -> tuple[jax.Array, jax.Array]:
    """See `reference.delta_rule`.

    `S_t = diag(d_t) S_{t-1} + k_t (beta_t v_t - (beta_t d_t e_t)^T S_{t-1})^T`: what is read of the state before it
    decays is read for keys that have decayed, which are no longer than `beta_t e_t`.

    `run` is the form; what it is given has the type `operands`, or that of the state.
    """
    heads, dtype = state.shape[1], state.dtype
    erase, v = (jnp.repeat(array.astype(dtype), heads // array.shape[2], axis=2) for array in (erase, v))
    weighted = beta[..., None]
    reads = -weighted * erase if log_decay is None else -weighted * jnp.exp(log_decay) * erase
    reads, v = (array.astype(operands or dtype) for array in (reads, weighted * v))
    return run(q, k, v, reads, None, log_decay, state, starts, scale)


def by_kernels(run: Form) -> Form:
    """The same by a kernel, whose operands are of the type of the arguments."""

    def form(q: jax.Array, k: jax.Array, v: jax.Array, *others: Any) -> tuple[jax.Array, jax.Array]:
        operands = jnp.result_type(q, k, v, others[-1])
        return delta_rule(q, k, v, *others, run=run, operands=operands)

    return form
