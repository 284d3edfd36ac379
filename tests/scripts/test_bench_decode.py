"""The benchmark of decoding steps, at a size of seconds."""

import json
import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / 'scripts' / 'bench_decode.py'


def run(*flags: object) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, SCRIPT, *map(str, flags)], capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_steps_are_timed_beside_those_of_a_commit(tmp_path):
    out = tmp_path / 'times.json'
    done = run('--length=16', '--dim=16', '--rounds=2', '--burst=3', '--before=HEAD', f'--out={out}', 'hyena', 'mha')
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())['rows']
    assert list(rows) == ['hyena', 'mha', 'hyena at HEAD', 'mha at HEAD']
    assert rows['hyena']['ratio'] == 1.0 and all(row['mean_ms'] > 0 for row in rows.values())
    assert [line.partition(':')[0] for line in done.stdout.splitlines()] == list(rows)


@pytest.mark.slow
def test_mistakes_are_named():
    assert "no recipe of one mixer is called 'hyenna'" in run('hyenna').stderr
    assert 'no recipe is named' in run().stderr
    assert (
        "--before is 'nothing', where attnlab/mixers/convolution/hyena.py is not to be had"
        in run('--before=nothing', 'hyena').stderr
    )
