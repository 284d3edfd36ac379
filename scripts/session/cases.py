"""What a session is made of: cases, in stages, in the order in which they are worth most."""

import dataclasses
import json
import pathlib
from typing import Any

CORES = (
    'attention',
    'delta_rule',
    'linear_attention',
    'selective_scan',
    'linear_scan',
    'softmax',
    'cross_entropy',
    'softmax_topk',
)
"""The cores, those first that most depends on."""


@dataclasses.dataclass(frozen=True)
class Stage:
    """How the cases of a stage are run.

    Attributes:
      workers: how many processes share the device; one where something is timed.
      environment: of these processes.
      fresh: a process serves one case alone.
    """

    workers: int = 1
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    fresh: bool = False


SHARED = {'XLA_PYTHON_CLIENT_PREALLOCATE': 'false', 'XLA_PYTHON_CLIENT_MEM_FRACTION': '0.08'}

STAGES: dict[str, Stage] = {
    'check': Stage(environment={'XLA_PYTHON_CLIENT_PREALLOCATE': 'false'}),
    'correct': Stage(workers=8, environment=SHARED),
    'bench': Stage(),
    # Triton wants memory besides.
    'peers': Stage(environment={'XLA_PYTHON_CLIENT_PREALLOCATE': 'false'}),
    'train': Stage(),
    'tokens': Stage(fresh=True),
    # Cases that hang, crash and are wrong on purpose: of rehearsals alone.
    'rehearsal': Stage(workers=2),
}
"""Every stage, in order."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One thing to find out, in one line of the record.

    Attributes:
      id: its name, the same in every session.
      seconds: how long it may take, without the start of a process.
      core: the core, recipe or size it is about.
      call: the named call.
      dtype: of the operands.
      what: the pass: 'forward', or 'forward and backward'.
      implementation: the form that is asked for by name; `None`: whichever serves.
      rival: what it is timed against.
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


SMOKE = Case('check/smoke', 'check', 30)
"""A product of matrices, in a process of its own: does the device answer?"""


def write(path: pathlib.Path, cases: list[Case]) -> None:
    path.write_text(json.dumps([dataclasses.asdict(case) for case in cases], indent=1) + '\n')


def read(path: pathlib.Path) -> list[Case]:
    return [Case(**case) for case in json.loads(path.read_text())]


def public(case: Case) -> dict[str, Any]:
    """What a line of the record says of its case."""
    found = dataclasses.asdict(case)
    found['pass'] = found.pop('what')
    return {name: value for name, value in found.items() if value not in ('', None) and name != 'seconds'}
