"""The kernel of the backward pass of `linear_attention` on TPUs."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import cost
from pallas_kernels.linear_attention.mosaic_tpu import scalar, secondary, vector
from pallas_kernels.linear_attention.mosaic_tpu.chunk import Chunk, Decays, Pulled, dot
from pallas_kernels.linear_attention.mosaic_tpu.inputs import Inputs, chunk_at, for_heads, inputs_of, plan_of
from pallas_kernels.matrix_state.differentiation import Arrays, Outputs
from pallas_kernels.matrix_state.mosaic_tpu.plan import IN_ORDER, Plan
from pallas_kernels.mosaic_tpu import launch
from pallas_kernels.target import Target

Pull = Callable[[Chunk, Decays, jax.Array], tuple[jax.Array, Pulled]]
"""The decayed scores of a chunk of one head, and the gradients through them, from those of the scores."""


def backward(here: Target, arrays: Arrays, scale: float, kept: jax.Array, gradients: Outputs) -> Arrays:
    plan = plan_of(arrays)
    inputs = inputs_of(plan, arrays)
    do, dfinal = plan.fill(gradients[0].astype(plan.dtype)), gradients[1].swapaxes(2, 3)
    b, h, v, k = dfinal.shape

    def gradient(like: jax.Array) -> jax.ShapeDtypeStruct:
        # Gradients that heads share are summed before they are rounded.
        dtype = plan.dtype if like.shape[1] == h else jnp.float32
        return jax.ShapeDtypeStruct((b, h, *like.shape[2:]), dtype)

    decay_shape = (b, h, plan.length, k) if plan.is_vector else (b, h, *inputs.rows.shape[2:3], 1, plan.tile.steps)
    found = Inputs(
        q=gradient(inputs.q),
        k=gradient(inputs.k),
        v=gradient(inputs.v),
        rows=None,
        log_decay=None if arrays.log_decay is None else jax.ShapeDtypeStruct(decay_shape, jnp.float32),
    )

    def spec(out: jax.ShapeDtypeStruct) -> pl.BlockSpec:
        return plan.group(out.shape, plan.chunks if out.ndim == 5 else plan.tile.group, backward=True)

    found, dstate = launch.call(
        functools.partial(_body, plan, scale),
        here,
        name='linear_attention_backward',
        cost=plan.cost(cost.linear_attention, arrays.log_decay is not None).backward,
        grid=plan.grid,
        in_specs=(
            plan.specs(inputs, backward=True),
            plan.group(kept.shape, 1, backward=True),
            plan.group(do.shape, plan.tile.group, backward=True),
            plan.whole(dfinal.shape),
        ),
        out_specs=(jax.tree.map(spec, found), plan.whole(dfinal.shape)),
        out_shape=(found, jax.ShapeDtypeStruct(dfinal.shape, jnp.float32)),
        scratch_shapes=(
            pltpu.VMEM((plan.chunks, plan.together, v, k), jnp.float32),
            pltpu.VMEM((plan.together, v, k), jnp.float32),
        ),
        compiler_params=IN_ORDER,
    )(inputs, kept, do, dfinal)

    dlog_decay = found.log_decay
    if dlog_decay is not None and not plan.is_vector:
        dlog_decay = dlog_decay.reshape(b, h, plan.length, 1)
    time = slice(plan.t)
    return Arrays(
        q=found.q[:, :, time],
        k=found.k[:, :, time],
        v=found.v[:, :, time],
        vectors=(),
        numbers=(),
        log_decay=None if dlog_decay is None else dlog_decay[:, :, time],
        state=dstate.swapaxes(2, 3),
        starts=None,
    )


def _body(
    plan: Plan,
    scale: float,
    inputs: Inputs,
    kept: Any,
    do: Any,
    dfinal: Any,
    gradients: Inputs,
    dstate: Any,
    states: Any,
    carried: Any,
) -> None:
    kind = vector if plan.is_vector else scalar

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        carried[...] = dfinal[...]

    @functools.partial(for_heads, plan)
    def after(chunk: Chunk, state: jax.Array) -> jax.Array:
        decays = kind.decays(chunk)
        return decays.factor * state + dot(chunk.v, (chunk.k * decays.write).astype(plan.dtype), 'tn')

    def write(place: jax.Array, state: jax.Array) -> jax.Array:
        states[place] = state
        return after(chunk_at(plan, inputs, place), state)

    jax.lax.fori_loop(0, plan.chunks, write, kept[:, 0])

    def of_head(
        pull: Pull, chunk: Chunk, doutput: jax.Array, before: jax.Array, dafter: jax.Array
    ) -> tuple[Inputs, jax.Array]:
        decays = kind.decays(chunk)
        weights, pulled = pull(chunk, decays, dot(doutput, chunk.v, 'nt'))
        keys = (chunk.k * decays.write).astype(plan.dtype)
        dv = dot(weights.astype(plan.dtype), doutput, 'tn') + dot(keys, dafter.astype(plan.dtype), 'nt')
        reads = decays.reach * dot(doutput, before.astype(plan.dtype))
        writes = decays.write * dot(chunk.v, dafter.astype(plan.dtype))
        dlog_decay = None
        if gradients.log_decay is not None:
            held = decays.factor * jnp.sum(before * dafter, axis=0, keepdims=True)
            dlog_decay = pulled.dlog_decay + kind.pull_decays(chunk, chunk.q * reads, chunk.k * writes, held)
        queries = (chunk.q * decays.reach).astype(plan.dtype)
        dstate = decays.factor * dafter + dot(doutput, queries, 'tn')
        return Inputs(q=pulled.dq + reads, k=pulled.dk + writes, v=dv, rows=None, log_decay=dlog_decay), dstate

    def step(turn: jax.Array, _: None) -> None:
        place = plan.chunks - 1 - turn
        at = plan.steps_of(place)
        doutput = (scale * do[:, at].astype(jnp.float32)).astype(plan.dtype)
        chunk = chunk_at(plan, inputs, place)

        def run(pull: Pull) -> None:
            of_heads = for_heads(plan, functools.partial(of_head, pull))
            found, carried[...] = of_heads(chunk, doutput, states[place], carried[...])
            gradients.q[:, at] = found.q.astype(gradients.q.dtype)
            gradients.k[:, at] = found.k.astype(gradients.k.dtype)
            gradients.v[:, at] = found.v.astype(gradients.v.dtype)
            if gradients.log_decay is not None:
                gradients.log_decay[:, at if plan.is_vector else place] = found.log_decay

        if plan.is_vector:
            vector.choose(chunk, run, vector.pull, secondary.pull)
        else:
            run(scalar.pull)

    jax.lax.fori_loop(0, plan.chunks, step, None)

    @pl.when(pl.program_id(2) == plan.groups - 1)
    def _() -> None:
        dstate[...] = carried[...]
