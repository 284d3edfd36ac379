"""How Mosaic GPU kernels are started, and on which devices."""

import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu

from pallas_kernels import tiling
from pallas_kernels.cost import Cost
from pallas_kernels.target import Target

TAKES_ESTIMATES = 'cost_estimate' in inspect.signature(plgpu.kernel).parameters
"""Whether this version of JAX accepts a cost estimate for a kernel; the oldest does not."""

WARPGROUP = 128
"""The threads of a warpgroup."""

COPYING_REGISTERS = 40
"""Those that a thread of a warpgroup which only copies keeps; what it gives back goes to those that compute."""


def capability_refusal(here: Target) -> str | None:
    """The reason why a device cannot run kernels with Hopper's matrix and copy instructions, or `None`."""
    if here.capability == '9.0':
        return None
    return f'{here.kind} has compute capability {here.capability}; expected 9.0 (Hopper)'


def grid_refusal(**grid: int) -> str | None:
    """The reason why a grid, given by its named sizes, cannot be launched, or `None`.

    Pallas makes the last axis CUDA's first, the one before it the second, and the product of the others the third.
    """
    *outer, second, _ = (1, 1, *grid.values())
    if math.prod(outer) <= tiling.GRID and second <= tiling.GRID:
        return None
    sizes = ', '.join(f'{name}={size}' for name, size in grid.items())
    names = list(grid)
    axes = ' x '.join(names[:-2]), names[-2]
    return f'the grid is {sizes}; expected at most {tiling.GRID} for ' + ' and for '.join(axis for axis in axes if axis)


def kernel(
    body: Callable[..., None],
    here: Target,
    *,
    name: str,
    cost: Cost,
    out_type: Any,
    grid: tuple[int, ...],
    grid_names: tuple[str, ...],
    **options: Any,
) -> Callable[..., Any]:
    """`plgpu.kernel`, interpreted where `here` says so; memory not yet written then holds NaN.

    `name` is shown by profilers, `cost` is the estimate for the compiler. Offsets into arrays have 64 bits, those
    within a tile 32.
    """
    refusal = grid_refusal(**dict(zip(grid_names, grid, strict=True)))
    if refusal is not None:
        raise AssertionError(f'{name}: a call that was not refused: {refusal}')

    def run(*operands: Any) -> Any:
        estimate: dict[str, Any] = {'cost_estimate': cost.estimate(operands, out_type)} if TAKES_ESTIMATES else {}
        results = plgpu.kernel(
            body,
            interpret=plgpu.InterpretGPUParams() if here.interpret else None,
            out_type=out_type,
            grid=grid,
            grid_names=grid_names,
            kernel_name=name,
            **estimate,
            **options,
        )(*operands)
        # XLA of JAX 0.11.2 merges a kernel with the update of a kept array, and runs it once more for other users.
        return jax.lax.optimization_barrier(results)

    return run


def kernel_of_warpgroups(
    body: Callable[..., None], here: Target, *, computing: int, scratch_types: tuple[Any, ...], **options: Any
) -> Callable[..., Any]:
    """A kernel of `computing` warpgroups that compute and one that copies, `axis_index('warpgroup')`.

    They end together: if a warpgroup exits while another still multiplies, the latter can fail with an illegal
    instruction.
    """

    def together(*refs: Any) -> None:
        *others, done = refs
        body(*others)
        plgpu.barrier_arrive(done)
        plgpu.barrier_wait(done)

    return kernel(
        together,
        here,
        num_threads=computing + 1,
        thread_name='warpgroup',
        scratch_types=(*scratch_types, plgpu.Barrier(num_arrivals=computing + 1)),
        **options,
    )
