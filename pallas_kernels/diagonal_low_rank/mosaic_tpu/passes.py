"""The Pallas form of `diagonal_low_rank` for TPUs, see `matrix_state.mosaic_tpu.solving`."""

import functools
from collections.abc import Callable

import jax

from pallas_kernels.diagonal_low_rank import vjp
from pallas_kernels.diagonal_low_rank.mosaic_tpu.inputs import core_of, inputs_of
from pallas_kernels.matrix_state.differentiation import Outputs
from pallas_kernels.matrix_state.mosaic_tpu import solving
from pallas_kernels.target import Target


@functools.lru_cache
def form(here: Target) -> Callable[..., Outputs]:
    """The differentiable form for a device."""
    return vjp.differentiable(functools.partial(_forward, here), functools.partial(_backward, here))


def _forward(here: Target, arrays: vjp.Arrays, scale: float, keep: bool) -> tuple[Outputs, jax.Array | None]:
    core = core_of(arrays, scale)
    state = arrays.state.swapaxes(2, 3)
    o, final, kept = solving.forward(here, core, inputs_of(core.plan, arrays), state, keep=keep)
    return (o.astype(arrays.v.dtype), final.swapaxes(2, 3)), kept


def _backward(here: Target, arrays: vjp.Arrays, scale: float, kept: jax.Array, gradients: Outputs) -> vjp.Arrays:
    core = core_of(arrays, scale)
    plan, (do, dfinal) = core.plan, gradients
    found, dstate = solving.backward(here, core, inputs_of(plan, arrays), kept, do, dfinal.swapaxes(2, 3))
    return vjp.Arrays(
        q=found.q[:, :, : plan.t],
        k=found.k[:, :, : plan.t],
        v=found.v[:, :, : plan.t],
        a=found.a[:, :, : plan.t],
        b=None if found.b is None else found.b[:, :, : plan.t],
        log_decay=solving.dlog_decay(plan, found.rows, found.log_decay, arrays.log_decay),
        state=dstate.swapaxes(2, 3),
        starts=None,
    )
