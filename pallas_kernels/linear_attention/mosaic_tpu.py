"""The Pallas form of `linear_attention` for TPUs: a grid over batch, heads and groups of chunks, the groups in order.

The state stays in VMEM from one group to the next, transposed, `v k`, so that decays of key channels are a row. Kept
for the backward pass is the state before each group, `t / group * k * v` numbers a head; it computes those of the
chunks again, a group at a time, and then runs the chunks of the group, as the groups, from the last to the first.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import mosaic_tpu, tiling
from pallas_kernels.linear_attention import rows, scalar_scores, vector_scores, vjp
from pallas_kernels.linear_attention.scores import Chunk, dot
from pallas_kernels.target import Target

LARGEST_STATE = 2**18
"""Numbers of a state, several of which must fit in VMEM."""


def refusal(here: Target, k: jax.Array, v: jax.Array, state: jax.Array) -> str | None:
    """Why the call cannot be served; `None`: it can."""
    if state.dtype != jnp.float32:
        return f'the state is computed in {state.dtype}; expected arguments of at most float32'
    if k.shape[3] * v.shape[3] > LARGEST_STATE:
        return f'a state has {k.shape[3]} x {v.shape[3]} numbers; expected at most {LARGEST_STATE}, which VMEM holds'
    return None


@functools.lru_cache
def form(here: Target) -> Callable[..., vjp.Outputs]:
    """The differentiable form on a device."""
    return vjp.differentiable(functools.partial(_forward, here), functools.partial(_backward, here))


class Inputs(NamedTuple):
    """What both kernels read: arrays, references or blocks; `log_decay` only where key channels have their own."""

    q: Any
    k: Any
    v: Any
    rows: Any
    log_decay: Any = None


@dataclasses.dataclass(frozen=True)
class Plan:
    """Sizes of a call, and how it is cut up. The groups run backward in the backward pass."""

    b: int
    t: int
    h: int
    k: int
    v: int
    tile: tiling.ChunkTile
    dtype: Any
    is_vector: bool

    @property
    def groups(self) -> int:
        return pl.cdiv(self.t, self.tile.group)

    @property
    def length(self) -> int:
        return self.groups * self.tile.group

    @property
    def chunks(self) -> int:
        """Of a group."""
        return self.tile.group // self.tile.steps

    def group(self, shape: tuple[int, ...], size: int, *, backward: bool = False) -> pl.BlockSpec:
        """The part of an array that belongs to a group, `size` long along its third axis."""
        batch, heads, _, *rest = shape

        def index(b: Any, h: Any, group: Any) -> tuple[Any, ...]:
            place = self.groups - 1 - group if backward else group
            return (b if batch > 1 else 0, jax.lax.div(h, self.h // heads), place, *(0 for _ in rest))

        return pl.BlockSpec((None, None, size, *rest), index)

    def whole(self, shape: tuple[int, ...]) -> pl.BlockSpec:
        """The part of an array that belongs to a sequence and head."""
        return pl.BlockSpec((None, None, *shape[2:]), lambda b, h, group: (b, h, *(0 for _ in shape[2:])))

    def specs(self, inputs: Inputs, *, backward: bool = False) -> Inputs:
        def spec(array: jax.Array) -> pl.BlockSpec:
            size = self.chunks if array is inputs.rows else self.tile.group
            return self.group(array.shape, size, backward=backward)

        return jax.tree.map(spec, inputs)


def _plan(arrays: vjp.Arrays) -> Plan:
    b, h, k, v = arrays.state.shape
    t = arrays.q.shape[2]
    is_vector = arrays.log_decay is not None and arrays.log_decay.shape[3] > 1
    # The units that multiply matrices know bfloat16; float32 holds float16.
    dtype = jnp.bfloat16 if arrays.q.dtype == jnp.bfloat16 else jnp.float32
    tile = tiling.linear_attention_tpu(t, k, v, vector=is_vector)
    return Plan(b, t, h, k, v, tile, dtype, is_vector)


def _inputs(plan: Plan, arrays: vjp.Arrays) -> Inputs:
    decay = arrays.log_decay
    own = None
    if decay is not None and plan.is_vector:
        own = _fill(plan, jnp.maximum(decay, rows.DARKEST))
    return Inputs(
        q=_fill(plan, arrays.q.astype(plan.dtype)),
        k=_fill(plan, arrays.k.astype(plan.dtype)),
        v=_fill(plan, arrays.v.astype(plan.dtype)),
        rows=rows.rows(None if plan.is_vector else decay, arrays.starts, plan.length, plan.tile.steps),
        log_decay=own,
    )


def _fill(plan: Plan, array: jax.Array) -> jax.Array:
    """Fills time up with steps that neither write nor decay."""
    return jnp.pad(array, ((0, 0), (0, 0), (0, plan.length - array.shape[2]), (0, 0)))


def _chunk(plan: Plan, inputs: Inputs, place: Any) -> Chunk:
    steps = pl.ds(place * plan.tile.steps, plan.tile.steps)
    numbers = inputs.rows[place]
    return Chunk(
        q=inputs.q[steps],
        k=inputs.k[steps],
        v=inputs.v[steps],
        rows=numbers,
        columns=numbers.T,
        log_decay=None if inputs.log_decay is None else inputs.log_decay[steps],
    )


def _forward(here: Target, arrays: vjp.Arrays, keep: bool) -> tuple[vjp.Outputs, jax.Array | None]:
    """Keeps the states before the groups, `b h groups v k`."""
    plan = _plan(arrays)
    inputs, state = _inputs(plan, arrays), arrays.state.swapaxes(2, 3)
    b, h, v, k = state.shape
    o = jax.ShapeDtypeStruct((b, h, plan.length, v), plan.dtype)
    final = jax.ShapeDtypeStruct(state.shape, jnp.float32)
    kept = jax.ShapeDtypeStruct((b, h, plan.groups, v, k), jnp.float32) if keep else None
    o, final, kept = mosaic_tpu.call(
        functools.partial(_forward_body, plan),
        here,
        grid=(b, h, plan.groups),
        in_specs=(plan.specs(inputs), plan.whole(state.shape)),
        out_specs=(
            plan.group(o.shape, plan.tile.group),
            plan.whole(final.shape),
            None if kept is None else plan.group(kept.shape, 1),
        ),
        out_shape=(o, final, kept),
        scratch_shapes=(pltpu.VMEM((v, k), jnp.float32),),
        compiler_params=_IN_ORDER,
    )(inputs, state)
    return (o[:, :, : plan.t].astype(arrays.v.dtype), final.swapaxes(2, 3)), kept


_IN_ORDER = pltpu.CompilerParams(dimension_semantics=('parallel', 'parallel', 'arbitrary'))


def _forward_body(plan: Plan, inputs: Inputs, state: Any, o: Any, final: Any, kept: Any, carried: Any) -> None:
    scores = vector_scores if plan.is_vector else scalar_scores

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        carried[...] = state[...]

    if kept is not None:
        kept[0] = carried[...]

    def step(place: jax.Array, _: None) -> None:
        chunk = _chunk(plan, inputs, place)
        decays = scores.decays(chunk)
        before = carried[...]
        read = dot((chunk.q * decays.reach).astype(plan.dtype), before.astype(plan.dtype), 'nt')
        within = dot(scores.scores(chunk).astype(plan.dtype), chunk.v)
        o[pl.ds(place * plan.tile.steps, plan.tile.steps)] = (read + within).astype(plan.dtype)
        carried[...] = decays.factor * before + dot(chunk.v, (chunk.k * decays.write).astype(plan.dtype), 'tn')

    jax.lax.fori_loop(0, plan.chunks, step, None)

    @pl.when(pl.program_id(2) == plan.groups - 1)
    def _() -> None:
        final[...] = carried[...]


def _backward(here: Target, arrays: vjp.Arrays, kept: jax.Array, gradients: vjp.Outputs) -> vjp.Arrays:
    plan = _plan(arrays)
    inputs = _inputs(plan, arrays)
    do, dfinal = _fill(plan, gradients[0].astype(plan.dtype)), gradients[1].swapaxes(2, 3)
    b, h, v, k = dfinal.shape

    def gradient(like: jax.Array) -> jax.ShapeDtypeStruct:
        # Gradients that heads share are added up before they are rounded.
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

    found, dstate = mosaic_tpu.call(
        functools.partial(_backward_body, plan),
        here,
        grid=(b, h, plan.groups),
        in_specs=(
            plan.specs(inputs, backward=True),
            plan.group(kept.shape, 1, backward=True),
            plan.group(do.shape, plan.tile.group, backward=True),
            plan.whole(dfinal.shape),
        ),
        out_specs=(jax.tree.map(spec, found), plan.whole(dfinal.shape)),
        out_shape=(found, jax.ShapeDtypeStruct(dfinal.shape, jnp.float32)),
        scratch_shapes=(pltpu.VMEM((plan.chunks, v, k), jnp.float32), pltpu.VMEM((v, k), jnp.float32)),
        compiler_params=_IN_ORDER,
    )(inputs, kept, do, dfinal)

    dlog_decay = found.log_decay
    if dlog_decay is not None and not plan.is_vector:
        dlog_decay = dlog_decay.reshape(b, h, plan.length, 1)
    time = slice(plan.t)
    return vjp.Arrays(
        q=found.q[:, :, time],
        k=found.k[:, :, time],
        v=found.v[:, :, time],
        log_decay=None if dlog_decay is None else dlog_decay[:, :, time],
        state=dstate.swapaxes(2, 3),
        starts=None,
    )


def _backward_body(
    plan: Plan,
    inputs: Inputs,
    kept: Any,
    do: Any,
    dfinal: Any,
    gradients: Inputs,
    dstate: Any,
    states: Any,
    carried: Any,
) -> None:
    scores = vector_scores if plan.is_vector else scalar_scores

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        carried[...] = dfinal[...]

    def write(place: jax.Array, state: jax.Array) -> jax.Array:
        states[place] = state
        chunk = _chunk(plan, inputs, place)
        decays = scores.decays(chunk)
        return decays.factor * state + dot(chunk.v, (chunk.k * decays.write).astype(plan.dtype), 'tn')

    jax.lax.fori_loop(0, plan.chunks, write, kept[0])

    def step(turn: jax.Array, _: None) -> None:
        place = plan.chunks - 1 - turn
        at = pl.ds(place * plan.tile.steps, plan.tile.steps)
        chunk, doutput = _chunk(plan, inputs, place), do[at]
        decays = scores.decays(chunk)
        before, dafter = states[place], carried[...]

        weights, pulled = scores.pull(chunk, dot(doutput, chunk.v, 'nt'))
        keys = (chunk.k * decays.write).astype(plan.dtype)
        dv = dot(weights.astype(plan.dtype), doutput, 'tn') + dot(keys, dafter.astype(plan.dtype), 'nt')
        reads = decays.reach * dot(doutput, before.astype(plan.dtype))
        writes = decays.write * dot(chunk.v, dafter.astype(plan.dtype))
        gradients.q[at] = (pulled.dq + reads).astype(gradients.q.dtype)
        gradients.k[at] = (pulled.dk + writes).astype(gradients.k.dtype)
        gradients.v[at] = dv.astype(gradients.v.dtype)
        if gradients.log_decay is not None:
            held = decays.factor * jnp.sum(before * dafter, axis=0, keepdims=True)
            dlog_decay = pulled.dlog_decay + scores.pull_decays(chunk, chunk.q * reads, chunk.k * writes, held)
            gradients.log_decay[at if plan.is_vector else place] = dlog_decay
        queries = (chunk.q * decays.reach).astype(plan.dtype)
        carried[...] = decays.factor * dafter + dot(doutput, queries, 'tn')

    jax.lax.fori_loop(0, plan.chunks, step, None)

    @pl.when(pl.program_id(2) == plan.groups - 1)
    def _() -> None:
        dstate[...] = carried[...]
