"""The portable form of `delta_rule`: groups of chunks in order, all that does not wait for the state at once.

Kept for the backward pass are the inputs and the state before each group; all else is computed again, a group at a
time.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import target, tiling
from pallas_kernels.delta_rule.chunk import Chunk, inverse, weights
from pallas_kernels.delta_rule.products import Form, multiply
from pallas_kernels.linear_attention.chunks import cut, join

Inputs = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array | None, jax.Array | None]
"""q, k, v, beta, log_decay and starts, as in `reference.delta_rule`, beta `b t h 1`."""


def delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    beta: jax.Array,
    log_decay: jax.Array | None,
    state: jax.Array,
    starts: jax.Array | None,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """See `reference.delta_rule`."""
    b, t = q.shape[:2]
    if t == 0:
        return jnp.zeros((b, 0, state.shape[1], v.shape[3]), state.dtype), state
    _, h, *kv = state.shape
    tile = tiling.delta_rule(b, t, h * max(kv), target.current().platform)
    if log_decay is not None:
        log_decay = jnp.broadcast_to(log_decay, (log_decay.shape[0], t, *log_decay.shape[2:]))

    def group(state: jax.Array, inputs: Inputs) -> tuple[jax.Array, jax.Array]:
        final, o = _group(state, inputs, tile.steps)
        return final, scale * o

    inputs = (q, k, v, beta[..., None], log_decay, starts)
    state = state.swapaxes(2, 3)
    if t <= tile.group:
        final, o = jax.checkpoint(group)(state, inputs)
        return o[:, :t], final.swapaxes(2, 3)
    final, o = jax.lax.scan(jax.checkpoint(group, prevent_cse=False), state, by_group(inputs, tile.group))
    return jnp.moveaxis(o, 0, 1).reshape(b, -1, *o.shape[3:])[:, :t], final.swapaxes(2, 3)


def _group(state: jax.Array, inputs: Inputs, steps: int) -> tuple[jax.Array, jax.Array]:
    """The state after a group, `b h v k` as the one before, and what its steps read, `b t h v`."""
    q, k, v, beta, log_decay, starts = inputs
    h, dtype = state.shape[1], state.dtype
    form = Form(dtype, dtype)
    # The barrier keeps the compiler from laying the same array out anew for every use.
    chunks = jax.lax.optimization_barrier(cut(q, k, v, log_decay, starts, steps))
    q, k, v = (jnp.repeat(array.astype(dtype), h // array.shape[2], axis=2) for array in chunks[:3])
    beta = cut(beta, beta, beta, None, None, steps).q
    does = weights(Chunk(q, k, beta, chunks.log_decay, chunks.runs), form)
    solved = inverse(does.erased, target.current().platform)
    written = multiply(solved, beta * v, 'nn', form)
    read = multiply(solved, beta * does.k, 'nn', form)

    def chunk(state: jax.Array, does: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        written, read, writes, factor = does
        values = written - multiply(read, state, 'nt', form)
        return factor * state + multiply(values, writes, 'tn', form), (state, values)

    by_chunk = tuple(jnp.moveaxis(array, 1, 0) for array in (written, read, does.writes, does.factor))
    final, found = jax.lax.scan(chunk, state, by_chunk)
    before, values = (jnp.moveaxis(array, 0, 1) for array in found)
    return final, join(multiply(does.q, before, 'nt', form) + multiply(does.among, values, 'nn', form))


def by_group(inputs: Inputs, size: int) -> Inputs:
    """`b t ...` as `groups b size ...`; steps of padding neither write nor decay."""

    def arrange(array: jax.Array) -> jax.Array:
        array = jnp.pad(array, ((0, 0), (0, -array.shape[1] % size)) + ((0, 0),) * (array.ndim - 2))
        return jnp.moveaxis(array.reshape(array.shape[0], -1, size, *array.shape[2:]), 1, 0)

    return jax.tree.map(arrange, inputs)
