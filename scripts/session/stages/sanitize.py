"""The first case of every core under NVIDIA's compute-sanitizer, which finds accesses outside of arrays.

Its check of races sees neither the products nor the copies of Hopper, and is not asked.
"""

import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from typing import Any

from scripts.session.cases import CORES, Case
from scripts.session.stages import correct

SECONDS = 240.0
TOOL = 'compute-sanitizer'
FOUND = 9
"""The exit status that it is asked to have where it found something."""

SCRIPT = pathlib.Path(__file__).resolve().parents[2] / 'gpu_session.py'


def cases(small: bool) -> list[Case]:
    """For each core the first case in bfloat16 that its kernel serves."""
    return [
        dataclasses.replace(correct.first(core), id=f'sanitize/{core}', stage='sanitize', seconds=SECONDS)
        for core in (('softmax',) if small else CORES)
    ]


def run(case: Case, folder: pathlib.Path) -> dict[str, Any]:
    """The result of the case, in a process that the tool watches; `wrong` with its first complaint."""
    tool = shutil.which(TOOL)
    if tool is None:
        return {'status': 'skipped', 'reason': f'{TOOL} is not on PATH'}
    watched = dataclasses.replace(case, stage='correct')
    with tempfile.TemporaryFile('w+') as results:
        number = results.fileno()
        done = subprocess.run(
            [tool, '--tool=memcheck', f'--error-exitcode={FOUND}', sys.executable, str(SCRIPT), 'worker',
             f'--from={folder}', f'--results={number}'],
            input=json.dumps(dataclasses.asdict(watched)) + '\n', stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, pass_fds=(number,), check=False, env={**os.environ, 'XLA_PYTHON_CLIENT_ALLOCATOR': 'platform'},
        )  # fmt: skip
        print(done.stdout, flush=True)
        results.seek(0)
        answers = [line for line in map(json.loads, results) if 'ready' not in line]
    if done.returncode == FOUND:
        return {'status': 'wrong', 'reason': complaint(done.stdout)}
    if done.returncode != 0 or not answers:
        return {'status': 'failed', 'reason': f'under {TOOL} the case ended with status {done.returncode}'}
    return {name: value for name, value in answers[0].items() if name not in ('id', 'seconds')}


def complaint(printed: str) -> str:
    """The first thing that the tool says it found, and where."""
    said = [line.strip('= ').strip() for line in printed.splitlines() if line.startswith('=========')]
    found = [place for place, line in enumerate(said) if line.startswith(('Invalid', 'Program hit', 'Uninitialized'))]
    return ' '.join(said[found[0] : found[0] + 2]) if found else f'{TOOL} found something; see session.log'
