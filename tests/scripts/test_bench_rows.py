"""The benchmark of all recipes' steps, at a size of seconds."""

import json
import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / 'scripts' / 'bench_rows.py'


def run(*flags: object) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, SCRIPT, *map(str, flags)], capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_row_is_timed_once_and_stands_on_the_page(tmp_path):
    out, page = tmp_path / 'times.json', tmp_path / 'page.md'
    flags = ('--length=16', '--batch=1', '--rounds=2', '--burst=1', '--against=mha', f'--out={out}')
    done = run(*flags, 'mha', 'mingru')
    assert done.returncode == 0, done.stderr
    record = json.loads(out.read_text())
    assert set(record['rows']) == {'mha', 'mingru'} and not record['failed']
    ours, theirs = record['rows']['mingru'], record['rows']['mha']
    assert ours['adjusted'].startswith('hidden') and abs(ours['parameters'] / theirs['parameters'] - 1) <= 0.02
    again = run(*flags, 'mha')
    assert again.returncode == 0 and 'step_ms' not in again.stdout
    assert 'the recipe they are against was mha, not gla' in run(*flags, '--against=gla', 'mha').stderr
    assert run(f'--page={page}', out).returncode == 0
    assert '| `mingru` |' in page.read_text() and '1 x 16 tokens, against `mha`' in page.read_text()


@pytest.mark.slow
def test_rows_without_a_causal_form_are_timed_both_ways(tmp_path):
    out, page = tmp_path / 'times.json', tmp_path / 'page.md'
    flags = ('--length=32', '--batch=1', '--rounds=2', '--burst=1', '--against=gla', f'--out={out}', '--both_ways')
    done = run(*flags, '--depth=1', 'norm_lin')
    assert done.returncode == 0, done.stderr
    assert set(json.loads(out.read_text())['rows']) == {'norm_lin'}
    assert "the size was {'length': 32, 'batch': 1, 'both_ways': True, 'depth': 1}" in run(*flags, 'norm_lin').stderr
    assert run(f'--page={page}', out).returncode == 0
    assert '1 x 32 tokens, read both ways for a label, depth 1, against `gla`' in page.read_text()


def test_mistakes_are_named(tmp_path):
    assert "no recipe is called 'mah'" in run(f'--out={tmp_path}/times.json', 'mah').stderr
    assert "no recipe is called 'mah'" in run(f'--out={tmp_path}/times.json', '--against=mah').stderr
    assert (
        "'mamba' reads from left to right alone" in run(f'--out={tmp_path}/times.json', '--both_ways', 'mamba').stderr
    )
    assert '--out, the file of the times, is not given' in run().stderr
