"""Drops candidates of `tune` that spill far more registers than the rule, by the compiler for an absent H100."""

import dataclasses
import importlib.metadata
import itertools
import pathlib
import tempfile
import time
from collections.abc import Sequence
from typing import IO

from pallas_kernels import tuning
from scripts.session import cases, parent
from scripts.session.cases import Case, Stage
from scripts.session.lines import Line
from scripts.session.stages import assemble

FEW = 64
"""Bytes that a candidate may spill beyond the rule: so many has the tile of `attention` in the table of the H200."""

SECONDS = 300.0
"""The time limit of a program."""

LOG = 'assembled.log'


def dropped(candidates: Sequence[Case], folder: pathlib.Path) -> list[Case]:
    """The candidates to leave out, with their reasons; what is found of each is printed as it is compiled.

    Of one that cannot be compiled nothing is known, and it stays; so do all of a call whose rule's own tile cannot be,
    and all where there is no compiler.
    """
    if not candidates:
        return []
    start, numbers = time.monotonic(), itertools.count(1)
    compiler = f'JAX {importlib.metadata.version("jax")}'
    found: list[Case] = []
    unknown = 0
    with (folder / LOG).open('wb') as log:
        for own, of_call in itertools.groupby(candidates, of_rule):
            rule = compiled(own, log)
            if rule['status'] == assemble.ABSENT:
                print(f'all {len(candidates)} candidates of tiles are kept, as none was compiled: {rule["reason"]}')
                return []
            for case in of_call:
                line = compiled(case, log) if rule['status'] == 'ok' else rule
                print(f'{next(numbers)} of {len(candidates)}: {case.id}: {said(line, rule)}', flush=True)
                if line['status'] != 'ok':
                    unknown += 1
                elif reason := more(line, rule):
                    found.append(dataclasses.replace(case, reason=f'{reason}, by {compiler}'))
    seconds = time.monotonic() - start
    print(
        f'{len(found)} of {len(candidates)} candidates of tiles are dropped ({folder / cases.DROPPED}), as they spill '
        f'over {FEW} bytes more than the rule; {unknown} were not compiled; {compiler}, {seconds:.0f} s'
    )
    return found


def of_rule(case: Case) -> Case:
    """The case of the rule's own tile in the place of a candidate."""
    asked, _ = tuning.entry(case.id, case.tile)
    name = f'{case.id.rpartition(" ")[0]}, the rule'
    return dataclasses.replace(case, id=name, tile=tuning.entry_of(asked, tuning.candidates(asked)[0]))


def compiled(case: Case, log: IO[bytes]) -> Line:
    """What became of compiling a case's program in a process of its own, which may die or hang."""
    with tempfile.TemporaryDirectory() as folder:
        worker = parent.Worker(pathlib.Path(folder), Stage(), log, parent.START)
        return parent.answer(worker, dataclasses.replace(case, stage='assemble', seconds=SECONDS), 1.0)


def spilled(line: Line) -> int:
    """Bytes that the kernels of a program spill, stores and loads together."""
    return sum(kernel['spilled'] for kernel in line['kernels'])


def more(line: Line, rule: Line) -> str:
    """Why a candidate is dropped: its kernels together spill over `FEW` bytes more than the rule's; '' if not."""
    if spilled(line) <= spilled(rule) + FEW:
        return ''
    each = ', '.join(f'{kernel["kernel"]} {kernel["spilled"]}' for kernel in line['kernels'] if kernel['spilled'])
    return f'its kernels spill {spilled(line)} bytes ({each}), those of the rule {spilled(rule)}'


def said(line: Line, rule: Line) -> str:
    """What is printed of a candidate; `line` is the rule's where that was not compiled."""
    if line['status'] != 'ok':
        return f'kept, with {"the rule" if line is rule else "it"} not compiled: {line["reason"]}'
    reason = more(line, rule)
    return f'dropped: {reason}' if reason else f'kept: {spilled(line)} bytes spilled'
