"""`attnlab compare RUN...`: what each of some runs reached and what it cost, and in what they are not equal."""

import csv
import dataclasses
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict
from rich import box
from rich.console import Console
from rich.table import Table

from attnlab.compare.equality import CONDITIONS, Equality, differing, of_conditions, of_kinds, of_measure
from attnlab.errors import UserError, nearest
from attnlab.runs.record import Record, read_record
from attnlab.train.run import flatten

PREFERRED = ('1x/accuracy', 'all/accuracy', 'bits_per_byte', '1x/loss', 'all/loss', 'loss')
"""How the names of metrics end that serve as the score, the first that a run has."""

HIGHER = ('accuracy', 'exact_match')
"""How the names of metrics end that are the better the higher."""

IRRELEVANT = ('model', 'report', 'checkpoint', 'mesh')
"""What of a config does not make the conditions unequal: the models that are compared, and what leaves no trace."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One run in a comparison: plain data.

    Attributes:
      name: of the run.
      task: what it was trained on; runs of one task are compared.
      metric: the name of the score.
      score: its newest value.
      parameters: numbers trained.
      state_bytes: what decoding one sequence keeps at the training length.
      state_bytes_8x: the same at eight times that length.
      flops: floating-point operations of all of the training.
      tokens_per_second: of training; `None` for a run that reported none.
      device: what it ran on.
      finished: whether every step was taken.
      settings: everything in the config but the model.
    """

    name: str
    task: str
    metric: str
    score: float
    parameters: int
    state_bytes: int
    state_bytes_8x: int
    flops: float
    tokens_per_second: float | None
    device: str
    finished: bool
    settings: Mapping[str, Any]

    @property
    def higher(self) -> bool:
        """Whether a higher score is a better one."""
        return self.metric.endswith(HIGHER)


HEADERS = ('score', 'parameters', 'state', 'at 8x', 'FLOPs', 'tokens/s')
CAPTION = 'state: bytes that decoding keeps at the training length, and at 8 times that; FLOPs: of all training'

WIDEST = 16
"""Characters of a run's name that are not broken in the table."""

COSTS = {
    'parameters': 'parameters',
    'state_bytes': 'state bytes',
    'state_bytes_8x': 'state bytes at 8x',
    'flops': 'training FLOPs',
    'tokens_per_second': 'tokens/s',
}
"""What a run costs: fields of an `Entry`, and what they are called in print."""


def entry(record: Record, metric: str | None = None) -> Entry:
    """A run with its score. Raises `UserError` for one that was never evaluated, or not by this metric."""
    length = record.config.length
    facts = record.facts
    name = _metric(record, metric)
    settings = {key: value for key, value in flatten(record.config).items() if not key.startswith(IRRELEVANT)}
    return Entry(
        name=record.name,
        task=task_name(record.config.task),
        metric=name,
        score=record.last[name],
        parameters=record.parameters,
        state_bytes=record.state_bytes[length],
        state_bytes_8x=record.state_bytes[8 * length],
        flops=record.flops_per_token * record.tokens,
        tokens_per_second=record.tokens_per_second,
        device=f'{facts["device_count"]} {facts["device_kind"]}',
        finished=record.finished,
        settings=settings,
    )


def task_name(task: ConfigDict) -> str:
    """The problem, data set or text of a task's config, by the name of its class or its own."""
    source = next((task[key] for key in ('problem', 'data', 'text') if key in task), task)
    while 'of' in source:
        source = source.of
    return source.name if 'name' in source else source.target.rpartition('.')[2]


def _metric(record: Record, wanted: str | None) -> str:
    evaluated = [name for name in record.last if not name.startswith('train/')]
    if not evaluated:
        raise UserError(f'{record.folder} has not been evaluated yet')
    if wanted is not None:
        if wanted not in evaluated:
            raise UserError(f'{record.folder} has no metric {wanted!r}{nearest(wanted, evaluated)}')
        return wanted
    for ending in PREFERRED:
        for name in evaluated:
            if name.partition('/')[2] == ending:
                return name
    raise UserError(f'{record.folder} has none of the usual scores: choose --metric from {", ".join(evaluated)}')


def by_task(entries: Iterable[Entry]) -> dict[str, list[Entry]]:
    """Runs by task, in the order in which tasks first come; the best score of a task first, what is NaN last."""
    found: dict[str, list[Entry]] = {}
    for one in entries:
        found.setdefault(one.task, []).append(one)
    return {task: sorted(group, key=_rank) for task, group in found.items()}


def _rank(one: Entry) -> tuple[bool, float]:
    return one.score != one.score, -one.score if one.higher else one.score


def equalities(entries: Sequence[Entry], tolerance: float) -> list[Equality]:
    """In what runs of a task are equal: sizes within the tolerance, what their settings make up, and devices."""
    names = [one.name for one in entries]
    sizes = {field: title for field, title in COSTS.items() if field != 'tokens_per_second'}
    return [
        *(
            of_measure(title, names, [float(getattr(one, field)) for one in entries], tolerance, wanted=True)
            for field, title in sizes.items()
        ),
        *of_conditions(CONDITIONS, differing([one.settings for one in entries])),
        of_kinds('score', [one.metric for one in entries]),
        of_kinds('device', [one.device for one in entries]),
        of_kinds('end', ['after the last step' if one.finished else f'{one.name} is not finished' for one in entries]),
    ]


