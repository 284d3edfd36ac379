"""The benchmark of steps of cores against steps by hand, at a size of seconds."""

import json
import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / 'scripts' / 'bench_steps.py'


def run(*flags: object) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, SCRIPT, *map(str, flags)], capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_every_core_agrees_with_its_step_by_hand(tmp_path):
    out = tmp_path / 'times.json'
    done = run('--batches=2', '--rounds=2', '--burst=2', f'--out={out}')
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())['rows']
    assert len(rows) == len(done.stdout.splitlines()) == 9
    assert all(name.endswith(': b 2') and row['ms'] > 0 for name, row in rows.items())


@pytest.mark.slow
def test_a_core_that_is_not_there_is_named():
    assert "no core with a step is called 'delta'" in run('delta').stderr
