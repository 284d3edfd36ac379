"""The Pallas form of `linear_attention` for TPUs: a grid over batch, heads and groups of chunks, the groups in order.

The state stays in VMEM from one group to the next, transposed, `v k`, so that decays of key channels are a row. The
state before each group is kept for the backward pass, `t / group * k * v` numbers a head; that recomputes those of the
chunks, a group at a time, and then runs the chunks of the group, like the groups, from the last to the first.
"""

import functools
from collections.abc import Callable

import jax

from pallas_kernels.linear_attention import vjp
from pallas_kernels.linear_attention.mosaic_tpu.backward import backward
from pallas_kernels.linear_attention.mosaic_tpu.forward import forward
from pallas_kernels.matrix_state.differentiation import Outputs, Passes
from pallas_kernels.matrix_state.mosaic_tpu import plan
from pallas_kernels.target import Target


@functools.lru_cache
def form(here: Target) -> Callable[..., Outputs]:
    """The differentiable form for a device."""
    return vjp.differentiable(Passes(functools.partial(forward, here), functools.partial(backward, here)))


def refusal(here: Target, k: jax.Array, v: jax.Array, log_decay: jax.Array | None, state: jax.Array) -> str | None:
    """The reason why the call cannot be served, or `None`."""
    is_vector = log_decay is not None and log_decay.shape[3] > 1
    return plan.refusal(here, k, v, state, keys=plan.VECTOR_MOST if is_vector else plan.MOST)