def told(found: Sequence[Equality], entries: Sequence[Entry]) -> str:
    """What is matched and what is not, with the values that differ, in two sentences."""
    wrong = unequal(found, entries)
    matched = ', '.join(one.name for one in found if one.equal) or 'nothing'
    return f'matched: {matched}. Not matched: {"; ".join(wrong) or "nothing"}.'


def unequal(found: Sequence[Equality], entries: Sequence[Entry]) -> list[str]:
    """What is not matched, with the values that differ."""
    values = differing([one.settings for one in entries])
    return [f'{one.name} ({_difference(one, values)})' for one in found if not one.equal]


def _difference(one: Equality, values: Mapping[str, Sequence[str | None]]) -> str:
    if one.least is not None and one.most is not None:
        return ' to '.join(f'{x:.3g}' if x > 1e9 else f'{x:,.0f}' for x in (one.least[0], one.most[0]))
    shown = {key: ', '.join(dict.fromkeys(value or 'none' for value in found)) for key, found in values.items()}
    return '; '.join(f'{key}: {shown[key]}' if key in shown else key for key in one.different)


def compare_runs(
    folders: Sequence[pathlib.Path],
    out: pathlib.Path,
    console: Console,
    *,
    metric: str | None = None,
    tolerance: float = 0.01,
    strict: bool = False,
) -> list[Entry]:
    """Prints one table of runs, and writes it as `runs.csv` beside one figure, `runs.png` and `runs.svg`.

    Raises `UserError` for what is no run, two runs of one name on one task and, when `strict`, for runs of one task
    that are not matched.
    """
    entries = _distinct([entry(read_record(folder), metric) for folder in folders], folders)
    groups = by_task(entries)
    found = {task: equalities(group, tolerance) for task, group in groups.items()}
    wrong = [f'{task}: {"; ".join(parts)}' for task, group in groups.items() if (parts := unequal(found[task], group))]
    if strict and wrong:
        raise UserError(f'the runs are not matched: {"; ".join(wrong)}')
    console.print(_table(groups))
    console.print(CAPTION, highlight=False, soft_wrap=True)
    for task, group in groups.items():
        console.print(f'{task}, {told(found[task], group)}', highlight=False, soft_wrap=True)
    out.mkdir(parents=True, exist_ok=True)
    _write(out / 'runs.csv', lambda path: _write_csv(groups, path))
    from attnlab.compare.costs_figure import draw_costs

    for suffix in ('png', 'svg'):
        _write(out / f'runs.{suffix}', lambda path: draw_costs(groups, path))
    written = ', '.join(str(out / f'runs.{suffix}') for suffix in ('csv', 'png', 'svg'))
    console.print(f'written: {written}', highlight=False, soft_wrap=True)
    return entries


def _distinct(entries: list[Entry], folders: Sequence[pathlib.Path]) -> list[Entry]:
    """Runs named by their folders or, where two of a task share a name, by as much of the path as tells them apart."""
    names = [one.name for one in entries]
    keys = list(zip([one.task for one in entries], names, strict=True))
    if len({folder.resolve() for folder in folders}) != len(folders):
        raise UserError('a run is named twice')
    return [
        one if keys.count(key) == 1 else dataclasses.replace(one, name=str(folder))
        for one, key, folder in zip(entries, keys, folders, strict=True)
    ]


def _table(groups: Mapping[str, Sequence[Entry]]) -> Table:
    """A section a task, under its name and that of its score."""
    table = Table(title='runs by task, the best first', title_justify='left', box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    longest = max(len(one.name) for group in groups.values() for one in group)
    table.add_column('run', min_width=min(longest, WIDEST), overflow='fold')
    for column in HEADERS:
        table.add_column(column, justify='right', overflow='fold')
    for task, group in groups.items():
        table.add_row(f'[bold]{task}[/bold]\n{", ".join(dict.fromkeys(one.metric for one in group))}')
        for line in lines(group):
            table.add_row(*line)
        table.add_section()
    return table


def lines(group: Sequence[Entry]) -> list[list[str]]:
    """Cells of the table, a line a run: its name, its score, and the costs."""
    return [
        [
            one.name if one.finished else f'{one.name} (not finished)',
            f'{one.score:.4f}',
            f'{one.parameters:,}',
            f'{one.state_bytes:,}',
            f'{one.state_bytes_8x:,}',
            f'{one.flops:.3g}',
            '' if one.tokens_per_second is None else f'{one.tokens_per_second:,.0f}',
        ]
        for one in group
    ]


def _write_csv(groups: Mapping[str, Sequence[Entry]], path: pathlib.Path) -> None:
    fields = [field.name for field in dataclasses.fields(Entry) if field.name != 'settings']
    with path.open('w', newline='') as file:
        writer = csv.writer(file, lineterminator='\n')
        writer.writerow(fields)
        writer.writerows([getattr(one, name) for name in fields] for group in groups.values() for one in group)


def _write(path: pathlib.Path, make: Any) -> None:
    partial = path.with_name(f'partial.{path.name}')
    make(partial)
    os.replace(partial, path)
