"""Results that others published, and a verdict on ours that is computed, not written.

A folder `experiments/published/NAME` is an experiment without `plot.py`, whose `sweep.py` also has `published(size)`, a
`Published`, and whose `measure` gives the number that was published as `value`, and as `noise` the standard deviation
that the finite test set gives it, where that is known: `measured_of` gives both. Its runs are seeds; the table of its
README has the published number, ours over the seeds, and the verdict. Several numbers of one protocol are a mapping in
place of the one: the runs of `NAME` are those labelled `NAME-...`, and each has a row of its own. A further number of
the same runs is a claim with a `key` of its own, which is of all runs.
"""

import dataclasses
import math
import pathlib
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from matplotlib.figure import Figure

from attnlab.errors import UserError
from attnlab.evals.measured import Measured, of_seeds
from attnlab.experiment.results import panels
from attnlab.runs.record import read_record

Outcome = Literal['agrees', 'differs', 'not comparable']
WIDEST = 50
"""Letters of a title that a panel has room for."""

Row = Mapping[str, Any]
"""What was measured of a run, with its `label` and `value`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Published:
    """A number that a paper states, and how it came about.

    Attributes:
      value: the number.
      spread: half of what the paper itself says it varies by; 0 where it says nothing.
      bounds: of the quantity, where our interval ends: `SHARE` for an accuracy.
      metric: what it is of.
      source: the paper, and where in it.
      direction: 'equal' where the claim is the number; 'at least' or 'at most' where it is a bound, such as that a
        method gets there within so many steps.
      changed: what of the protocol is not as published: data, model, optimiser, schedule, steps, precision, selection,
        metric. With anything changed the numbers are not comparable.
      guess: why ours differs, if it does.
      key: what `measure` calls our number.

    Raises `UserError` for a spread below 0.
    """

    value: float
    metric: str
    source: str
    spread: float = 0.0
    bounds: tuple[float, float] = (-math.inf, math.inf)
    direction: Literal['equal', 'at least', 'at most'] = 'equal'
    changed: tuple[str, ...] = ()
    guess: str = ''
    key: str = 'value'

    def __post_init__(self) -> None:
        if self.spread < 0:
            raise UserError(f'spread of Published is {self.spread}; it must be at least 0')


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One of three outcomes, and in words how or why."""

    outcome: Outcome
    because: str = ''

    def __str__(self) -> str:
        return self.outcome if not self.because else f'{self.outcome}: {self.because}'


def verdict(published: Published, ours: Measured, failed: int = 0) -> Verdict:
    """Compares a published number with ours.

    They agree where our interval, widened by the paper's own spread, holds the published value; with a bound, where all
    of the interval lies on the right side, to within that spread; one that reaches across that decides nothing. One
    seed has no interval, and two have only a range: they agree with the number itself, and decide nothing else. A
    changed protocol makes them not comparable, whatever the numbers, and so do seeds that `failed`: the others do not
    show it.
    """
    if published.changed:
        return Verdict('not comparable', 'changed: ' + '; '.join(published.changed))
    if failed:
        return Verdict('not comparable', f'{failed} of {ours.n + failed} seeds did not come to their end')
    low, high, value, spread = ours.low, ours.high, published.value, published.spread
    difference = f'{ours.mean - value:+.4g}'
    if low is None or high is None or ours.kind == 'range':
        if published.direction == 'equal' and {ours.mean, low, high} <= {value, None}:
            return Verdict('agrees')
        few = '1 seed has' if ours.n == 1 else f'{ours.n} seeds have'
        return Verdict('not comparable', f'{few} no interval; the difference is {difference}')
    agrees = {
        'equal': low - spread <= value <= high + spread,
        'at least': low + spread >= value,
        'at most': high - spread <= value,
    }[published.direction]
    if agrees:
        return Verdict('agrees')
    edge = {'equal': math.nan, 'at least': value - spread, 'at most': value + spread}[published.direction]
    if low <= edge <= high:
        return Verdict('not comparable', 'our interval reaches across the bound')
    why = f'; best guess: {published.guess}' if published.guess else ''
    return Verdict('differs', f'by {difference}{why}')


Claims = Mapping[str, Published]
"""Published numbers by what their runs are called; one alone has no name, and all runs."""


def claims_of(published: Published | Claims) -> Claims:
    """The claims of a folder, whether it has one or several."""
    return {'': published} if isinstance(published, Published) else published


def rows_of(name: str, published: Published, rows: Sequence[Row]) -> list[Row]:
    """The runs of a claim, with its number as their `value`; the noise of the test set is known of `value` alone."""
    if published.key != 'value':
        return [{'label': row['label'], 'value': row[published.key]} for row in rows]
    return [row for row in rows if not name or _is_of(name, row['label'])]


