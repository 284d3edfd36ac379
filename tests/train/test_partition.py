"""Meshes and placements, on eight virtual devices; the checks themselves are in `eight_devices.py`."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


@pytest.mark.parametrize('check', ['placements', 'meshes', 'training'])
def test_on_eight_devices(check: str):
    command = [sys.executable, '-m', 'tests.train.eight_devices', check]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
