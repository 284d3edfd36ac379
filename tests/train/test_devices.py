"""What a command says where it cannot keep what it compiles."""

import os
import subprocess
import sys

START = """
from attnlab.train import devices
devices.start(compilation_cache='~/.cache/attnlab/compiled')
import matplotlib
matplotlib.get_cachedir()
"""


def test_a_home_that_cannot_be_written_is_one_line():
    variables = {name: value for name, value in os.environ.items() if not name.startswith(('JAX_', 'XDG_', 'MPL'))}
    done = subprocess.run(
        [sys.executable, '-c', START], env=variables | {'HOME': '/dev/null/home'}, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout == ''
    (line,) = done.stderr.splitlines()
    assert line.startswith('/dev/null/home/.cache/attnlab/compiled cannot be written (Not a directory)')
    assert '--compilation_cache=DIR' in line
