"""The inputs of both kernels of `linear_attention` for TPUs."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import tiling
from pallas_kernels.linear_attention.mosaic_tpu.chunk import Chunk
from pallas_kernels.matrix_state import decays
from pallas_kernels.matrix_state.decays import RUN
from pallas_kernels.matrix_state.differentiation import Arrays
from pallas_kernels.matrix_state.mosaic_tpu.plan import Plan, head_counts, operands


class Inputs(NamedTuple):
    """The inputs of both kernels: arrays, references or blocks; `log_decay` only for decays per key channel."""

    q: Any
    k: Any
    v: Any
    rows: Any
    log_decay: Any = None


def plan_of(arrays: Arrays) -> Plan:
    b, h, k, v = arrays.state.shape
    t = arrays.q.shape[2]
    is_vector = arrays.log_decay is not None and arrays.log_decay.shape[3] > 1
    dtype = operands(arrays.q.dtype)
    tile = tiling.linear_attention_tpu(t, k, v, vector=is_vector)
    # With decays of key channels several heads save a sixth at 128 channels, nothing at 64, and spill where decays are
    # strong; both ways of computing scores would be compiled for all of them, three times as long.
    together = 1 if is_vector else tiling.heads_tpu(b, h, head_counts(arrays), k, v, dtype.itemsize)
    return Plan(b, t, h, k, v, tile, dtype, is_vector, arrays.starts is not None, together)


def inputs_of(plan: Plan, arrays: Arrays) -> Inputs:
    decay = arrays.log_decay
    own = None
    if decay is not None and plan.is_vector:
        own = plan.fill(jnp.maximum(decay, decays.LEAST_LOG_DECAY))
    return Inputs(
        q=plan.fill(arrays.q.astype(plan.dtype)),
        k=plan.fill(arrays.k.astype(plan.dtype)),
        v=plan.fill(arrays.v.astype(plan.dtype)),
        rows=decays.rows(None if plan.is_vector else decay, arrays.starts, plan.length, plan.tile.steps),
        log_decay=own,
    )


def chunk_at(plan: Plan, inputs: Inputs, place: Any) -> Chunk:
    """A chunk of every head of a program, heads first."""
    steps = plan.steps_of(place)
    numbers = plan.of_heads(inputs.rows[:, place])
    columns = numbers.swapaxes(1, 2)
    return Chunk(
        q=plan.of_heads(inputs.q[:, steps]),
        k=plan.of_heads(inputs.k[:, steps]),
        v=plan.of_heads(inputs.v[:, steps]),
        rows=numbers,
        columns=columns,
        runs=columns[:, :, RUN : RUN + 1] if plan.documents else None,
        log_decay=None if inputs.log_decay is None else plan.of_heads(inputs.log_decay[:, steps]),
    )


def for_heads[T](plan: Plan, function: Callable[..., T]) -> Callable[..., T]:
    """A function of what one head has, for all heads of a program at once."""
    if plan.together > 1:
        return jax.vmap(function)

    def alone(*arrays: Any) -> T:
        # A mapped axis of one head would change the layouts of blocks of steps.
        found = function(*jax.tree.map(lambda array: array[0], arrays))
        return jax.tree.map(lambda array: array[None], found)

    return alone
