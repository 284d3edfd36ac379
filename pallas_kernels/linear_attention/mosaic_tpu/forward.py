"""The kernel of the forward pass of `linear_attention` on TPUs."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import cost
from pallas_kernels.linear_attention.mosaic_tpu import scalar, secondary, vector
from pallas_kernels.linear_attention.mosaic_tpu.chunk import Chunk, Decays, dot
from pallas_kernels.linear_attention.mosaic_tpu.inputs import Inputs, chunk_at, for_heads, inputs_of, plan_of
from pallas_kernels.matrix_state.differentiation import Arrays, Outputs
from pallas_kernels.matrix_state.mosaic_tpu.plan import IN_ORDER, Plan
from pallas_kernels.mosaic_tpu import launch
from pallas_kernels.target import Target

Scores = Callable[[Chunk, Decays], jax.Array]
"""The decayed scores of a chunk of one head."""


def forward(here: Target, arrays: Arrays, scale: float, keep: bool) -> tuple[Outputs, jax.Array | None]:
    """Keeps the states before the groups, `b h groups v k`."""
    plan = plan_of(arrays)
    inputs, state = inputs_of(plan, arrays), arrays.state.swapaxes(2, 3)
    b, h, v, k = state.shape
    o = jax.ShapeDtypeStruct((b, h, plan.length, v), plan.dtype)
    final = jax.ShapeDtypeStruct(state.shape, jnp.float32)
    kept = jax.ShapeDtypeStruct((b, h, plan.groups, v, k), jnp.float32) if keep else None
    o, final, kept = launch.call(
        functools.partial(_body, plan, scale),
        here,
        name='linear_attention_forward',
        cost=plan.cost(cost.linear_attention, arrays.log_decay is not None).forward,
        grid=plan.grid,
        in_specs=(plan.specs(inputs), plan.whole(state.shape)),
        out_specs=(
            plan.group(o.shape, plan.tile.group),
            plan.whole(final.shape),
            None if kept is None else plan.group(kept.shape, 1),
        ),
        out_shape=(o, final, kept),
        scratch_shapes=(pltpu.VMEM((plan.together, v, k), jnp.float32),),
        compiler_params=IN_ORDER,
    )(inputs, state)
    return (o[:, :, : plan.t].astype(arrays.v.dtype), final.swapaxes(2, 3)), kept


def _body(plan: Plan, scale: float, inputs: Inputs, state: Any, o: Any, final: Any, kept: Any, carried: Any) -> None:
    kind = vector if plan.is_vector else scalar

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        carried[...] = state[...]

    if kept is not None:
        kept[:, 0] = carried[...]

    def of_head(scores: Scores, chunk: Chunk, before: jax.Array) -> tuple[jax.Array, jax.Array]:
        decays = kind.decays(chunk)
        read = dot((chunk.q * decays.reach).astype(plan.dtype), before.astype(plan.dtype), 'nt')
        within = dot(scores(chunk, decays).astype(plan.dtype), chunk.v)
        after = decays.factor * before + dot(chunk.v, (chunk.k * decays.write).astype(plan.dtype), 'tn')
        return (scale * (read + within)).astype(plan.dtype), after

    def step(place: jax.Array, _: None) -> None:
        steps, chunk = plan.steps_of(place), chunk_at(plan, inputs, place)

        def run(scores: Scores) -> None:
            of_heads = for_heads(plan, functools.partial(of_head, scores))
            o[:, steps], carried[...] = of_heads(chunk, carried[...])

        if plan.is_vector:
            vector.choose(chunk, run, vector.scores, secondary.scores)
        else:
            run(scalar.scores)

    jax.lax.fori_loop(0, plan.chunks, step, None)

    @pl.when(pl.program_id(2) == plan.groups - 1)
    def _() -> None:
        final[...] = carried[...]
