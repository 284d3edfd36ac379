"""The forms on TPUs of cores whose chunks are solved by a triangular inverse: what they say, and both passes."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import tiling
from pallas_kernels.cost import CallCost
from pallas_kernels.matrix_state.decays import clipped
from pallas_kernels.matrix_state.differentiation import Arrays, Outputs, Passes
from pallas_kernels.matrix_state.mosaic_tpu import solving
from pallas_kernels.matrix_state.mosaic_tpu.plan import Plan, head_counts, operands
from pallas_kernels.matrix_state.mosaic_tpu.solving import DECAY, OTHERS, RUN
from pallas_kernels.matrix_state.products import EXACT, Form
from pallas_kernels.target import Target


class Inputs(NamedTuple):
    """The inputs of both kernels: arrays, references or blocks.

    Attributes:
      q, k, v: `b h t k` and `b h t v`.
      vectors: what the rule has besides of key channels, each `b h t k`.
      rows: see `solving.rows`; the numbers that the rule has of steps are the others there.
      log_decay: `b h t k`, only for decays per key channel.
    """

    q: Any
    k: Any
    v: Any
    vectors: tuple[Any, ...]
    rows: Any
    log_decay: Any


class Steps(NamedTuple):
    """The inputs of a chunk that have gradients, of the heads of a program, in float32.

    Attributes:
      q, k, v: `h c k` and `h c v`.
      vectors: each `h c k`.
      numbers: each `h 1 c`, or `h c 1` as a rule gets them.
      log_decay: `h c k`; where key channels share it, as the numbers; or `None`.
      state: that before the chunk, `h v k`.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    vectors: tuple[jax.Array, ...]
    numbers: tuple[jax.Array, ...]
    log_decay: jax.Array | None
    state: jax.Array


@dataclasses.dataclass(frozen=True)
class Rule:
    """What a core does in a chunk.

    Attributes:
      name: the first word of the names of its kernels.
      cost: of a call, from the number of further vectors to a function of its sizes.
      step: from the steps of a chunk, the number of document starts up to each, `h c 1`, or `None`, the form of
        products, and the inverse where it was kept, to what the chunk reads, `h c v`, the state after it, and the
        inverse.
    """

    name: str
    cost: Callable[[int], Callable[..., CallCost]]
    step: Callable[[Steps, jax.Array | None, Form, jax.Array | None], tuple[jax.Array, jax.Array, jax.Array]]


def passes(here: Target, rule: Rule) -> Passes:
    """Both passes for a device."""
    return Passes(functools.partial(_forward, here, rule), functools.partial(_backward, here, rule))


def _forward(here: Target, rule: Rule, arrays: Arrays, scale: float, keep: bool) -> tuple[Outputs, jax.Array | None]:
    core = _core_of(rule, arrays, scale)
    state = arrays.state.swapaxes(2, 3)
    o, final, kept = solving.forward(here, core, _inputs_of(core.plan, arrays), state, keep=keep)
    return (o.astype(arrays.v.dtype), final.swapaxes(2, 3)), kept


def _backward(here: Target, rule: Rule, arrays: Arrays, scale: float, kept: jax.Array, gradients: Outputs) -> Arrays:
    core = _core_of(rule, arrays, scale)
    plan, (do, dfinal) = core.plan, gradients
    found, dstate = solving.backward(here, core, _inputs_of(plan, arrays), kept, do, dfinal.swapaxes(2, 3))
    return Arrays(
        q=found.q[:, :, : plan.t],
        k=found.k[:, :, : plan.t],
        v=found.v[:, :, : plan.t],
        vectors=tuple(vector[:, :, : plan.t] for vector in found.vectors),
        numbers=tuple(solving.row_of_steps(plan, found.rows, OTHERS + i) for i in range(len(arrays.numbers))),
        log_decay=solving.dlog_decay(plan, found.rows, found.log_decay, arrays.log_decay),
        state=dstate.swapaxes(2, 3),
        starts=None,
    )


