"""The kernel of the backward pass of `delta_rule` on TPUs."""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import cost
from pallas_kernels.delta_rule import vjp
from pallas_kernels.delta_rule.mosaic_tpu.inputs import (
    BETA,
    DECAY,
    Inputs,
    chunk_at,
    fill,
    has_decays,
    inputs_of,
    plan_of,
    runs_of,
    step_of,
)
from pallas_kernels.matrix_state.mosaic_tpu.plan import IN_ORDER, Plan
from pallas_kernels.mosaic_tpu import launch
from pallas_kernels.target import Target


def backward(here: Target, arrays: vjp.Arrays, scale: float, kept: jax.Array, gradients: vjp.Outputs) -> vjp.Arrays:
    plan = plan_of(arrays)
    inputs = inputs_of(plan, arrays)
    do, dfinal = fill(plan, gradients[0].astype(plan.dtype)), gradients[1].swapaxes(2, 3)
    b, h, v, k = dfinal.shape

    def gradient(like: jax.Array | None) -> jax.ShapeDtypeStruct | None:
        if like is None:
            return None
        # Gradients that heads share are summed before they are rounded.
        dtype = like.dtype if like.shape[1] == h else jnp.float32
        return jax.ShapeDtypeStruct((b, h, *like.shape[2:]), dtype)

    found = Inputs(*(gradient(array) for array in inputs))
    steps = plan.tile.steps
    found, dstate = launch.call(
        functools.partial(_body, plan, has_decays(arrays), scale),
        here,
        name='delta_rule_backward',
        cost=plan.cost(cost.delta_rule, arrays.log_decay is not None).backward,
        grid=(b, h, plan.groups),
        in_specs=(
            plan.specs(inputs, backward=True),
            plan.group(kept.shape, 1, backward=True),
            plan.group(do.shape, plan.tile.group, backward=True),
            plan.whole(dfinal.shape),
        ),
        out_specs=(plan.specs(found, backward=True), plan.whole(dfinal.shape)),
        out_shape=(found, jax.ShapeDtypeStruct(dfinal.shape, jnp.float32)),
        scratch_shapes=(
            pltpu.VMEM((plan.chunks, v, k), jnp.float32),
            pltpu.VMEM((plan.chunks, steps, steps), jnp.float32),
            pltpu.VMEM((v, k), jnp.float32),
        ),
        compiler_params=IN_ORDER,
    )(inputs, kept, do, dfinal)

    def row(place: int) -> jax.Array:
        return found.rows[:, :, :, place].reshape(b, h, plan.length)[:, :, : plan.t]

    dlog_decay = row(DECAY)[..., None] if found.log_decay is None else found.log_decay[:, :, : plan.t]
    return vjp.Arrays(
        q=found.q[:, :, : plan.t],
        k=found.k[:, :, : plan.t],
        v=found.v[:, :, : plan.t],
        beta=row(BETA),
        log_decay=None if arrays.log_decay is None else dlog_decay,
        state=dstate.swapaxes(2, 3),
        starts=None,
    )


def _body(
    plan: Plan,
    decays: bool,
    scale: float,
    inputs: Inputs,
    kept: Any,
    do: Any,
    dfinal: Any,
    gradients: Inputs,
    dstate: Any,
    states: Any,
    inverses: Any,
    carried: Any,
) -> None:
    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        carried[...] = dfinal[...]

    def run(place: jax.Array, state: jax.Array) -> jax.Array:
        states[place] = state
        _, after, inverse = step_of(plan, runs_of(inputs, place), chunk_at(plan, decays, inputs, place, state))
        inverses[place] = inverse
        return after

    jax.lax.fori_loop(0, plan.chunks, run, kept[0])

    def pull(turn: jax.Array, _: None) -> None:
        place = plan.chunks - 1 - turn
        at = pl.ds(place * plan.tile.steps, plan.tile.steps)
        here = chunk_at(plan, decays, inputs, place, states[place])
        outputs = functools.partial(step_of, plan, runs_of(inputs, place), solved=inverses[place])
        found = jax.vjp(lambda here: outputs(here)[:2], here)[1]((scale * do[at].astype(jnp.float32), carried[...]))[0]
        gradients.q[at] = found.q.astype(gradients.q.dtype)
        gradients.k[at] = found.k.astype(gradients.k.dtype)
        gradients.v[at] = found.v.astype(gradients.v.dtype)
        gradients.rows[place, BETA : BETA + 1] = found.beta
        if gradients.log_decay is not None:
            gradients.log_decay[at] = found.log_decay
        elif decays:
            gradients.rows[place, DECAY : DECAY + 1] = found.log_decay
        carried[...] = found.state

    jax.lax.fori_loop(0, plan.chunks, pull, None)

    @pl.when(pl.program_id(2) == plan.groups - 1)
    def _() -> None:
        dstate[...] = carried[...]
