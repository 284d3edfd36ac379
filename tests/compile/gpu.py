"""Compiles training steps for an H100 that is not there, whole, as `tests/kernels/compile_gpu.py` compiles cores.

    python -m tests.compile.gpu [--rows=8] [--length=2048] [--width=1024] [--heads=8] mha mamba2

For every recipe, two periods of its layers in bfloat16, one line of JSON on standard output: the bytes of temporaries,
and what XLA's own operations read and write beside kernels, a loop's body counted once. Products are among these, by
the algorithm of cuBLAS that is the first: which is fastest is measured, on a device.
"""

import argparse
import json
import time
from collections.abc import Callable

import jax

from pallas_kernels import target
from tests.compile import programs
from tests.kernels import compile_gpu

UNMEASURED = {
    'xla_gpu_autotune_level': 0,
    'xla_gpu_enable_cublaslt': False,
    'xla_gpu_enable_triton_gemm': False,
}
"""Options by which XLA chooses algorithms of products without a device."""


def compiled_for_h100(trace: Callable[[], jax.stages.Traced]) -> jax.stages.Compiled:
    """What is traced, compiled for an H100."""
    with target.compiling_for(target.H100):
        return trace().lower(lowering_platforms=('cuda',)).compile(compiler_options=UNMEASURED)


def describe(recipe: str, device: jax.Device) -> dict[str, object]:
    """The line of a recipe."""
    start = time.process_time()
    compiled = compiled_for_h100(lambda: programs.trace(recipe, 'training step', [device]))
    operations = compile_gpu.beside(compiled.as_text())
    return {
        'recipe': recipe,
        'temporary MiB': round(compiled.memory_analysis().temp_size_in_bytes / 2**20),
        'beside MiB': round(sum(operations.values()) / 2**20),
        'seconds': round(time.process_time() - start, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, usual in (('rows', 8), ('length', 2048), ('width', 1024), ('heads', 8)):
        parser.add_argument(f'--{name}', type=int, default=usual)
    parser.add_argument('recipes', nargs='+')
    options = parser.parse_args()
    programs.ROWS, programs.LENGTH = options.rows, options.length
    programs.WIDTH, programs.HEADS = options.width, options.heads
    device = compile_gpu.absent_h100()
    for recipe in options.recipes:
        print(json.dumps(describe(recipe, device)), flush=True)


if __name__ == '__main__':
    main()
