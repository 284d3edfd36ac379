"""The Pallas form of `delta_rule` for TPUs, see `matrix_state.mosaic_tpu.solving`."""

import functools
from collections.abc import Callable

import jax

from pallas_kernels.delta_rule import erasing, vjp
from pallas_kernels.delta_rule.mosaic_tpu.inputs import BETA, core_of, inputs_of
from pallas_kernels.diagonal_low_rank.mosaic_tpu.passes import form as diagonal_low_rank
from pallas_kernels.matrix_state.mosaic_tpu import solving
from pallas_kernels.target import Target


@functools.lru_cache
def form(here: Target) -> Callable[..., vjp.Outputs]:
    """The differentiable form for a device."""
    return vjp.differentiable(functools.partial(_forward, here), functools.partial(_backward, here))


@functools.lru_cache
def with_erase(here: Target) -> Callable[..., vjp.Outputs]:
    """The differentiable form with erase keys of their own."""
    return erasing.by_kernels(diagonal_low_rank(here))


def _forward(here: Target, arrays: vjp.Arrays, scale: float, keep: bool) -> tuple[vjp.Outputs, jax.Array | None]:
    core = core_of(arrays, scale)
    state = arrays.state.swapaxes(2, 3)
    o, final, kept = solving.forward(here, core, inputs_of(core.plan, arrays), state, keep=keep)
    return (o.astype(arrays.v.dtype), final.swapaxes(2, 3)), kept


def _backward(here: Target, arrays: vjp.Arrays, scale: float, kept: jax.Array, gradients: vjp.Outputs) -> vjp.Arrays:
    core = core_of(arrays, scale)
    plan, (do, dfinal) = core.plan, gradients
    found, dstate = solving.backward(here, core, inputs_of(plan, arrays), kept, do, dfinal.swapaxes(2, 3))
    return vjp.Arrays(
        q=found.q[:, :, : plan.t],
        k=found.k[:, :, : plan.t],
        v=found.v[:, :, : plan.t],
        beta=solving.row_of_steps(plan, found.rows, BETA),
        log_decay=solving.dlog_decay(plan, found.rows, found.log_decay, arrays.log_decay),
        state=dstate.swapaxes(2, 3),
        starts=None,
    )
