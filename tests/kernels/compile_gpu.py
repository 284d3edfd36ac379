"""Compiles cores for an H100 that is not there, forward and backward at the sizes of models; a process of its own.

    python tests/kernels/compile_gpu.py [--first] linear_scan attention

For every core and call of `real()` one line of JSON on standard output: of every kernel its registers, bytes spilled,
shared memory, the lines of PTX that touch an accumulator too early, and constants in registers of factors; of the
program the operations that XLA has beside the kernels and the bytes they read and write, the bytes of temporaries, and
seconds of processor time. JAX's plugin for CUDA and the assembler are found as by
`attnlab train --topology=H100x1`: installed, or in `<environment>/cuda`, where `make compile-gpu` puts them.
"""

import argparse
import collections
import importlib
import json
import os
import pathlib
import re
import shutil
import sys
import tempfile
import time
import traceback

import jax

import pallas_kernels
from attnlab.errors import UserError
from attnlab.train import topologies
from pallas_kernels import dispatch, target

APART = pathlib.Path(sys.prefix) / 'cuda'
BYTES = {'pred': 1, 's8': 1, 'u8': 1, 'bf16': 2, 'f16': 2, 's16': 2, 'f32': 4, 's32': 4, 'u32': 4, 'f64': 8, 's64': 8}
FREE = {'parameter', 'constant', 'bitcast', 'tuple', 'get-tuple-element', 'while', 'conditional', 'call', 'after-all'}
"""Operations that move nothing themselves."""

SHAPE = re.compile(r'\b([a-z]+\d*)\[([\d,]*)\]')
OPERATION = re.compile(r'^\s*(?:ROOT )?%([\w.\-]+) = (.*?) ([\w\-]+)\((.*)$')


def early_uses(ptx: str) -> list[str]:
    """The lines that name a register which an asynchronous product may still be reading or writing.

    Registers of a `wgmma.mma_async` are out of bounds until a `wgmma.wait_group` has waited for the group they were
    committed in. Lines are taken in the order of the text: what a jump backwards brings about is not seen.
    """
    found, groups, open_group = [], collections.deque[set[str]](), set[str]()
    for number, line in enumerate(ptx.splitlines(), 1):
        if 'wgmma.mma_async' in line:
            operands = re.findall(r'\{([^{}]*)\}', line[line.index('wgmma.mma_async') :])
            open_group |= {register for operand in operands for register in re.findall(r'%\w+', operand)}
        elif 'wgmma.commit_group' in line:
            groups.append(open_group)
            open_group = set()
        elif waited := re.search(r'wgmma\.wait_group\S* (\d+)', line):
            while len(groups) > int(waited[1]):
                groups.popleft()
        elif set(re.findall(r'%\w+', line)) & open_group.union(*groups):
            found.append(f'{number}: {line.strip()}')
    return found


def constant_factors(ptx: str) -> list[str]:
    """The registers of left factors of `wgmma.mma_async` that the assembler knows to hold a constant.

    Assemblers of CUDA 13 were seen to leave such registers unset before the product.
    """
    held: dict[str, str] = {}
    found = []
    for number, line in enumerate(ptx.splitlines(), 1):
        if 'wgmma.mma_async' in line:
            operands = re.findall(r'\{([^{}]*)\}', line[line.index('wgmma.mma_async') :])
            for register in re.findall(r'%\w+', ''.join(operands[1:2])):
                if register in held:
                    found.append(f'{number}: {register} is {held[register]}')
        elif (moved := re.match(r'\s*mov\.b\d+\s+(%\w+), (\w+|%\w+);', line)) and (
            (value := held.get(moved[2], moved[2])) and not value.startswith('%')
        ):
            held[moved[1]] = value
        elif written := re.match(r'\s*(?:@!?%\w+ )?[\w.:]+\s+(%\w+),', line):
            held.pop(written[1], None)
    return found


def beside(text: str) -> dict[str, int]:
    """Bytes read and written by what XLA does beside kernels, by the names of operations.

    A loop's body counts once, what runs asynchronously at its start and at its end.
    """
    inner = {name for line in text.splitlines() for name in re.findall(r'(?:calls|to_apply)=%([\w.\-]+)', line)}
    found: dict[str, int] = {}
    sizes: dict[str, int] = {}
    skipped = False
    for line in text.splitlines():
        if header := re.match(r'^(?:ENTRY )?%([\w.\-]+) .*\{$', line):
            skipped = header[1] in inner
        if skipped or not (operation := OPERATION.match(line)):
            continue
        name, result, kind, rest = operation.groups()
        sizes[name] = sum(_bytes(*shape) for shape in SHAPE.findall(result))
        if kind not in FREE and 'mosaic_gpu' not in rest:
            operands = rest.partition('), ')[0]
            found[name] = sizes[name] + sum(sizes.get(operand, 0) for operand in re.findall(r'%([\w.\-]+)', operands))
    return found


