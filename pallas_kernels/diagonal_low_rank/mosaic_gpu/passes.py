"""The Pallas form of `diagonal_low_rank` for Hopper GPUs: the passes of `matrix_state.mosaic_gpu.rule`."""

import functools
from collections.abc import Callable

from pallas_kernels.diagonal_low_rank import vjp
from pallas_kernels.diagonal_low_rank.mosaic_gpu.solve import solve
from pallas_kernels.matrix_state.differentiation import Outputs
from pallas_kernels.matrix_state.mosaic_gpu.rule import passes
from pallas_kernels.target import Target


@functools.lru_cache
def form(here: Target) -> Callable[..., Outputs]:
    """The differentiable form for a device."""
    return vjp.differentiable(passes(here, solve))
