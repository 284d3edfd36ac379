"""Cases that fail on purpose, and must not affect others."""

import importlib
import os
import pathlib
import signal
import subprocess
import sys
import time
from typing import Any

from scripts.session.cases import Case

SLEEP = 'import time; time.sleep(600)'


def cases(small: bool) -> list[Case]:
    """None but in a rehearsal."""
    if not small:
        return []
    return [Case(f'rehearsal/{name}', 'rehearsal', seconds) for name, seconds in (
        ('right', 30), ('hang', 3), ('crash', 30), ('raise', 30), ('refuse', 150), ('wrong', 30), ('right again', 30),
    )]  # fmt: skip


def run(case: Case, folder: pathlib.Path) -> dict[str, Any]:
    return CASES[case.id.partition('/')[2]]()


def _hang() -> dict[str, Any]:
    """Ignores requests to end, and starts a process that does, too."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen([sys.executable, '-c', SLEEP])
    while True:
        time.sleep(1)


def _crash() -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGSEGV)
    raise AssertionError('still here')


def _raise() -> dict[str, Any]:
    raise ValueError('on purpose\nin two lines')


def _refuse() -> dict[str, Any]:
    # Imported here, since the other cases do without JAX.
    raise importlib.import_module('pallas_kernels.dispatch').Unserved('not served')


CASES = {
    'right': lambda: {'status': 'ok'},
    'right again': lambda: {'status': 'ok'},
    'wrong': lambda: {'status': 'wrong', 'reason': 'on purpose'},
    'hang': _hang,
    'crash': _crash,
    'raise': _raise,
    'refuse': _refuse,
}