def _plan_of(arrays: Arrays) -> Plan:
    b, h, k, v = arrays.state.shape
    t = arrays.q.shape[2]
    is_vector = arrays.log_decay is not None and arrays.log_decay.shape[3] > 1
    tile, dtype = tiling.delta_rule_tpu(t, k, v), operands(arrays.q.dtype)
    together = tiling.heads_tpu(b, h, head_counts(arrays), k, v, dtype.itemsize)
    return Plan(b, t, h, k, v, tile, dtype, is_vector, arrays.starts is not None, together)


def _inputs_of(plan: Plan, arrays: Arrays) -> Inputs:
    # Rounded to 16 bits the least number is infinite, and sums are products with zeros.
    decay = clipped(arrays.log_decay, arrays.state.dtype)
    return Inputs(
        q=plan.fill(arrays.q.astype(plan.dtype)),
        k=plan.fill(arrays.k.astype(plan.dtype)),
        v=plan.fill(arrays.v.astype(plan.dtype)),
        vectors=tuple(plan.fill(vector.astype(plan.dtype)) for vector in arrays.vectors),
        rows=solving.rows(plan, decay, arrays.starts, *arrays.numbers),
        log_decay=None if decay is None or not plan.is_vector else plan.fill(decay),
    )


def _core_of(rule: Rule, arrays: Arrays, scale: float) -> solving.Core:
    plan, decays = _plan_of(arrays), arrays.log_decay is not None
    return solving.Core(
        name=rule.name,
        plan=plan,
        cost=plan.cost(rule.cost(len(arrays.vectors)), decays),
        scale=scale,
        chunk_at=functools.partial(_chunk_at, plan, decays, len(arrays.numbers)),
        step=functools.partial(_step, rule, plan),
        put=functools.partial(_put, plan),
    )


def _chunk_at(plan: Plan, decays: bool, numbers: int, inputs: Inputs, place: Any, state: jax.Array) -> Steps:
    at = plan.steps_of(place)
    row = inputs.rows[:, place, DECAY : DECAY + 1] if decays else None
    # In float32, so that gradients are not rounded before they are summed.
    q, k, v, *vectors = (
        plan.of_heads(ref[:, at].astype(jnp.float32)) for ref in (inputs.q, inputs.k, inputs.v, *inputs.vectors)
    )
    return Steps(
        q=q,
        k=k,
        v=v,
        vectors=tuple(vectors),
        numbers=tuple(inputs.rows[:, place, i : i + 1] for i in range(OTHERS, OTHERS + numbers)),
        log_decay=row if inputs.log_decay is None else plan.of_heads(inputs.log_decay[:, at]),
        state=state,
    )


def _step(
    rule: Rule, plan: Plan, inputs: Inputs, place: Any, here: Steps, solved: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    decay = here.log_decay
    if decay is not None and not plan.is_vector:
        decay = decay.swapaxes(1, 2)
    columns = here._replace(log_decay=decay, numbers=tuple(numbers.swapaxes(1, 2) for numbers in here.numbers))
    form = Form(plan.dtype, jnp.float32, EXACT if plan.dtype == jnp.float32 else None)
    runs = solving.column(inputs.rows, place, RUN) if plan.documents else None
    return rule.step(columns, runs, form, solved)


def _put(plan: Plan, gradients: Inputs, place: Any, found: Steps) -> None:
    at = plan.steps_of(place)
    refs, arrays = ((given.q, given.k, given.v, *given.vectors) for given in (gradients, found))
    for ref, array in zip(refs, arrays, strict=True):
        ref[:, at] = array.astype(ref.dtype)
    for i, numbers in enumerate(found.numbers, OTHERS):
        gradients.rows[:, place, i : i + 1] = numbers
    if gradients.log_decay is not None:
        gradients.log_decay[:, at] = found.log_decay
    elif found.log_decay is not None:
        gradients.rows[:, place, DECAY : DECAY + 1] = found.log_decay
