"""The kernel of the forward pass of `delta_rule` on TPUs."""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import cost
from pallas_kernels.delta_rule import vjp
from pallas_kernels.delta_rule.mosaic_tpu.inputs import (
    Inputs,
    chunk_at,
    has_decays,
    inputs_of,
    plan_of,
    runs_of,
    step_of,
)
from pallas_kernels.matrix_state.mosaic_tpu.plan import IN_ORDER, Plan
from pallas_kernels.mosaic_tpu import launch
from pallas_kernels.target import Target


def forward(here: Target, arrays: vjp.Arrays, scale: float, keep: bool) -> tuple[vjp.Outputs, jax.Array | None]:
    """Keeps the states before the groups, `b h groups v k`."""
    plan = plan_of(arrays)
    inputs, state = inputs_of(plan, arrays), arrays.state.swapaxes(2, 3)
    b, h, v, k = state.shape
    whole = jax.ShapeDtypeStruct((b, h, plan.length, v), plan.dtype)
    last = jax.ShapeDtypeStruct(state.shape, jnp.float32)
    before = jax.ShapeDtypeStruct((b, h, plan.groups, v, k), jnp.float32) if keep else None
    o, final, kept = launch.call(
        functools.partial(_body, plan, has_decays(arrays), scale),
        here,
        name='delta_rule_forward',
        cost=plan.cost(cost.delta_rule, arrays.log_decay is not None).forward,
        grid=(b, h, plan.groups),
        in_specs=(plan.specs(inputs), plan.whole(state.shape)),
        out_specs=(
            plan.group(whole.shape, plan.tile.group),
            plan.whole(last.shape),
            None if before is None else plan.group(before.shape, 1),
        ),
        out_shape=(whole, last, before),
        scratch_shapes=(pltpu.VMEM((v, k), jnp.float32),),
        compiler_params=IN_ORDER,
    )(inputs, state)
    return (o[:, :, : plan.t].astype(arrays.v.dtype), final.swapaxes(2, 3)), kept


def _body(
    plan: Plan, decays: bool, scale: float, inputs: Inputs, state: Any, o: Any, final: Any, kept: Any, carried: Any
) -> None:
    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        carried[...] = state[...]

    if kept is not None:
        kept[0] = carried[...]

    def chunk(place: jax.Array, _: None) -> None:
        here = chunk_at(plan, decays, inputs, place, carried[...])
        read, carried[...] = step_of(plan, runs_of(inputs, place), here)[:2]
        o[pl.ds(place * plan.tile.steps, plan.tile.steps)] = (scale * read).astype(plan.dtype)

    jax.lax.fori_loop(0, plan.chunks, chunk, None)

    @pl.when(pl.program_id(2) == plan.groups - 1)
    def _() -> None:
        final[...] = carried[...]