def _bytes(kind: str, shape: str) -> int:
    count = BYTES.get(kind, 0)
    for size in shape.split(','):
        count *= int(size or 1)
    return count


def kernels(folder: pathlib.Path) -> list[dict[str, object]]:
    """What the assembler says of every kernel whose machine code was made in `folder`, and `early_uses`."""
    found: list[dict[str, object]] = []
    for report in sorted(folder.glob('*.ptxas')):
        text = report.read_text()
        # The number at the end counts what was written, and so is another one for each of the two.
        name = report.stem.rpartition('_')[0]
        resources = '\n'.join(path.read_text() for path in folder.glob(f'{name}_*.resources.txt'))
        found.append(
            {
                'kernel': name,
                'registers': max(map(int, re.findall(r'Used (\d+) registers', text))),
                'spilled': sum(map(int, re.findall(r'(\d+) bytes spill', text))),
                'shared': max(map(int, re.findall(r'smem_scratch_bytes=(\d+)', resources)), default=None),
                'early': early_uses(report.with_suffix('.ptx').read_text()),
                'constants': constant_factors(report.with_suffix('.ptx').read_text()),
            }
        )
    return found


def absent_h100() -> jax.Device:
    """Returns an H100 that programs can be compiled for. Raises `UserError` without JAX's plugin for CUDA."""
    jax.config.update('jax_platforms', 'cpu')
    topology = topologies.find('H100x1')
    if not topology.compiles:
        raise UserError(f'there is no compiler for an H100: {topology.lacks}')
    return topology.devices[0]


def compile_calls(core: str, here: jax.sharding.Sharding, folder: pathlib.Path, *, first: bool) -> None:
    """Compiles the calls of `real()` of a core, or the first of them, and prints what came of it."""
    calls = importlib.import_module(f'pallas_kernels.cases.{core}').real()
    for name, call in list(calls.items())[: 1 if first else None]:
        for what in ('forward', 'forward and backward'):
            shutil.rmtree(folder)
            folder.mkdir()
            jax.clear_caches()
            start = time.process_time()
            with target.compiling_for(target.H100), dispatch.ledger() as entries:
                compiled = _compile(getattr(pallas_kernels, core), call, here, gradients=what != 'forward')
            operations = beside(compiled.as_text())
            line = {
                'core': core,
                'call': name,
                'what': what,
                'implementation': entries[0].implementation,
                'refused': dict(entries[0].refused).get('mosaic_gpu'),
                'kernels': kernels(folder),
                'beside': dict(sorted(operations.items(), key=lambda item: -item[1])[:6]),
                'beside MiB': round(sum(operations.values()) / 2**20, 1),
                'arguments MiB': round(compiled.memory_analysis().argument_size_in_bytes / 2**20, 1),
                'temporary MiB': round(compiled.memory_analysis().temp_size_in_bytes / 2**20, 1),
                'seconds': round(time.process_time() - start, 1),
            }
            print(json.dumps(line), flush=True)


def _compile(function, call, here, *, gradients):
    options = {name: value for name, value in call.options.items() if not isinstance(value, jax.ShapeDtypeStruct)}
    constant = {name: value for name, value in call.options.items() if isinstance(value, jax.ShapeDtypeStruct)}

    def forward(arrays, constant):
        return function(**arrays, **constant, **options)

    def both(arrays, cotangents, constant):
        outputs, pull = jax.vjp(lambda arrays: forward(arrays, constant), arrays)
        return outputs, pull(cotangents)

    given = (call.arrays, jax.eval_shape(forward, call.arrays, constant)) if gradients else (call.arrays,)
    compiled = jax.jit(both if gradients else forward, in_shardings=here, out_shardings=here)
    return compiled.trace(*given, constant).lower(lowering_platforms=('cuda',)).compile()


if __name__ == '__main__':
    parser = argparse.ArgumentParser()
    parser.add_argument('--first', action='store_true', help='the first call of a core alone')
    parser.add_argument('cores', nargs='+')
    options = parser.parse_args()
    dumps = pathlib.Path(tempfile.mkdtemp()) / 'dumps'
    dumps.mkdir()
    os.environ |= {f'MOSAIC_GPU_DUMP_{what}': '1' for what in ('PTX', 'PTXAS', 'RESOURCES')}
    os.environ['MOSAIC_GPU_DUMP_TO'] = str(dumps)
    here = jax.sharding.SingleDeviceSharding(absent_h100())
    for core in options.cores:
        try:
            compile_calls(core, here, dumps, first=options.first)
        except Exception:
            # One core of several: what went wrong is said, and the others are compiled.
            print(json.dumps({'core': core, 'error': traceback.format_exc()[-3000:]}), flush=True)
    shutil.rmtree(dumps.parent)
