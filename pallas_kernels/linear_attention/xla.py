"""The portable form of `linear_attention`: groups of chunks in order, all matrix products of a group at once.

Kept for the backward pass are the inputs and the state before each group; all else is computed again, a group at a
time.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import target, tiling
from pallas_kernels.linear_attention import scalar, vector
from pallas_kernels.linear_attention.chunks import cut, join
from pallas_kernels.linear_scan.xla import linear_scan

Inputs = tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, jax.Array | None]
"""q, k, v, log_decay and starts, as in `reference.linear_attention`."""


def linear_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array | None, state: jax.Array, starts: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """See `reference.linear_attention`."""
    b, t = q.shape[:2]
    if t == 0:
        return jnp.zeros((b, 0, state.shape[1], v.shape[3]), state.dtype), state
    is_vector = log_decay is not None and log_decay.shape[3] > 1
    _, h, *kv = state.shape
    tile = tiling.linear_attention(b, t, h * max(kv), target.current().platform, vector=is_vector)
    if log_decay is not None:
        log_decay = jnp.broadcast_to(log_decay, (log_decay.shape[0], t, *log_decay.shape[2:]))

    def group(state: jax.Array, inputs: Inputs) -> tuple[jax.Array, jax.Array]:
        # The barrier keeps the compiler from laying the same array out anew for every use.
        chunks = jax.lax.optimization_barrier(cut(*inputs, tile.steps))
        form = vector if is_vector else scalar
        written, factors = form.writes(chunks)
        after, final = linear_scan(written, factors, state, False)
        before = jnp.concatenate([state[:, None], after[:, :-1]], axis=1)
        return final, join(form.outputs(chunks, before))

    inputs = (q, k, v, log_decay, starts)
    if t <= tile.group:
        final, o = jax.checkpoint(group)(state, inputs)
        return o[:, :t], final
    final, o = jax.lax.scan(jax.checkpoint(group, prevent_cse=False), state, _by_group(inputs, tile.group))
    return jnp.moveaxis(o, 0, 1).reshape(b, -1, *o.shape[3:])[:, :t], final


def _by_group(inputs: Inputs, size: int) -> Inputs:
    """`b t ...` as `groups b size ...`; steps of padding neither write nor decay."""

    def arrange(array: jax.Array) -> jax.Array:
        array = jnp.pad(array, ((0, 0), (0, -array.shape[1] % size)) + ((0, 0),) * (array.ndim - 2))
        return jnp.moveaxis(array.reshape(array.shape[0], -1, size, *array.shape[2:]), 1, 0)

    return jax.tree.map(arrange, inputs)
