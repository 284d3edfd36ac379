"""The progress of a study: the state of every trial, the best value so far, the time left."""

import dataclasses
import pathlib
import re
import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from optuna.trial import FrozenTrial
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from attnlab.sweep.study import STATES, Parts, Study, read_study
from attnlab.tables import Column, Printer, Table, digits, rendered, visible
from attnlab.train.metrics_file import METRICS, whole_lines

PAUSE = 1.0
TABLES = ('trials', 'confirmation')
"""What the tables of a study and of its confirmation are called."""


@dataclasses.dataclass(frozen=True)
class TrialStatus:
    """The state, progress and result of one trial."""

    number: int
    state: str
    settings: Mapping[str, Any]
    seed: int
    step: int
    steps: int
    value: float | None
    seconds: float | None
    reason: str


def statuses(study: Study) -> list[TrialStatus]:
    """The status of every trial, by number."""
    return [_status(study, trial) for trial in study.trials()]


def describe(study: Study, trial: FrozenTrial) -> str:
    """A trial in one line."""
    row = _status(study, trial)
    value = '' if row.value is None else f'  {study.sweep.metric} {row.value:.5g}'
    seconds = '' if row.seconds is None else f'  {row.seconds:.1f} s'
    reason = f'  {row.reason}' if row.reason else ''
    return f'trial {row.number} {row.state}  {_format_settings(row.settings)} seed={row.seed}{value}{seconds}{reason}'


def seconds_left(study: Study, found: list[TrialStatus]) -> float | None:
    """The estimated seconds to finish with the workers now running, from the median time of a step of completed trials.

    Trials to come are taken to be as long as those begun.
    """
    done = [row.seconds / row.steps for row in found if row.state == 'done' and row.seconds is not None]
    running = [row for row in found if row.state == 'running']
    if not done or not running:
        return None
    unfinished = sum(row.steps - row.step for row in found if row.state in ('running', 'interrupted'))
    to_come = statistics.mean(row.steps for row in found) * (study.sweep.trials - len(found))
    return statistics.median(done) * (unfinished + to_come) / len(running)


def status_table(study: Study, name: str = 'trials') -> Table:
    """A table of all trials."""
    found = statuses(study)
    best = study.best()
    settings = _columns(found)
    columns = (
        Column('trial', right=True),
        Column('state'),
        *(Column(title, _number, True, rank) for rank, title in enumerate(_titles(settings), 1)),
        Column('seed', _number, right=True, rank=len(settings) + 2),
        Column('step', _number, right=True, rank=len(settings) + 1),
        Column(study.sweep.metric, digits('.5g'), right=True),
        Column('seconds', digits('.0f'), right=True, rank=len(settings) + 3),
        Column('why', prose=True),
    )
    rows = [
        (
            row.number,
            row.state,
            *(row.settings.get(key) for key in settings),
            row.seed,
            row.step,
            row.value,
            row.seconds,
            row.reason,
        )
        for row in found
    ]
    marked = frozenset(index for index, row in enumerate(found) if best is not None and best.number == row.number)
    return Table(name, columns, rows, str(study.folder), marked=marked)


def live_status(study: Study, console: Console) -> Text:
    """The table of a study for a terminal, with a summary line."""
    return rendered(status_table(study), console.width).append(visible(summary(study, statuses(study))))


def live_statuses(parts: Parts, console: Console) -> Group:
    """The tables of a study and of its confirmation for a terminal."""
    return Group(*(live_status(one, console) for one in parts.studies()))


def show_status(folder: pathlib.Path, storage: str | None, printer: Printer, *, watch: bool = False) -> None:
    """Prints the table of a study and of its confirmation; with `watch`, refreshes it until both are finished."""
    parts = Parts(read_study(folder, storage), storage)
    if not watch:
        for name, one in zip(TABLES, parts.studies(), strict=False):
            printer.table(status_table(one, name))
            printer.line(summary(one, statuses(one)))
        return
    with Live(live_statuses(parts, printer.console), console=printer.console, auto_refresh=False) as live:
        while not parts.finished():
            time.sleep(PAUSE)
            live.update(live_statuses(parts, printer.console), refresh=True)


def summary(study: Study, found: list[TrialStatus]) -> str:
    """Counts, the best so far, the time left."""
    counts = {state: sum(row.state == state for row in found) for state in ('running', 'done', 'pruned', 'failed')}
    counts['interrupted'] = sum(row.state == 'interrupted' for row in found)
    counts['to come'] = study.sweep.trials - len(found)
    parts = [', '.join(f'{count} {state}' for state, count in counts.items() if count)]
    best = study.best()
    if best is not None:
        parts.append(f'best: trial {best.number}, {study.sweep.metric} {best.value:.5g}')
    left = seconds_left(study, found)
    if left is not None:
        parts.append(f'about {_duration(left)} left')
    return '; '.join(parts)


def _status(study: Study, trial: FrozenTrial) -> TrialStatus:
    state = STATES[trial.state] if trial.state in STATES else 'running' if study.taken(trial) else 'interrupted'
    notes = trial.user_attrs
    return TrialStatus(
        number=trial.number,
        state=state,
        settings=study.settings(trial),
        seed=study.sweep.seed(trial.number),
        step=_step(study, trial.number),
        steps=study.setting(trial, 'steps'),
        value=trial.value if trial.value is not None else _last(trial.intermediate_values),
        seconds=notes.get('seconds'),
        reason=notes.get('reason', ''),
    )


def _step(study: Study, number: int) -> int:
    """The last step in the run's metrics."""
    path = study.workdir(number) / METRICS
    lines = whole_lines(path) if path.exists() else []
    # No more digits than Python reads.
    found = re.match(r'\{"step": (\d{1,18}),', lines[-1]) if lines else None
    return int(found[1]) if found else 0


def _last(values: Mapping[int, float]) -> float | None:
    return values[max(values)] if values else None


def _columns(found: list[TrialStatus]) -> list[str]:
    return sorted({key for row in found for key in row.settings})


def _titles(keys: Sequence[str]) -> list[str]:
    """The last names of keys; whole keys where several have the same one."""
    counts = Counter(key.rpartition('.')[2] for key in keys)
    return [last if counts[last := key.rpartition('.')[2]] == 1 else key for key in keys]


def _format_settings(settings: Mapping[str, Any]) -> str:
    return ' '.join(f'{key}={_number(value)}' for key, value in settings.items())


def _number(value: Any) -> str:
    return '' if value is None else f'{value:.4g}' if isinstance(value, float) else str(value)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f'{hours} h {minutes} min' if hours else f'{minutes} min {rest} s' if minutes else f'{rest} s'
