"""The Pallas form of `delta_rule` for TPUs: a grid over batch, heads and groups of chunks, the groups in order.

The state stays in VMEM from one group to the next, transposed, `v k`. Kept for the backward pass is the state before
each group, `t / group * k * v` numbers a head. The backward pass runs a group forward once more, holding the states
before its chunks and the triangular inverses, and then its chunks, as the groups, from the last to the first; the
gradients of a chunk are those that JAX finds of `chunk.step`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import mosaic_tpu, tiling
from pallas_kernels.delta_rule import vjp
from pallas_kernels.delta_rule.chunk import EXACT, Chunk, step
from pallas_kernels.delta_rule.products import Form
from pallas_kernels.linear_attention.mosaic_tpu import Plan, refusal
from pallas_kernels.target import Target

__all__ = ['form', 'refusal']


@functools.lru_cache
def form(here: Target) -> Callable[..., vjp.Outputs]:
    """The differentiable form on a device."""
    return vjp.differentiable(functools.partial(_forward, here), functools.partial(_backward, here))


class Inputs(NamedTuple):
    """What both kernels read: arrays, references or blocks.

    Attributes:
      q, k, v: `b h t k` and `b h t v`.
      rows: numbers a step has, float32 `b h l 8 c`: beta, the log decay of all key channels, and how often its chunk
        has forgotten the past.
      log_decay: `b h t k`, only where key channels have their own.
    """

    q: Any
    k: Any
    v: Any
    rows: Any
    log_decay: Any


BETA, DECAY, RUN, COUNT = 0, 1, 2, 8
"""The rows, filled up to so many."""


class Differentiable(NamedTuple):
    """What a chunk has gradients of; `beta` and a `log_decay` of all key channels are rows `1 c`."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    beta: jax.Array
    log_decay: jax.Array | None
    state: jax.Array


def _forward(here: Target, arrays: vjp.Arrays, scale: float, keep: bool) -> tuple[vjp.Outputs, jax.Array | None]:
    """Keeps the states before the groups, `b h groups v k`."""
    plan = _plan(arrays)
    inputs, state = _inputs(plan, arrays), arrays.state.swapaxes(2, 3)
    b, h, v, k = state.shape
    whole = jax.ShapeDtypeStruct((b, h, plan.length, v), plan.dtype)
    last = jax.ShapeDtypeStruct(state.shape, jnp.float32)
    before = jax.ShapeDtypeStruct((b, h, plan.groups, v, k), jnp.float32) if keep else None
    o, final, kept = mosaic_tpu.call(
        functools.partial(_forward_body, plan, _decays(arrays), scale),
        here,
        grid=(b, h, plan.groups),
        in_specs=(_specs(plan, inputs, backward=False), plan.whole(state.shape)),
        out_specs=(
            plan.group(whole.shape, plan.tile.group),
            plan.whole(last.shape),
            None if before is None else plan.group(before.shape, 1),
        ),
        out_shape=(whole, last, before),
        scratch_shapes=(pltpu.VMEM((v, k), jnp.float32),),
        compiler_params=_IN_ORDER,
    )(inputs, state)
    return (o[:, :, : plan.t].astype(arrays.v.dtype), final.swapaxes(2, 3)), kept


_IN_ORDER = pltpu.CompilerParams(dimension_semantics=('parallel', 'parallel', 'arbitrary'))


def _forward_body(
    plan: Plan, decays: bool, scale: float, inputs: Inputs, state: Any, o: Any, final: Any, kept: Any, carried: Any
) -> None:
    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        carried[...] = state[...]

    if kept is not None:
        kept[0] = carried[...]

    def chunk(place: jax.Array, _: None) -> None:
        here = _chunk(plan, decays, inputs, place, carried[...])
        read, carried[...] = _step(plan, _runs(inputs, place), here)[:2]
        o[pl.ds(place * plan.tile.steps, plan.tile.steps)] = (scale * read).astype(plan.dtype)

    jax.lax.fori_loop(0, plan.chunks, chunk, None)

    @pl.when(pl.program_id(2) == plan.groups - 1)
    def _() -> None:
        final[...] = carried[...]


