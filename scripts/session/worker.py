"""A process that runs cases one at a time: a line of JSON in, a line of JSON out; its other output goes to the log."""

import ctypes
import importlib
import json
import os
import pathlib
import signal
import sys
import time
import traceback
from typing import Any

from scripts.session.cases import Case


def serve(folder: pathlib.Path, results: int) -> int:
    """Runs the cases on standard input until it ends."""
    _end_with_parent()
    with os.fdopen(results, 'w') as out:
        _say(out, {'ready': True})
        for text in sys.stdin:
            case = Case(**json.loads(text))
            print(f'--- {case.id}', flush=True)
            start = time.perf_counter()
            line = answer(case, folder)
            _say(out, {**line, 'id': case.id, 'seconds': round(time.perf_counter() - start, 3)})
    return 0


def answer(case: Case, folder: pathlib.Path) -> dict[str, Any]:
    """The result of a case: its status, and figures or the reason why there are none."""
    try:
        return importlib.import_module(f'scripts.session.stages.{case.stage}').run(case, folder)
    except Exception as error:
        if _unserved(error):
            return {'status': 'skipped', 'reason': _first(error)}
        traceback.print_exc()
        return {'status': 'failed', 'reason': f'{type(error).__name__}: {_first(error)}'}


def _unserved(error: Exception) -> bool:
    """Whether a core has no form for a call, and not a compiler for a kernel of it: `pallas_kernels.dispatch.Unserved`.

    By name, as stages alone import JAX.
    """
    return type(error).__name__ == 'Unserved'


def _first(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [''])[0][:300]


def _say(out: Any, line: dict[str, Any]) -> None:
    out.write(json.dumps(line) + '\n')
    out.flush()


def _end_with_parent() -> None:
    """Ends this process when the parent is killed, so that nothing keeps the device busy; on Linux only."""
    if sys.platform == 'linux':
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
