"""What only a device shows of arrays that are large, and of sums: offsets beyond 2^31, long rows, more rows than a grid
has blocks, and the same bits twice."""

import dataclasses
import importlib
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from attnlab.testing import cores
from pallas_kernels import dispatch
from pallas_kernels.cases.drawing import Call
from scripts.session import expected
from scripts.session.cases import CORES, Case
from scripts.session.stages import correct

SECONDS = 90.0
PAST, COLUMNS, LAST = 2**31, 50_304, 64
"""So many numbers lie before the last rows, of a model's logits."""

LENGTH, SEQUENCES = 65_536, 70_000
"""Steps of a long row; sequences beyond the 65,535 blocks of a grid's second axis."""

PASSES = {'length': 'forward and backward', 'sequences': 'forward'}
PORTABLE = 'xla'


def cases(small: bool) -> list[Case]:
    """Softmax of an array past the limit, 9 GB with its result; long rows, and many; then every core twice."""
    past, columns = (2**12, 256) if small else (PAST, COLUMNS)
    size = f'{past} x {columns}'
    offsets = Case(f'limits/offsets/{size}', 'limits', SECONDS, 'softmax', size, 'bfloat16', 'forward', correct.KERNEL)
    grown = ('linear_scan',) if small else ('linear_attention', 'linear_scan')
    found = [_grown(core, 'length', 64 if small else LENGTH, correct.KERNEL) for core in grown]
    found += [_grown(core, 'sequences', 2 * LAST if small else SEQUENCES, None) for core in grown]
    names = ('softmax',) if small else CORES
    return [offsets, *found, *(correct.first(core, stage='limits') for core in names)]


def _grown(core: str, by: str, size: int, implementation: str | None) -> Case:
    """The first case of a core, with so many steps or sequences."""
    identity = f'limits/{by}/{core}/{size}'
    return Case(identity, 'limits', SECONDS, core, str(size), 'bfloat16', PASSES[by], implementation)


def run(case: Case, folder: pathlib.Path) -> dict[str, Any]:
    """The result: of what is large against XLA's form, or of two runs against each other, to the bit."""
    jax.clear_caches()
    checks = {'offsets': _offsets, 'length': _length, 'sequences': _sequences}
    return checks.get(case.id.split('/')[1], _twice)(case)


def _offsets(case: Case) -> dict[str, Any]:
    past, columns = (int(number) for number in case.call.split(' x '))
    rows = past // columns + LAST
    # Rows that differ, and no two columns alike in their neighbourhood, so that a wrapped offset is seen.
    scales = 1 + jnp.arange(rows) * 37 % 97 / 97
    x = (4 * jnp.sin(jnp.arange(columns))).astype(case.dtype)[None] * scales.astype(case.dtype)[:, None]
    with cores.target_of(case.implementation), dispatch.ledger() as entries:
        found = pallas_kernels.softmax(x, implementation=case.implementation)[-LAST:]
    right = jax.nn.softmax(x[-LAST:].astype(jnp.float32), axis=-1)
    worst = correct.compare('last rows', np.asarray(found), np.asarray(right), case.dtype, columns)
    return correct.judged(worst, entries[0].implementation)


def _length(case: Case) -> dict[str, Any]:
    call, core = _drawn(case, t=int(case.call)), expected.core_of(case)
    with dispatch.ledger() as entries:
        found = cores.evaluate(core, call, case.implementation)
    return correct.compared(case, call, found, cores.evaluate(core, _wide(call), PORTABLE), entries[0].implementation)


def _sequences(case: Case) -> dict[str, Any]:
    """What no grid has blocks for the portable form serves unasked; the last sequences are those of a call of them."""
    call, core = _drawn(case, b=int(case.call)), expected.core_of(case)
    with dispatch.ledger() as entries:
        found = _outputs(core, call, case.implementation)
    served = entries[0].implementation
    if served != PORTABLE:
        return {'status': 'wrong', 'served': served, 'reason': f'{served} serves {case.call} sequences'}
    last = Call({name: array[-LAST:] for name, array in call.arrays.items()}, call.options)
    numbers = {name: array[-LAST:] for name, array in found.items()}
    return correct.compared(case, last, numbers, _outputs(core, _wide(last), PORTABLE), served)


def _drawn(case: Case, **sizes: int) -> Call:
    module, name = importlib.import_module(f'pallas_kernels.cases.{case.core}'), correct.first(case.core).call
    return module.draw(name, dataclasses.replace(module.CASES[name], **sizes), case.dtype)


def _wide(call: Call) -> Call:
    return Call({name: array.astype(jnp.float32) for name, array in call.arrays.items()}, call.options)


def _outputs(core: cores.Core, call: Call, implementation: str | None) -> cores.Numbers:
    outputs = jax.jit(lambda arrays: core(**arrays, **call.options, implementation=implementation))(call.arrays)
    return {f'output {place}': np.asarray(output) for place, output in enumerate(jax.tree.leaves(outputs))}


def _twice(case: Case) -> dict[str, Any]:
    call = expected.call_of(case)
    with dispatch.ledger() as entries:
        one, other = (cores.evaluate(expected.core_of(case), call, case.implementation) for _ in range(2))
    line = {'status': 'ok', 'served': entries[0].implementation}
    return next((line | unlike for name in one if (unlike := difference(name, one[name], other[name]))), line)


def difference(name: str, one: np.ndarray, other: np.ndarray) -> dict[str, Any] | None:
    """That two runs differ in an array, and in how many numbers; `None` where all bits are the same."""
    if one.tobytes() == other.tobytes():
        return None
    unlike = int(np.sum(one != other))
    return {'status': 'wrong', 'reason': f'two runs differ in {unlike} of {one.size} numbers of {name}'}