def failed_of(name: str, published: Published, failed: Sequence[str]) -> int:
    """How many of the runs of a claim failed, by the labels of all that did."""
    return sum(published.key != 'value' or not name or _is_of(name, label) for label in failed)


def _is_of(name: str, label: str) -> bool:
    return label.startswith(f'{name}-')


def measured_of(workdir: pathlib.Path, metric: str) -> Row:
    """A metric of a run, as `measure` returns it: its value, and the noise of the test set."""
    found = read_record(workdir).measured(metric)
    return {'value': found.mean, 'noise': found.noise}


def measured(rows: Sequence[Row], bounds: tuple[float, float] = (-math.inf, math.inf), failed: int = 0) -> Measured:
    """Our number over the seeds of the runs, with the noise of the test set: the root mean square of theirs.

    Its interval ends at the `bounds` of the quantity; where others `failed` it has none.
    """
    noises = [row['noise'] for row in rows if 'noise' in row and np.isfinite(np.float64(row['noise']))]
    noise = float(np.sqrt(np.mean(np.square(noises)))) if noises else None
    ours = of_seeds(_values(rows), noise).within(*bounds)
    return dataclasses.replace(ours, low=None, high=None, kind='survivors') if failed else ours


def _values(rows: Sequence[Row]) -> list[float]:
    """The numbers of rows; files have none that are not finite."""
    return [math.nan if row['value'] is None else row['value'] for row in rows]


@dataclasses.dataclass(frozen=True)
class PublishedPlot:
    """The figure and the table of an experiment that repeats published results, of which some runs may have failed."""

    claims: Claims
    failed: Sequence[str] = ()

    def figure(self, rows: Sequence[Row]) -> Figure:
        """See `published_figure`."""
        return published_figure(self.claims, rows, self.failed)

    def table(self, rows: Sequence[Row]) -> list[list[str]]:
        """See `published_table`."""
        return published_table(self.claims, rows, self.failed)


def published_table(claims: Claims, rows: Sequence[Row], failed: Sequence[str] = ()) -> list[list[str]]:
    """The published numbers, ours and the verdicts, as a table of text cells, the heading first.

    `seeds` are the values of ours, for papers that report the best of several. Claims without a run are left out, and
    `failed` are the labels of runs without a value.
    """
    lines = [['metric', 'published', 'ours', 'seeds', 'verdict']]
    for name, published in claims.items():
        if taken := rows_of(name, published, rows):
            lines.append(_line(name, published, taken, failed_of(name, published, failed)))
    return lines


def _line(name: str, published: Published, rows: Sequence[Row], failed: int) -> list[str]:
    ours = measured(rows, published.bounds, failed)
    bound = '' if published.direction == 'equal' else f'{published.direction} '
    spread = f' ± {published.spread:.4g}' if published.spread else ''
    ends = '' if ours.low is None or ours.high is None else f' [{ours.low:.4f}, {ours.high:.4f}]'
    if ours.kind == 'range':
        ends = f' ({ours.low:.4f} to {ours.high:.4f})'
    return [
        f'{name}: {published.metric}' if name else published.metric,
        f'{bound}{published.value:.4g}{spread}',
        f'{ours.mean:.4f}{ends}',
        ', '.join(f'{value:.4f}' for value in _values(rows)),
        str(verdict(published, ours, failed)),
    ]


def published_figure(claims: Claims, rows: Sequence[Row], failed: Sequence[str] = ()) -> Figure:
    """Our number of every seed, the interval of their mean, and a line at the published one; a panel a claim.

    Where some of its runs `failed` a claim has no interval.
    """
    found = {name: rows_of(name, published, rows) for name, published in claims.items()}
    shown = [name for name in claims if found[name]]
    figure, panel = panels(len(shown))
    for axes, name in zip(panel, shown, strict=True):
        published = claims[name]
        values = _values(found[name])
        ours = measured(found[name], published.bounds, failed_of(name, published, failed))
        axes.plot(range(len(values)), values, 'o', label='ours')
        if ours.low is not None and ours.high is not None:
            label = 'range of ours' if ours.kind == 'range' else 'mean of ours, 95 %'
            axes.axhspan(ours.low, ours.high, color='C0', alpha=0.15, lw=0, label=label)
        axes.axhline(published.value, color='0.4', ls='--', label='published')
        metric = textwrap.fill(published.metric, WIDEST)
        axes.set_title(f'{name}\n{metric}' if name else metric, fontsize='medium')
        axes.set_xlabel('seed')
        axes.set_xticks(range(len(values)))
    # A claim without an interval does not have all there is to name.
    shown_as = {label: line for axes in panel for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    place: dict[str, Any] = {'loc': 'outside lower center', 'ncols': len(shown_as), 'columnspacing': 1.2}
    figure.legend(shown_as.values(), shown_as, frameon=False, **place)
    return figure
