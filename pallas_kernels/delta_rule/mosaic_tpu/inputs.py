"""The inputs of both kernels of `delta_rule` for TPUs, and the step of one chunk."""

from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp

from pallas_kernels import tiling
from pallas_kernels.delta_rule import vjp
from pallas_kernels.delta_rule.chunk import EXACT, Chunk, step
from pallas_kernels.delta_rule.products import Form
from pallas_kernels.matrix_state.mosaic_tpu.plan import Plan


class Inputs(NamedTuple):
    """The inputs of both kernels: arrays, references or blocks.

    Attributes:
      q, k, v: `b h t k` and `b h t v`.
      rows: per-step numbers, float32 `b h l 8 c`: beta, the log decay shared by key channels, and the number of
        document starts so far in the chunk.
      log_decay: `b h t k`, only for decays per key channel.
    """

    q: Any
    k: Any
    v: Any
    rows: Any
    log_decay: Any


BETA, DECAY, RUN, COUNT = 0, 1, 2, 8
"""The number of rows, with padding."""


class Differentiable(NamedTuple):
    """The inputs of a chunk that have gradients; `beta` and a `log_decay` shared by key channels are rows `1 c`."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    beta: jax.Array
    log_decay: jax.Array | None
    state: jax.Array


def chunk_at(plan: Plan, decays: bool, inputs: Inputs, place: Any, state: jax.Array) -> Differentiable:
    at = pl.ds(place * plan.tile.steps, plan.tile.steps)
    row = inputs.rows[place, DECAY : DECAY + 1] if decays else None
    return Differentiable(
        # In float32, so that gradients are not rounded before they are summed.
        q=inputs.q[at].astype(jnp.float32),
        k=inputs.k[at].astype(jnp.float32),
        v=inputs.v[at].astype(jnp.float32),
        beta=inputs.rows[place, BETA : BETA + 1],
        log_decay=row if inputs.log_decay is None else inputs.log_decay[at],
        state=state,
    )


def runs_of(inputs: Inputs, place: Any) -> jax.Array:
    return inputs.rows[place, RUN : RUN + 1].swapaxes(0, 1)


def step_of(
    plan: Plan, runs: jax.Array, here: Differentiable, solved: jax.Array | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    decay = here.log_decay
    if decay is not None and not plan.is_vector:
        decay = decay.swapaxes(0, 1)
    chunk = Chunk(here.q, here.k, here.beta.swapaxes(0, 1), decay, runs)
    form = Form(plan.dtype, jnp.float32, EXACT if plan.dtype == jnp.float32 else None)
    return step(chunk, here.v, here.state, form, solved)


def has_decays(arrays: vjp.Arrays) -> bool:
    return arrays.log_decay is not None


def plan_of(arrays: vjp.Arrays) -> Plan:
    b, h, k, v = arrays.state.shape
    t = arrays.q.shape[2]
    is_vector = arrays.log_decay is not None and arrays.log_decay.shape[3] > 1
    # Matrix units support bfloat16; float16 is computed in float32.
    dtype = jnp.bfloat16 if arrays.q.dtype == jnp.bfloat16 else jnp.float32
    return Plan(b, t, h, k, v, tiling.delta_rule_tpu(t, k, v), dtype, is_vector)


def inputs_of(plan: Plan, arrays: vjp.Arrays) -> Inputs:
    decay = arrays.log_decay
    return Inputs(
        q=fill(plan, arrays.q.astype(plan.dtype)),
        k=fill(plan, arrays.k.astype(plan.dtype)),
        v=fill(plan, arrays.v.astype(plan.dtype)),
        rows=_rows(plan, arrays.beta, None if decay is None or plan.is_vector else decay[..., 0], arrays.starts),
        log_decay=None if decay is None or not plan.is_vector else fill(plan, decay),
    )


def _rows(plan: Plan, beta: jax.Array, log_decay: jax.Array | None, starts: jax.Array | None) -> jax.Array:
    """Makes `Inputs.rows`."""

    def cut(array: jax.Array) -> jax.Array:
        array = jnp.pad(array, ((0, 0), (0, 0), (0, plan.length - plan.t)))
        return array.reshape(*array.shape[:2], -1, plan.tile.steps)

    shape = (plan.b, plan.h, plan.length // plan.tile.steps, plan.tile.steps)
    zero = jnp.zeros((1, 1, 1, 1), jnp.float32)
    decay = zero if log_decay is None else cut(log_decay)
    runs = zero if starts is None else jnp.cumsum(cut(starts[:, None]), axis=-1, dtype=jnp.float32)
    rows = [jnp.broadcast_to(row, shape) for row in (cut(beta), decay, runs, *(zero,) * (COUNT - 3))]
    return jnp.stack(rows, axis=3)


def fill(plan: Plan, array: jax.Array) -> jax.Array:
    """Pads time with steps that neither write nor decay."""
    return jnp.pad(array, ((0, 0), (0, 0), (0, plan.length - array.shape[2]), (0, 0)))
