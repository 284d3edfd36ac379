"""The portable form of `linear_attention`: chunks of time, all matrix products outside the scan over chunks."""

import jax
import jax.numpy as jnp

from pallas_kernels import precision, tiling
from pallas_kernels.linear_attention import scalar, vector
from pallas_kernels.linear_attention.chunks import cut, join
from pallas_kernels.linear_scan.xla import linear_scan


def linear_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array | None, state: jax.Array, starts: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """See `reference.linear_attention`.

    Kept for the backward pass are the inputs and the states between chunks; what happens inside chunks is computed again.
    """
    form = scalar if log_decay is None or log_decay.shape[3] == 1 else vector
    chunks = cut(q, k, v, log_decay, starts, tiling.linear_attention(q.shape[1]).steps)
    written, factors = jax.checkpoint(form.writes)(chunks)
    after, final = linear_scan(written, factors, state, False)
    before = jnp.concatenate([state[:, None], after[:, :-1]], axis=1)
    return join(jax.checkpoint(form.outputs)(chunks, before), q.shape[1]), final
