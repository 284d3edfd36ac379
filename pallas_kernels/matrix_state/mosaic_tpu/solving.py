"""The kernels of both passes of a core whose chunks are solved by a triangular inverse, on TPUs.

A grid over batch, heads and groups of chunks, the groups in order. The state stays in VMEM from one group to the next,
transposed, `v k`. The state before each group is kept for the backward pass, `t / group * k * v` numbers a head. The
backward pass reruns a group forward, holding the states before its chunks and the inverses, and then its chunks, like
the groups, from the last to the first; the gradients of a chunk are computed by JAX from its step.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.cost import Passes
from pallas_kernels.matrix_state.mosaic_tpu.plan import IN_ORDER, Plan
from pallas_kernels.mosaic_tpu import launch
from pallas_kernels.target import Target


@dataclasses.dataclass(frozen=True)
class Core:
    """What a core does in a chunk. Inputs are a named tuple of `b h t n`, but `rows`, see there, `b h l 8 c`.

    Attributes:
      name: the first word of the names of its kernels.
      chunk_at: from the inputs, the place of a chunk and the state before it to what has gradients there, `state` one
        of its fields.
      step: from the inputs, the place of a chunk, what `chunk_at` returned, and the inverse where it was kept, to what
        the chunk reads, `c v`, the state after it, and the inverse.
      put: writes the gradients of what `chunk_at` returned to those of the inputs.
    """

    name: str
    plan: Plan
    cost: Passes
    scale: float
    chunk_at: Callable[[Any, Any, jax.Array], Any]
    step: Callable[[Any, Any, Any, jax.Array | None], tuple[jax.Array, jax.Array, jax.Array]]
    put: Callable[[Any, Any, Any], None]


def forward(
    here: Target, core: Core, inputs: Any, state: jax.Array, *, keep: bool
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """The outputs, `b h t v`, the last state, and those before the groups, `b h groups v k`, if they are to be kept."""
    plan = core.plan
    b, h, v, k = state.shape
    whole = jax.ShapeDtypeStruct((b, h, plan.length, v), plan.dtype)
    before = jax.ShapeDtypeStruct((b, h, plan.groups, v, k), jnp.float32) if keep else None

    def body(inputs: Any, state: Any, o: Any, final: Any, kept: Any, carried: Any) -> None:
        @pl.when(pl.program_id(2) == 0)
        def _() -> None:
            carried[...] = state[...]

        if kept is not None:
            kept[:, 0] = carried[...]

        def run(place: jax.Array, _: None) -> None:
            chunk = core.chunk_at(inputs, place, carried[...])
            read, carried[...] = core.step(inputs, place, chunk, None)[:2]
            o[:, plan.steps_of(place)] = (core.scale * read).astype(plan.dtype)

        jax.lax.fori_loop(0, plan.chunks, run, None)

        @pl.when(pl.program_id(2) == plan.groups - 1)
        def _() -> None:
            final[...] = carried[...]

    o, final, kept = launch.call(
        body,
        here,
        name=f'{core.name}_forward',
        cost=core.cost.forward,
        grid=plan.grid,
        in_specs=(plan.specs(inputs), plan.whole(state.shape)),
        out_specs=(
            plan.group(whole.shape, plan.tile.group),
            plan.whole(state.shape),
            None if before is None else plan.group(before.shape, 1),
        ),
        out_shape=(whole, jax.ShapeDtypeStruct(state.shape, jnp.float32), before),
        scratch_shapes=(pltpu.VMEM((plan.together, v, k), jnp.float32),),
        compiler_params=IN_ORDER,
    )(inputs, state)
    return o[:, :, : plan.t], final, kept


def backward[Inputs](
    here: Target, core: Core, inputs: Inputs, kept: jax.Array, do: jax.Array, dfinal: jax.Array
) -> tuple[Inputs, jax.Array]:
    """The gradients of the inputs, of every head and in whole groups, and that of the state, all as in `forward`."""
    plan = core.plan
    b, h, v, k = dfinal.shape
    do = plan.fill(do.astype(plan.dtype))

    def gradient(like: jax.Array) -> jax.ShapeDtypeStruct:
        # Gradients that heads share are summed before they are rounded.
        dtype = like.dtype if like.shape[1] == h else jnp.float32
        return jax.ShapeDtypeStruct((b, h, *like.shape[2:]), dtype)

    def body(
        inputs: Any,
        kept: Any,
        do: Any,
        dfinal: Any,
        gradients: Any,
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
            _, after, inverse = core.step(inputs, place, core.chunk_at(inputs, place, state), None)
            inverses[place] = inverse
            return after

        jax.lax.fori_loop(0, plan.chunks, run, kept[:, 0])

        def pull(turn: jax.Array, _: None) -> None:
            place = plan.chunks - 1 - turn
            along = core.scale * do[:, plan.steps_of(place)].astype(jnp.float32), carried[...]
            chunk = core.chunk_at(inputs, place, states[place])
            found = jax.vjp(lambda chunk: core.step(inputs, place, chunk, inverses[place])[:2], chunk)[1](along)[0]
            core.put(gradients, place, found)
            carried[...] = found.state

        jax.lax.fori_loop(0, plan.chunks, pull, None)

        @pl.when(pl.program_id(2) == plan.groups - 1)
        def _() -> None:
            dstate[...] = carried[...]

    found = jax.tree.map(gradient, inputs)
    steps = plan.tile.steps
    return launch.call(
        body,
        here,
        name=f'{core.name}_backward',
        cost=core.cost.backward,
        grid=plan.grid,
        in_specs=(
            plan.specs(inputs, backward=True),
            plan.group(kept.shape, 1, backward=True),
            plan.group(do.shape, plan.tile.group, backward=True),
            plan.whole(dfinal.shape),
        ),
        out_specs=(plan.specs(found, backward=True), plan.whole(dfinal.shape)),
        out_shape=(found, jax.ShapeDtypeStruct(dfinal.shape, jnp.float32)),
        scratch_shapes=(
            pltpu.VMEM((plan.chunks, plan.together, v, k), jnp.float32),
            pltpu.VMEM((plan.chunks, plan.together, steps, steps), jnp.float32),
            pltpu.VMEM((plan.together, v, k), jnp.float32),
        ),
        compiler_params=IN_ORDER,
    )(inputs, kept, do, dfinal)


DECAY, RUN, OTHERS, COUNT = 0, 1, 2, 8
"""The rows of numbers of steps: the log decay shared by key channels, the number of document starts so far in the
chunk, and those of a core; and their number, with padding."""


def rows(plan: Plan, log_decay: jax.Array | None, starts: jax.Array | None, *others: jax.Array) -> jax.Array:
    """The rows, float32 `b h l 8 c`, from `log_decay`, `b h t k`, `starts`, `b t`, and others, `b h t`."""

    def cut(array: jax.Array) -> jax.Array:
        array = jnp.pad(array, ((0, 0), (0, 0), (0, plan.length - plan.t)))
        return array.reshape(*array.shape[:2], -1, plan.tile.steps)

    shape = (plan.b, plan.h, plan.length // plan.tile.steps, plan.tile.steps)
    zero = jnp.zeros((1, 1, 1, 1), jnp.float32)
    decay = zero if log_decay is None or plan.is_vector else cut(log_decay[..., 0])
    runs = zero if starts is None else jnp.cumsum(cut(starts[:, None]), axis=-1, dtype=jnp.float32)
    found = [decay, runs, *(cut(other) for other in others)]
    found += [zero] * (COUNT - len(found))
    return jnp.stack([jnp.broadcast_to(row, shape) for row in found], axis=3)


def row_of_steps(plan: Plan, rows: jax.Array, place: int) -> jax.Array:
    """One of the rows, `b h t`."""
    return rows[:, :, :, place].reshape(*rows.shape[:2], plan.length)[:, :, : plan.t]


def dlog_decay(
    plan: Plan, rows: jax.Array, by_channel: jax.Array | None, log_decay: jax.Array | None
) -> jax.Array | None:
    """The gradient of `log_decay`, `b h t k`, from those of the rows or, of key channels, from that array."""
    if log_decay is None:
        return None
    return row_of_steps(plan, rows, DECAY)[..., None] if by_channel is None else by_channel[:, :, : plan.t]


def column(rows: Any, place: Any, row: int) -> jax.Array:
    """One of the rows of a chunk, `h c 1`."""
    return rows[:, place, row : row + 1].swapaxes(1, 2)
