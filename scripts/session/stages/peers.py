"""Times third-party kernels where they are installed: cuDNN, tokamax, jax-linear-attention, flash-linear-attention."""

import importlib.util
import json
import pathlib
import subprocess
import sys
from typing import Any

from pallas_kernels.bench import measure
from pallas_kernels.bench.problems import OURS
from scripts.session.cases import Case
from scripts.session.stages import bench
from scripts.session.turn import ALONE, Turn

SECONDS = 400.0
TRITON = 'flash-linear-attention'
TRITON_ALONE = 4 * ALONE
KINDS = ('no decay', 'scalar', 'vector')
"""The problems whose kernels `fla_kernels.py` calls: none with erase keys."""

SCRIPT = pathlib.Path(__file__).resolve().parent.parent.parent / 'fla_kernels.py'


def cases(small: bool) -> list[Case]:
    """Rivals in JAX by problem and pass, alternating with ours; then flash-linear-attention, in PyTorch."""
    if small:
        return [_case('linear_attention', 1, 'scalar', 'jax-linear-attention', 'forward')]
    found = []
    for core, rivals in bench.RIVALS.items():
        # For attention they have only the plain softmax.
        kinds = list(enumerate(bench.names(core)))[: 1 if core == 'attention' else None]
        found += [
            _case(core, place, kind, rival, what)
            for place, kind in kinds
            for rival in rivals
            for what in measure.PASSES
        ]
    triton = [(core, place, kind) for core in ('delta_rule', 'linear_attention')
              for place, kind in enumerate(bench.names(core)) if kind in KINDS]  # fmt: skip
    # Each is alone, and the last waits for all others.
    seconds = SECONDS + len(triton) * TRITON_ALONE
    return found + [_case(core, place, kind, TRITON, 'forward and backward', seconds) for core, place, kind in triton]


def _case(core: str, place: int, kind: str, rival: str, what: str, seconds: float = SECONDS) -> Case:
    return Case(f'peers/{rival}/{core}/{kind}/{what}', 'peers', seconds, core, str(place), what=what, rival=rival)


def run(case: Case, folder: pathlib.Path) -> dict[str, Any]:
    if case.rival == TRITON:
        with Turn(folder) as turn, turn.alone(TRITON_ALONE):
            return _triton(case)
    with Turn(folder) as turn:
        problem = bench.problem_of(case, turn)
        if case.rival not in problem.contenders:
            return {'status': 'skipped', 'reason': f'{case.rival} is not installed here, or has no such call'}
        line = bench.timed(case, problem, (OURS, case.rival), turn)
    return {**line, 'status': 'failed'} if 'reason' in line else line


def _triton(case: Case) -> dict[str, Any]:
    """Both passes of one call, alone on the device, as Triton autotunes at its first call."""
    if importlib.util.find_spec('fla') is None:
        return {'status': 'skipped', 'reason': f'{TRITON} is not installed here'}
    kind = case.id.split('/')[3]
    command = [sys.executable, str(SCRIPT), case.core, kind]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    print(answer.stderr, flush=True)
    return _measured(answer)


def _measured(answer: subprocess.CompletedProcess) -> dict[str, Any]:
    """What the script printed before its end; a pass that it refuses leaves the times of the pass before."""
    lines = [json.loads(line) for line in answer.stdout.splitlines() if line.startswith('{')]
    found: dict[str, Any] = {'status': 'ok'}
    if answer.returncode != 0:
        said = (answer.stderr.strip().splitlines() or ['it said nothing'])[-1][:300]
        found = {'status': 'failed', 'reason': f'{SCRIPT.name} ended with status {answer.returncode}: {said}'}
    if lines:
        found['measured'] = [
            {'contender': f'{TRITON}, {line["what"]}', 'milliseconds': [line['milliseconds']] * 3} for line in lines
        ]
        found['torch'] = lines[0]['torch']
    return found
