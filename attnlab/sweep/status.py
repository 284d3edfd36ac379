"""The progress of a study: the state of every trial, the best value so far, the time left."""

import dataclasses
import pathlib
import re
import statistics
import time
from collections.abc import Mapping
from typing import Any

from optuna.trial import FrozenTrial, TrialState
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from attnlab.sweep.study import Study, open_study
from attnlab.train.report import whole_lines

PAUSE = 1.0
WORDS = {TrialState.COMPLETE: 'done', TrialState.PRUNED: 'pruned', TrialState.FAIL: 'failed'}


@dataclasses.dataclass(frozen=True)
class TrialStatus:
    """The state, progress and result of one trial."""

    number: int
    state: str
    settings: Mapping[str, Any]
    seed: int
    step: int
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
    """The estimated seconds to finish with the workers now running, from the median time of completed trials."""
    done = [row.seconds for row in found if row.state == 'done' and row.seconds is not None]
    running = [row for row in found if row.state == 'running']
    if not done or not running:
        return None
    steps = study.sweep.base.steps
    unfinished = sum(1 - row.step / steps for row in found if row.state in ('running', 'interrupted'))
    return statistics.median(done) * (unfinished + study.sweep.trials - len(found)) / len(running)


def status_table(study: Study) -> Group:
    """A table of all trials with a summary line."""
    found = statuses(study)
    best = study.best()
    table = Table(title=str(study.folder), title_justify='left')
    named = [key.rpartition('.')[2] for key in _columns(found)]
    for column in ('trial', 'state', *named, 'seed', 'step', study.sweep.metric, 'seconds', 'why'):
        right = column not in ('state', 'why')
        table.add_column(column, justify='right' if right else 'left', overflow='fold')
    for row in found:
        star = best is not None and best.number == row.number
        table.add_row(
            str(row.number),
            row.state,
            *(_number(row.settings[key]) if key in row.settings else '' for key in _columns(found)),
            str(row.seed),
            str(row.step),
            '' if row.value is None else f'{row.value:.5g}',
            '' if row.seconds is None else f'{row.seconds:.0f}',
            row.reason,
            style='bold' if star else None,
        )
    return Group(table, Text(summary(study, found)))


def show_status(folder: pathlib.Path, storage: str | None, console: Console, *, watch: bool = False) -> None:
    """Prints the table of a study and of its confirmation; with `watch`, refreshes it until the sweep is finished."""
    study = open_study(folder, storage)
    if not watch:
        console.print(_tables(study, storage))
        return
    with Live(_tables(study, storage), console=console, auto_refresh=False) as live:
        while not study.finished():
            time.sleep(PAUSE)
            live.update(_tables(study, storage), refresh=True)


def _tables(study: Study, storage: str | None) -> Group:
    folder = study.folder / 'confirm'
    confirmed = [open_study(folder, storage, study)] if (folder / 'sweep.json').exists() else []
    return Group(*(status_table(one) for one in (study, *confirmed)))


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
    state = WORDS[trial.state] if trial.state in WORDS else 'running' if study.taken(trial) else 'interrupted'
    notes = trial.user_attrs
    return TrialStatus(
        number=trial.number,
        state=state,
        settings=study.settings(trial),
        seed=study.sweep.seed(trial.number),
        step=_step(study, trial.number),
        value=trial.value if trial.value is not None else _last(trial.intermediate_values),
        seconds=notes.get('seconds'),
        reason=notes.get('reason', ''),
    )


def _step(study: Study, number: int) -> int:
    """The last step in the run's metrics."""
    path = study.workdir(number) / 'metrics.jsonl'
    lines = whole_lines(path) if path.exists() else []
    found = re.match(r'\{"step": (\d+),', lines[-1]) if lines else None
    return int(found[1]) if found else 0


def _last(values: Mapping[int, float]) -> float | None:
    return values[max(values)] if values else None


def _columns(found: list[TrialStatus]) -> list[str]:
    return sorted({key for row in found for key in row.settings})


def _format_settings(settings: Mapping[str, Any]) -> str:
    return ' '.join(f'{key}={_number(value)}' for key, value in settings.items())


def _number(value: Any) -> str:
    return f'{value:.4g}' if isinstance(value, float) else str(value)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f'{hours} h {minutes} min' if hours else f'{minutes} min {rest} s' if minutes else f'{rest} s'
