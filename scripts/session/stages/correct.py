"""Every core and named case on the device, in value and in gradient, against float64."""

import importlib
import math
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from attnlab.testing import cores
from attnlab.testing.tolerances import worst_error
from pallas_kernels import dispatch
from pallas_kernels.cases.drawing import Call
from scripts.session import expected
from scripts.session.cases import CORES, Case

SECONDS = 150.0
KERNEL = 'mosaic_gpu'
HUGE = 1e300
DTYPES = ('bfloat16', 'float16', 'float32')


def cases(small: bool) -> list[Case]:
    """First the cases that every kernel serves, in bfloat16; then other types, weight maps and cases."""
    if small:
        return [case('softmax', 'one', 'float32', KERNEL), *(case(core, 'one', 'float32', 'xla') for core in SMALL)]
    served = {core: _named(core) for core in CORES}
    found = [case(core, name, 'bfloat16', KERNEL) for core in CORES for name in served[core]]
    found += [
        case(core, name, dtype, KERNEL)
        for dtype in DTYPES[1:]
        for core in CORES
        for name in served[core]
        if (core, name, dtype) not in BEYOND
    ]
    maps = importlib.import_module('pallas_kernels.cases.attention').MAPS
    found += [case('attention', f'masked, {weights}', 'bfloat16', KERNEL) for weights in maps]
    others = {core: [name for name in _module(core).CASES if name not in served[core]] for core in CORES}
    return found + [case(core, name, 'bfloat16', None) for core in CORES for name in others[core]]


SMALL = ('softmax', 'linear_scan')

BEYOND = {
    ('delta_rule', 'strong scalar', 'float16'),
    ('linear_attention', 'strong scalar', 'float16'),
    ('linear_attention', 'long sudden', 'float16'),
}
"""Numbers that decay to less than 6e-8 on their way into a product, which float16 does not have."""


def case(core: str, name: str, dtype: str, implementation: str | None, stage: str = 'correct') -> Case:
    """One call in one type by one implementation."""
    identity = f'{stage}/{core}/{name}/{dtype}/{implementation or "any"}'
    return Case(identity, stage, SECONDS, core, name, dtype, 'forward and backward', implementation)


def first(core: str, stage: str = 'correct') -> Case:
    """The first case that the kernel of a core serves, in bfloat16."""
    return case(core, _named(core)[0], 'bfloat16', KERNEL, stage)


def run(case: Case, folder: pathlib.Path) -> dict[str, Any]:
    """Compares results; a named implementation that cannot serve the call is skipped, with the reason."""
    jax.clear_caches()
    call, numbers = expected.read(folder, case)
    with dispatch.ledger() as entries:
        found = cores.evaluate(expected.core_of(case), call, case.implementation)
    return compared(case, call, found, numbers, entries[0].implementation)


def compared(case: Case, call: Call, found: cores.Numbers, right: cores.Numbers, served: str) -> dict[str, Any]:
    """The result of a call by its worst element."""
    # The reduction length: at most the size of the largest argument.
    reduction = max(array.size for array in call.arrays.values())
    worst = max((compare(name, array, right[name], case.dtype, reduction) for name, array in found.items()),
                key=lambda one: one['of_bound'])  # fmt: skip
    return judged(worst, served)


def judged(worst: dict[str, Any], served: str) -> dict[str, Any]:
    """The result of a case whose worst element and form these are."""
    right = worst['of_bound'] <= 1
    line = {'status': 'ok' if right else 'wrong', 'worst': worst, 'served': served}
    return line if right else {**line, 'reason': f'{worst["where"]} is off by {worst["error"]:.2g}'}


def compare(name: str, array: np.ndarray, right: np.ndarray, dtype: str, reduction: int) -> dict[str, Any]:
    """The worst element of an array; products of 16-bit operands have their precision, whatever their type.

    Integers, which are indices, must be equal.
    """
    if not jnp.issubdtype(array.dtype, jnp.inexact):
        wrong = int(np.sum(array != right))
        return {'where': name, 'error': float(wrong), 'of_bound': 2.0 if wrong else 0.0}
    worst = worst_error(cores.parts(array), cores.parts(right), dtype=dtype, reduction=reduction)
    share = worst.error / worst.bound if worst.bound else 2.0 * (worst.error > 0)
    # JSON has no infinities; a non-finite number, in the result or the expectation, has the largest error.
    error, share = (value if math.isfinite(value) else HUGE for value in (worst.error, share))
    return {'where': f'{name} {list(worst.place)}', 'error': error, 'of_bound': share}


def _module(core: str) -> Any:
    return importlib.import_module(f'pallas_kernels.cases.{core}')


def _named(core: str) -> tuple[str, ...]:
    """The cases that every kernel of a core serves."""
    module = _module(core)
    return (*getattr(module, 'HOPPER', module.KERNEL), *getattr(module, 'VECTOR', ()))
