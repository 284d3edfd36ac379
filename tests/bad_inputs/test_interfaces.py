"""Wrong inputs from Python, without the checks of shapes that `tests/conftest.py` installs: users have none."""

import pathlib
import subprocess
import sys


def test_wrong_inputs_from_python():
    table = pathlib.Path(__file__).with_name('interfaces.py')
    options = ['--noconftest', '-n', '0', '-q', '-p', 'no:cacheprovider', '--tb=short']
    done = subprocess.run(
        [sys.executable, '-m', 'pytest', *options, str(table)],
        cwd=table.parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr
