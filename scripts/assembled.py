"""Programs compiled for an H100 that is not there, and what NVIDIA's assembler says of their kernels.

JAX's plugin for CUDA and the assembler are found as by `attnlab train --topology=H100x1`: installed, or in
`<environment>/cuda`, where `make compile-gpu` puts them.
"""

import os
import pathlib
import re
from collections.abc import Callable
from typing import Any

import jax

from attnlab.errors import UserError
from attnlab.train import topologies


def absent_h100() -> jax.sharding.Sharding:
    """Returns the place of programs that are compiled for an H100. Raises `UserError` without JAX's plugin for CUDA."""
    jax.config.update('jax_platforms', 'cpu')
    topology = topologies.find('H100x1')
    if not topology.compiles:
        raise UserError(f'there is no compiler for an H100: {topology.lacks}')
    return jax.sharding.SingleDeviceSharding(topology.devices[0])


def compiled(function: Callable[..., Any], here: jax.sharding.Sharding, *arguments: Any) -> jax.stages.Compiled:
    """A call compiled for `here`."""
    placed = jax.jit(function, in_shardings=here, out_shardings=here)
    return placed.trace(*arguments).lower(lowering_platforms=('cuda',)).compile()


def dump(folder: pathlib.Path, *what: str) -> None:
    """Makes Mosaic write `what` there is of every kernel that it compiles from now on, such as 'PTX', into a folder."""
    os.environ |= {'MOSAIC_GPU_DUMP_TO': str(folder), **{f'MOSAIC_GPU_DUMP_{one}': '1' for one in what}}


def reports(folder: pathlib.Path) -> list[pathlib.Path]:
    """The assembler's reports of kernels whose 'PTX', 'PTXAS' and 'RESOURCES' were written there; of each one."""
    return sorted(folder.glob('*.ptxas'))


def resources(report: pathlib.Path) -> dict[str, Any]:
    """Of a kernel its name, registers, bytes spilled (stores and loads together) and bytes of shared memory."""
    text = report.read_text()
    # The number at the end counts what was written, and so is another one for each of the two.
    name = report.stem.rpartition('_')[0]
    said = '\n'.join(path.read_text() for path in report.parent.glob(f'{name}_*.resources.txt'))
    return {
        'kernel': name,
        'registers': max(map(int, re.findall(r'Used (\d+) registers', text))),
        'spilled': sum(map(int, re.findall(r'(\d+) bytes spill', text))),
        'shared': max(map(int, re.findall(r'smem_scratch_bytes=(\d+)', said)), default=None),
    }
