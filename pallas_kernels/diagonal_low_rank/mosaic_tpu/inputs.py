"""The inputs of both kernels of `diagonal_low_rank` for TPUs, and what they do in a chunk."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import cost, tiling
from pallas_kernels.delta_rule.chunk import EXACT
from pallas_kernels.delta_rule.products import Form
from pallas_kernels.diagonal_low_rank import vjp
from pallas_kernels.diagonal_low_rank.chunk import Chunk
from pallas_kernels.diagonal_low_rank.step import step
from pallas_kernels.matrix_state.mosaic_tpu import solving
from pallas_kernels.matrix_state.mosaic_tpu.plan import Plan
from pallas_kernels.matrix_state.mosaic_tpu.solving import DECAY, RUN, fill


class Inputs(NamedTuple):
    """The inputs of both kernels: arrays, references or blocks.

    Attributes:
      q, k, v, a, b: `b h t k` and `b h t v`; b is `None` where it is k.
      rows: see `solving.rows`.
      log_decay: `b h t k`, only for decays per key channel.
    """

    q: Any
    k: Any
    v: Any
    a: Any
    b: Any
    rows: Any
    log_decay: Any


class Differentiable(NamedTuple):
    """The inputs of a chunk that have gradients; a `log_decay` shared by key channels is a row, `1 c`."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    a: jax.Array
    b: jax.Array | None
    log_decay: jax.Array | None
    state: jax.Array


VECTORS = ('q', 'k', 'v', 'a', 'b')


def core_of(arrays: vjp.Arrays, scale: float) -> solving.Core:
    plan, decays = plan_of(arrays), arrays.log_decay is not None
    keys = 1 if arrays.b is None else 2
    return solving.Core(
        name='diagonal_low_rank',
        plan=plan,
        cost=plan.cost(functools.partial(cost.diagonal_low_rank, keys=keys), decays),
        scale=scale,
        chunk_at=functools.partial(_chunk_at, plan, decays),
        step=functools.partial(_step, plan),
        put=functools.partial(_put, plan),
    )


def _chunk_at(plan: Plan, decays: bool, inputs: Inputs, place: Any, state: jax.Array) -> Differentiable:
    at = solving.steps_at(plan, place)
    row = inputs.rows[place, DECAY : DECAY + 1] if decays else None

    def taken(ref: Any) -> Any:
        # In float32, so that gradients are not rounded before they are summed.
        return None if ref is None else ref[at].astype(jnp.float32)

    return Differentiable(
        q=taken(inputs.q),
        k=taken(inputs.k),
        v=taken(inputs.v),
        a=taken(inputs.a),
        b=taken(inputs.b),
        log_decay=row if inputs.log_decay is None else inputs.log_decay[at],
        state=state,
    )


def _step(
    plan: Plan, inputs: Inputs, place: Any, here: Differentiable, solved: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    decay = here.log_decay
    if decay is not None and not plan.is_vector:
        decay = decay.swapaxes(0, 1)
    keys = (here.k,) if here.b is None else (here.b, here.k)
    chunk = Chunk(here.q, here.a, keys, decay, solving.column(inputs.rows, place, RUN))
    form = Form(plan.dtype, jnp.float32, EXACT if plan.dtype == jnp.float32 else None)
    return step(chunk, here.v, here.state, form, solved)


def _put(plan: Plan, gradients: Inputs, place: Any, found: Differentiable) -> None:
    at = solving.steps_at(plan, place)
    for name in VECTORS:
        ref = getattr(gradients, name)
        if ref is not None:
            ref[at] = getattr(found, name).astype(ref.dtype)
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
    given = {name: getattr(arrays, name) for name in VECTORS}
    return Inputs(
        **{name: None if array is None else fill(plan, array.astype(plan.dtype)) for name, array in given.items()},
        rows=solving.rows(plan, decay, arrays.starts),
        log_decay=None if decay is None or not plan.is_vector else fill(plan, decay),
    )
