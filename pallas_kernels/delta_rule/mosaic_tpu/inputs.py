"""The inputs of both kernels of `delta_rule` for TPUs, and the step of one chunk."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import cost, tiling
from pallas_kernels.delta_rule import vjp
from pallas_kernels.delta_rule.chunk import EXACT, Chunk, step
from pallas_kernels.delta_rule.products import Form
from pallas_kernels.matrix_state.mosaic_tpu import solving
from pallas_kernels.matrix_state.mosaic_tpu.plan import Plan
from pallas_kernels.matrix_state.mosaic_tpu.solving import DECAY, RUN, fill

BETA = solving.OTHERS
"""The row of `Inputs.rows` with beta."""


class Inputs(NamedTuple):
    """The inputs of both kernels: arrays, references or blocks.

    Attributes:
      q, k, v: `b h t k` and `b h t v`.
      rows: see `solving.rows`.
      log_decay: `b h t k`, only for decays per key channel.
    """

    q: Any
    k: Any
    v: Any
    rows: Any
    log_decay: Any


class Differentiable(NamedTuple):
    """The inputs of a chunk that have gradients; `beta` and a `log_decay` shared by key channels are rows `1 c`."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    beta: jax.Array
    log_decay: jax.Array | None
    state: jax.Array


def core_of(arrays: vjp.Arrays, scale: float) -> solving.Core:
    plan, decays = plan_of(arrays), arrays.log_decay is not None
    return solving.Core(
        name='delta_rule',
        plan=plan,
        cost=plan.cost(cost.delta_rule, decays),
        scale=scale,
        chunk_at=functools.partial(_chunk_at, plan, decays),
        step=functools.partial(_step, plan),
        put=functools.partial(_put, plan),
    )


def _chunk_at(plan: Plan, decays: bool, inputs: Inputs, place: Any, state: jax.Array) -> Differentiable:
    at = solving.steps_at(plan, place)
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


def _step(
    plan: Plan, inputs: Inputs, place: Any, here: Differentiable, solved: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    decay = here.log_decay
    if decay is not None and not plan.is_vector:
        decay = decay.swapaxes(0, 1)
    chunk = Chunk(here.q, here.k, here.beta.swapaxes(0, 1), decay, solving.column(inputs.rows, place, RUN))
    form = Form(plan.dtype, jnp.float32, EXACT if plan.dtype == jnp.float32 else None)
    return step(chunk, here.v, here.state, form, solved)


def _put(plan: Plan, gradients: Inputs, place: Any, found: Differentiable) -> None:
    at = solving.steps_at(plan, place)
    gradients.q[at] = found.q.astype(gradients.q.dtype)
    gradients.k[at] = found.k.astype(gradients.k.dtype)
    gradients.v[at] = found.v.astype(gradients.v.dtype)
    gradients.rows[place, BETA : BETA + 1] = found.beta
    if gradients.log_decay is not None:
        gradients.log_decay[at] = found.log_decay
    elif found.log_decay is not None:
        gradients.rows[place, DECAY : DECAY + 1] = found.log_decay


def plan_of(arrays: vjp.Arrays) -> Plan:
    b, h, k, v = arrays.state.shape
    t = arrays.q.shape[2]
    is_vector = arrays.log_decay is not None and arrays.log_decay.shape[3] > 1
    return Plan(b, t, h, k, v, tiling.delta_rule_tpu(t, k, v), solving.operands(arrays.q.dtype), is_vector)


def inputs_of(plan: Plan, arrays: vjp.Arrays) -> Inputs:
    decay = arrays.log_decay
    return Inputs(
        q=fill(plan, arrays.q.astype(plan.dtype)),
        k=fill(plan, arrays.k.astype(plan.dtype)),
        v=fill(plan, arrays.v.astype(plan.dtype)),
        rows=solving.rows(plan, decay, arrays.starts, arrays.beta),
        log_decay=None if decay is None or not plan.is_vector else fill(plan, decay),
    )
