"""Compiles cores for an H100 that is not there, forward and backward at the sizes of models; a process of its own.

    python tests/kernels/compile_gpu.py [--first] linear_scan attention
    python tests/kernels/compile_gpu.py --large linear_scan attention

For every core and call of `real()` one line of JSON on standard output: of every kernel its registers, bytes spilled,
shared memory, the lines of PTX that touch an accumulator too early, and constants in registers of factors; of the
program the operations that XLA has beside the kernels and the bytes they read and write, the bytes of temporaries, and
seconds of processor time. With `--large` it is the first call, grown to arrays of more than 2^32 numbers, and of every
kernel the places where its offsets might have too few bits. The compiler is that of `scripts/assembled.py`.
"""

import argparse
import collections
import importlib
import json
import math
import pathlib
import re
import shutil
import sys
import tempfile
import time
import traceback
from typing import Any

import jax

import pallas_kernels
from pallas_kernels import dispatch, target
from pallas_kernels.cases import drawing
from scripts import assembled

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
        elif (moved := re.match(r'\s*mov\.b\d+\s+(%\w+), (-?\w+|%\w+);', line)) and (
            (value := held.get(moved[2], moved[2])) and not value.startswith('%')
        ):
            held[moved[1]] = value
        elif written := re.match(r'\s*(?:@!?%\w+ )?[\w.:]+\s+(%\w+),', line):
            held.pop(written[1], None)
    return found


def narrow_offsets(log: str) -> list[str]:
    """What in a kernel, as Mosaic hands it to LLVM, might address an array with fewer than 64 bits.

    It is a product in 32 bits by a stride, in numbers or in bytes, along which an array has more than 2^31 numbers; a
    pointer that is moved by 32 bits which depend on more than the thread; and a dimension too long for an index of 32
    bits. Without these an index along one dimension has 32 bits, and what is made of several has 64.
    """
    text = log[log.rindex('IR Dump Before GpuModuleToAssemblyPass') :].partition('// -----// IR Dump')[0]
    factors, long = set[int](), set[str]()
    for shape, kind in re.findall(r'memref<((?:\d+x)+)([a-z]+\d+)', text):
        sizes = [int(size) for size in shape.split('x')[:-1]]
        strides = [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]
        past = [stride for size, stride in zip(sizes, strides, strict=True) if stride > 1 and size * stride > 2**31]
        factors |= {stride * times for stride in past for times in (1, BYTES.get(kind.replace('i', 's'), 1))}
        long |= {shape for size in sizes if size >= 2**31}
    own = text.rpartition('gpu.module')[2]
    defined = dict(re.findall(r'^\s*(%[\w.]+) = (.*?)(?: loc\(.*)?$', own, re.MULTILINE))
    found = [f'a dimension of {shape}' for shape in sorted(long)]
    for name, value in defined.items():
        operands = re.findall(r'%[\w.]+', value)
        if re.match(r'llvm\.(mul|shl) .*: i32$', value):
            known = [constant for operand in operands if (constant := _constant(defined.get(operand, ''))) is not None]
            narrow = any((2**number if 'shl' in value[:9] else number) in factors for number in known)
        else:
            narrow = 'getelementptr' in value and '(!llvm.ptr, i32)' in value and not _of_thread(operands[-1], defined)
        if narrow:
            found.append(f'{name} = {value}')
    return found


def _constant(value: str) -> int | None:
    found = re.match(r'llvm\.mlir\.constant\((-?\d+) : i32\)', value)
    return found and int(found[1])


def _of_thread(name: str, defined: dict[str, str]) -> bool:
    """Whether a number is made of constants and of the place of a thread in its block."""
    value = defined.get(name)
    if value is None or 'ctaid' in value or 'llvm.load' in value:
        return False
    return all(_of_thread(operand, defined) for operand in re.findall(r'%[\w.]+', value))


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
    for report in assembled.reports(folder):
        ptx = report.with_suffix('.ptx').read_text()
        found.append({**assembled.resources(report), 'early': early_uses(ptx), 'constants': constant_factors(ptx)})
    return found


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


def check_offsets(core: str, here: jax.sharding.Sharding, folder: pathlib.Path) -> None:
    """Compiles the first call of a core over arrays of more than 2^32 numbers, and prints how they are addressed."""
    call = _large(next(iter(importlib.import_module(f'pallas_kernels.cases.{core}').real().values())))
    for what in ('forward', 'forward and backward'):
        shutil.rmtree(folder)
        folder.mkdir()
        jax.clear_caches()
        with target.compiling_for(target.H100), dispatch.ledger() as entries:
            _compile(getattr(pallas_kernels, core), call, here, gradients=what != 'forward')
        logs = sorted(folder.glob('*.mlir-passes.log'))
        offsets = {log.name.partition('.')[0]: narrow_offsets(log.read_text()) for log in logs}
        line = {'core': core, 'what': what, 'implementation': entries[0].implementation, 'offsets': offsets}
        print(json.dumps(line), flush=True)


def _large(call: drawing.Call) -> drawing.Call:
    """The call with so many times as many rows that its first array has more than 2^32 numbers."""
    first = next(iter(call.arrays.values()))
    times = 2**32 // math.prod(first.shape) + 1

    def grown(name: str, value: Any) -> Any:
        rows = isinstance(value, jax.ShapeDtypeStruct) and name != 'taps' and value.shape[:1] == first.shape[:1]
        return jax.ShapeDtypeStruct((times * value.shape[0], *value.shape[1:]), value.dtype) if rows else value

    return drawing.Call(*({name: grown(name, value) for name, value in part.items()} for part in call))


def _compile(function, call, here, *, gradients):
    options = {name: value for name, value in call.options.items() if not isinstance(value, jax.ShapeDtypeStruct)}
    constant = {name: value for name, value in call.options.items() if isinstance(value, jax.ShapeDtypeStruct)}

    def forward(arrays, constant):
        return function(**arrays, **constant, **options)

    def both(arrays, cotangents, constant):
        outputs, pull = jax.vjp(lambda arrays: forward(arrays, constant), arrays)
        return outputs, pull(cotangents)

    given = (call.arrays, jax.eval_shape(forward, call.arrays, constant)) if gradients else (call.arrays,)
    return assembled.compiled(both if gradients else forward, here, *given, constant)


if __name__ == '__main__':
    parser = argparse.ArgumentParser()
    parser.add_argument('--first', action='store_true', help='the first call of a core alone')
    parser.add_argument('--large', action='store_true', help='how kernels address arrays of more than 2^32 numbers')
    parser.add_argument('cores', nargs='+')
    options = parser.parse_args()
    dumps = pathlib.Path(tempfile.mkdtemp()) / 'dumps'
    dumps.mkdir()
    assembled.dump(dumps, *(('MLIR_PASSES',) if options.large else ('PTX', 'PTXAS', 'RESOURCES')))
    here = assembled.absent_h100()
    for core in options.cores:
        try:
            if options.large:
                check_offsets(core, here, dumps)
            else:
                compile_calls(core, here, dumps, first=options.first)
        except Exception:
            # One core of several: what went wrong is said, and the others are compiled.
            print(json.dumps({'core': core, 'error': traceback.format_exc()[-3000:]}), flush=True)
    shutil.rmtree(dumps.parent)
