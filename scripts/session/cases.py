"""The cases of a session, in stages, the most valuable first."""

import dataclasses
import fnmatch
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from scripts.session.lines import Unusable, text_of

CORES = (
    'attention',
    'delta_rule',
    'linear_attention',
    'diagonal_low_rank',
    'selective_scan',
    'linear_scan',
    'short_conv',
    'long_conv',
    'softmax',
    'cross_entropy',
    'softmax_topk',
)
"""The cores, the most important first."""


@dataclasses.dataclass(frozen=True)
class Stage:
    """How the cases of a stage are run.

    Attributes:
      workers: number of processes that share the device.
      environment: of these processes.
      fresh: whether every case has its own process.
    """

    workers: int = 1
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    fresh: bool = False


GROWING = {'XLA_PYTHON_CLIENT_PREALLOCATE': 'false'}
SHARED = {**GROWING, 'XLA_PYTHON_CLIENT_MEM_FRACTION': '0.08'}

STAGES: dict[str, Stage] = {
    'check': Stage(environment=GROWING),
    'correct': Stage(workers=12, environment={**GROWING, 'XLA_PYTHON_CLIENT_MEM_FRACTION': '0.05'}),
    'limits': Stage(environment=GROWING),
    'sanitize': Stage(environment=GROWING),
    # These compile beside one another, and are timed one at a time: see `turn`.
    'bench': Stage(workers=14, environment=GROWING),
    'profile': Stage(workers=14, environment=GROWING),
    'peers': Stage(workers=14, environment=GROWING),
    'tune': Stage(workers=14, environment=GROWING),
    'train': Stage(workers=4, environment=SHARED),
    'tokens': Stage(workers=4, environment=GROWING, fresh=True),
    # Cases that hang, crash and fail on purpose, only for rehearsals.
    'rehearsal': Stage(workers=2),
}
"""Every stage, in order."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One measurement or check: a line of the record.

    Attributes:
      id: its name, the same in all sessions.
      seconds: time limit, without the start of a process.
      core: the core, recipe or size it is about.
      call: the named call.
      dtype: of the operands.
      what: the pass: 'forward', or 'forward and backward'.
      implementation: the named form; `None`: the default.
      rival: the package that it is timed against.
      tile: that is tried, as tables of `pallas_kernels.tuning` have it.
      reason: why `prepare` dropped it; '': it is run.
    """

    id: str
    stage: str
    seconds: float
    core: str = ''
    call: str = ''
    dtype: str = ''
    what: str = ''
    implementation: str | None = None
    rival: str | None = None
    tile: dict[str, Any] | None = None
    reason: str = ''


FILE = 'cases.json'
DROPPED = 'dropped.json'
"""Cases that are not run, with the reason of each, of which `run` writes a line that they were skipped."""

SMOKE = Case('check/smoke', 'check', 30)
"""A matrix product in its own process, to see whether the device responds."""


def write(path: pathlib.Path, cases: list[Case]) -> None:
    path.write_text(json.dumps([dataclasses.asdict(case) for case in cases], indent=1) + '\n')


def read(path: pathlib.Path) -> list[Case]:
    """The cases that `prepare` wrote. Raises `Unusable` for a file that it did not write."""
    text = text_of(path, 'what prepare wrote')
    try:
        return [Case(**case) for case in json.loads(text)]
    except (TypeError, ValueError) as error:
        raise Unusable(f'{path} has no cases of this version ({error}); expected what prepare wrote') from error


def chosen(cases: Sequence[Case], patterns: Sequence[str]) -> list[Case]:
    """The cases whose names match a pattern, as of file names, in the order of patterns; without patterns, all.

    Raises `Unusable` for a pattern that matches none.
    """
    if not patterns:
        return list(cases)
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(case.id, pattern) for case in cases):
            raise Unusable(f'no case is called like {pattern!r}; expected patterns of names, such as correct/softmax/*')
    found = {case.id: case for pattern in patterns for case in cases if fnmatch.fnmatchcase(case.id, pattern)}
    return list(found.values())


def fields(case: Case) -> dict[str, Any]:
    """The fields of a case in its line of the record."""
    found = dataclasses.asdict(case)
    found['pass'] = found.pop('what')
    return {name: value for name, value in found.items() if value not in ('', None) and name != 'seconds'}
