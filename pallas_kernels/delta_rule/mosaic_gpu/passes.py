"""The Pallas form of `delta_rule` for Hopper GPUs: the passes of `matrix_state.mosaic_gpu.rule`.

With decays of key channels the weights among the steps of a chunk are in memory, and are multiplied with values as they
are; otherwise the kernel that reads the states makes them again.
"""

import functools
from collections.abc import Callable

import jax

from pallas_kernels.delta_rule import erasing, vjp
from pallas_kernels.delta_rule.mosaic_gpu.solve import solve
from pallas_kernels.diagonal_low_rank.mosaic_gpu.passes import form as diagonal_low_rank
from pallas_kernels.matrix_state.differentiation import Outputs
from pallas_kernels.matrix_state.mosaic_gpu import reads
from pallas_kernels.matrix_state.mosaic_gpu.rule import Rule, Steps, passes, read_solved
from pallas_kernels.matrix_state.mosaic_gpu.solving import Documents, Solved
from pallas_kernels.target import Target


@functools.lru_cache
def form(here: Target) -> Callable[..., Outputs]:
    """The differentiable form for a device."""
    return vjp.differentiable(passes(here, Rule(solve, _read)))


@functools.lru_cache
def with_erase(here: Target) -> Callable[..., Outputs]:
    """The differentiable form with erase keys of their own."""
    return erasing.by_kernels(diagonal_low_rank(here))


def _read(
    here: Target, documents: Documents, steps: Steps, solved: Solved, states: jax.Array, values: jax.Array
) -> jax.Array:
    if steps.log_decay is not None and steps.log_decay.ndim == 4:
        return read_solved(here, documents, steps, solved, states, values)
    return reads.read(here, reads.FORWARD, steps.q, steps.k, values, states, documents.rows, values.dtype)
