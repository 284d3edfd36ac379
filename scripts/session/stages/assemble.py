"""Compiles the program of a candidate of `tune` for an H100 that is not there: a case of `prepare`, not of sessions."""

import pathlib
from typing import Any

from attnlab.errors import UserError
from pallas_kernels import target, tuning
from scripts import assembled
from scripts.session.cases import Case
from scripts.session.stages import tune

ABSENT = 'absent'
"""The status where there is no compiler for an H100."""


def run(case: Case, folder: pathlib.Path) -> dict[str, Any]:
    """What the assembler says of every kernel of the call with a tile; its reports are written into the folder."""
    try:
        here = assembled.absent_h100()
    except UserError as error:
        return {'status': ABSENT, 'reason': str(error)}
    asked, tile = tuning.entry('the case', case.tile)
    place, k = map(int, case.call.split())
    assembled.dump(folder, 'PTX', 'PTXAS', 'RESOURCES')
    with target.compiling_for(target.H100), tuning.trying(asked, tile), tuning.recording() as found:
        assembled.compiled(tune.program(case.core, place, k, target.H100), here)
    if asked not in found:
        return {'status': 'failed', 'reason': f'the call did not ask for {asked.rule} of {dict(asked.call)}'}
    kernels = [assembled.resources(report) for report in assembled.reports(folder)]
    if not kernels:
        return {'status': 'failed', 'reason': 'the assembler reported of no kernel'}
    return {'status': 'ok', 'kernels': kernels}
