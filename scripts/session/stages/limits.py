"""What only a device shows of arrays that are large, and of sums: offsets beyond 2^31, and the same bits twice."""

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels
from attnlab.testing import cores
from pallas_kernels import dispatch
from scripts.session import expected
from scripts.session.cases import CORES, Case
from scripts.session.stages import correct

SECONDS = 90.0
PAST, COLUMNS, LAST = 2**31, 50_304, 64
"""So many numbers lie before the last rows, of a model's logits."""


def cases(small: bool) -> list[Case]:
    """Softmax of an array past the limit, 9 GB with its result; then every core twice."""
    past, columns = (2**12, 256) if small else (PAST, COLUMNS)
    size = f'{past} x {columns}'
    offsets = Case(f'limits/offsets/{size}', 'limits', SECONDS, 'softmax', size, 'bfloat16', 'forward', correct.KERNEL)
    names = ('softmax',) if small else CORES
    return [offsets, *(correct.first(core, stage='limits') for core in names)]


def run(case: Case, folder: pathlib.Path) -> dict[str, Any]:
    """The result: of the last rows against XLA's, or of two runs against each other, to the bit."""
    jax.clear_caches()
    return _offsets(case) if case.what == 'forward' else _twice(case)


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