def _backward(here: Target, arrays: vjp.Arrays, scale: float, kept: jax.Array, gradients: vjp.Outputs) -> vjp.Arrays:
    plan = _plan(arrays)
    inputs = _inputs(plan, arrays)
    do, dfinal = _fill(plan, gradients[0].astype(plan.dtype)), gradients[1].swapaxes(2, 3)
    b, h, v, k = dfinal.shape

    def gradient(like: jax.Array | None) -> jax.ShapeDtypeStruct | None:
        if like is None:
            return None
        # Gradients that heads share are added up before they are rounded.
        dtype = like.dtype if like.shape[1] == h else jnp.float32
        return jax.ShapeDtypeStruct((b, h, *like.shape[2:]), dtype)

    found = Inputs(*(gradient(array) for array in inputs))
    steps = plan.tile.steps
    found, dstate = mosaic_tpu.call(
        functools.partial(_backward_body, plan, _decays(arrays), scale),
        here,
        grid=(b, h, plan.groups),
        in_specs=(
            _specs(plan, inputs, backward=True),
            plan.group(kept.shape, 1, backward=True),
            plan.group(do.shape, plan.tile.group, backward=True),
            plan.whole(dfinal.shape),
        ),
        out_specs=(_specs(plan, found, backward=True), plan.whole(dfinal.shape)),
        out_shape=(found, jax.ShapeDtypeStruct(dfinal.shape, jnp.float32)),
        scratch_shapes=(
            pltpu.VMEM((plan.chunks, v, k), jnp.float32),
            pltpu.VMEM((plan.chunks, steps, steps), jnp.float32),
            pltpu.VMEM((v, k), jnp.float32),
        ),
        compiler_params=_IN_ORDER,
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


def _backward_body(
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
        _, after, inverse = _step(plan, _runs(inputs, place), _chunk(plan, decays, inputs, place, state))
        inverses[place] = inverse
        return after

    jax.lax.fori_loop(0, plan.chunks, run, kept[0])

    def pull(turn: jax.Array, _: None) -> None:
        place = plan.chunks - 1 - turn
        at = pl.ds(place * plan.tile.steps, plan.tile.steps)
        here = _chunk(plan, decays, inputs, place, states[place])
        outputs = functools.partial(_step, plan, _runs(inputs, place), solved=inverses[place])
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


def _chunk(plan: Plan, decays: bool, inputs: Inputs, place: Any, state: jax.Array) -> Differentiable:
    at = pl.ds(place * plan.tile.steps, plan.tile.steps)
    row = inputs.rows[place, DECAY : DECAY + 1] if decays else None
    return Differentiable(
        # As float32, so that gradients are not rounded before they are added up.
        q=inputs.q[at].astype(jnp.float32),
        k=inputs.k[at].astype(jnp.float32),
        v=inputs.v[at].astype(jnp.float32),
        beta=inputs.rows[place, BETA : BETA + 1],
        log_decay=row if inputs.log_decay is None else inputs.log_decay[at],
        state=state,
    )


def _runs(inputs: Inputs, place: Any) -> jax.Array:
    return inputs.rows[place, RUN : RUN + 1].swapaxes(0, 1)


def _step(
    plan: Plan, runs: jax.Array, here: Differentiable, solved: jax.Array | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    decay = here.log_decay
    if decay is not None and not plan.is_vector:
        decay = decay.swapaxes(0, 1)
    chunk = Chunk(here.q, here.k, here.beta.swapaxes(0, 1), decay, runs)
    form = Form(plan.dtype, jnp.float32, EXACT if plan.dtype == jnp.float32 else None)
    return step(chunk, here.v, here.state, form, solved)


def _decays(arrays: vjp.Arrays) -> bool:
    return arrays.log_decay is not None


def _plan(arrays: vjp.Arrays) -> Plan:
    b, h, k, v = arrays.state.shape
    t = arrays.q.shape[2]
    is_vector = arrays.log_decay is not None and arrays.log_decay.shape[3] > 1
    # The units that multiply matrices know bfloat16; float32 holds float16.
    dtype = jnp.bfloat16 if arrays.q.dtype == jnp.bfloat16 else jnp.float32
    return Plan(b, t, h, k, v, tiling.delta_rule_tpu(t, k, v), dtype, is_vector)


def _inputs(plan: Plan, arrays: vjp.Arrays) -> Inputs:
    decay = arrays.log_decay
    return Inputs(
        q=_fill(plan, arrays.q.astype(plan.dtype)),
        k=_fill(plan, arrays.k.astype(plan.dtype)),
        v=_fill(plan, arrays.v.astype(plan.dtype)),
        rows=_rows(plan, arrays.beta, None if decay is None or plan.is_vector else decay[..., 0], arrays.starts),
        log_decay=None if decay is None or not plan.is_vector else _fill(plan, decay),
    )


def _rows(plan: Plan, beta: jax.Array, log_decay: jax.Array | None, starts: jax.Array | None) -> jax.Array:
    """What `Inputs.rows` is made of."""

    def cut(array: jax.Array) -> jax.Array:
        array = jnp.pad(array, ((0, 0), (0, 0), (0, plan.length - plan.t)))
        return array.reshape(*array.shape[:2], -1, plan.tile.steps)

    shape = (plan.b, plan.h, plan.length // plan.tile.steps, plan.tile.steps)
    zero = jnp.zeros((1, 1, 1, 1), jnp.float32)
    decay = zero if log_decay is None else cut(log_decay)
    runs = zero if starts is None else jnp.cumsum(cut(starts[:, None]), axis=-1, dtype=jnp.float32)
    rows = [jnp.broadcast_to(row, shape) for row in (cut(beta), decay, runs, *(zero,) * (COUNT - 3))]
    return jnp.stack(rows, axis=3)


def _specs(plan: Plan, inputs: Inputs, *, backward: bool) -> Inputs:
    def spec(array: Any) -> pl.BlockSpec | None:
        if array is None:
            return None
        return plan.group(array.shape, plan.chunks if array is inputs.rows else plan.tile.group, backward=backward)

    return Inputs(*(spec(array) for array in inputs))


def _fill(plan: Plan, array: jax.Array) -> jax.Array:
    """Fills time up with steps that neither write nor decay."""
    return jnp.pad(array, ((0, 0), (0, 0), (0, plan.length - array.shape[2]), (0, 0)))
