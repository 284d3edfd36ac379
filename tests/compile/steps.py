"""Compiles training steps for an H100 or a TPU that is not there: what memory they take, and how much they move.

    python -m tests.compile.steps [--topology=v5e:2x2] [--rows=8] [--length=2048] [--width=1024] [--heads=8] mha mamba2

For every recipe, two periods of its layers in bfloat16 on one device, one line of JSON on standard output: MiB of
temporaries, and those that XLA's operations read and write, a loop's body counted once: of a GPU beside kernels, by
`tests/kernels/compile_gpu.py`, whose compiler this is; of a TPU by the compiler's own count. On a GPU products run by
the first algorithm there is: which is fastest is measured, on a device.
"""

import argparse
import functools
import json
import time
from collections.abc import Callable

import jax

from attnlab.train import topologies
from pallas_kernels import target
from tests.compile import programs
from tests.kernels import compile_gpu


def compiled(topology: topologies.Topology, trace: Callable[[], jax.stages.Traced]) -> jax.stages.Compiled:
    """What is traced, compiled for one device of a topology."""
    with target.compiling_for(topology.target):
        return topology.compile(trace().lower(lowering_platforms=(topology.platform,)))


def step(recipe: str, topology: topologies.Topology) -> tuple[jax.stages.Compiled, float]:
    """A step, and the bytes moved: on a GPU beside its kernels."""
    found = compiled(topology, functools.partial(programs.trace, recipe, 'training step', topology.devices[:1]))
    if topologies.gpus(topology.name):
        return found, sum(compile_gpu.beside(found.as_text()).values())
    return found, found.cost_analysis()['bytes accessed']


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument('--topology', default='H100x1')
    for name, usual in (('rows', 8), ('length', 2048), ('width', 1024), ('heads', 8)):
        parser.add_argument(f'--{name}', type=int, default=usual)
    parser.add_argument('recipes', nargs='+')
    options = parser.parse_args()
    programs.ROWS, programs.LENGTH = options.rows, options.length
    programs.WIDTH, programs.HEADS = options.width, options.heads
    jax.config.update('jax_platforms', 'cpu')
    topology = topologies.find(options.topology)
    for recipe in options.recipes:
        start, busy = time.perf_counter(), time.process_time()
        found, moved = step(recipe, topology)
        line = {
            'recipe': recipe,
            'temporary MiB': round(found.memory_analysis().temp_size_in_bytes / 2**20),
            'moved MiB': round(moved / 2**20),
            'seconds': round(time.perf_counter() - start, 1),
            'processor seconds': round(time.process_time() - busy, 1),
        }
        print(json.dumps(line), flush=True)


if __name__ == '__main__':
    main()
