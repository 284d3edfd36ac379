"""Results that others published, and a verdict on ours that is computed, not written.

A folder `experiments/published/NAME` is an experiment without `plot.py`, whose `sweep.py` also has `published(size)`, a
`Published`, and whose `measure` gives the number that was published as `value`. Its runs are seeds; the table of its
README has the published number, ours over the seeds, and the verdict.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from matplotlib.figure import Figure

from attnlab.errors import UserError
from attnlab.evals.measured import Measured, of_seeds
from attnlab.experiment.results import panels

Outcome = Literal['agrees', 'differs', 'not comparable']


@dataclasses.dataclass(frozen=True, kw_only=True)
class Published:
    """A number that a paper states, and how it came about.

    Attributes:
      value: the number.
      spread: half of what the paper itself says it varies by; 0 where it says nothing.
      metric: what it is of.
      source: the paper, and where in it.
      direction: 'equal' where the claim is the number; 'at least' or 'at most' where it is a bound, such as that a
        method gets there within so many steps.
      changed: what of the protocol is not as published: data, model, optimiser, schedule, steps, precision, selection,
        metric. With anything changed the numbers are not comparable.
      guess: why ours differs, if it does.

    Raises `UserError` for a spread below 0.
    """

    value: float
    metric: str
    source: str
    spread: float = 0.0
    direction: Literal['equal', 'at least', 'at most'] = 'equal'
    changed: tuple[str, ...] = ()
    guess: str = ''

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


def verdict(published: Published, ours: Measured) -> Verdict:
    """Compares a published number with ours.

    They agree where our interval, widened by the paper's own spread, holds the published value; with a bound, where all
    of the interval lies on the right side, to within that spread; one that reaches across a bound decides nothing. Ours
    without an interval (one seed) agrees with nothing but an equal value: it differs by the difference. A changed
    protocol makes them not comparable, whatever the numbers.
    """
    if published.changed:
        return Verdict('not comparable', 'changed: ' + '; '.join(published.changed))
    low = ours.mean if ours.low is None else ours.low
    high = ours.mean if ours.high is None else ours.high
    value, spread = published.value, published.spread
    agrees = {
        'equal': low - spread <= value <= high + spread,
        'at least': low + spread >= value,
        'at most': high - spread <= value,
    }[published.direction]
    if agrees:
        return Verdict('agrees')
    if published.direction != 'equal' and low < value < high:
        return Verdict('not comparable', 'our interval reaches across the bound')
    why = f'; best guess: {published.guess}' if published.guess else ''
    return Verdict('differs', f'by {ours.mean - published.value:+.4g}{why}')


def measured(rows: Sequence[Mapping[str, Any]]) -> Measured:
    """Our number over the seeds of the runs."""
    return of_seeds([row['value'] for row in rows])


@dataclasses.dataclass(frozen=True)
class PublishedPlot:
    """The figure and the table of an experiment that repeats a published result."""

    published: Published

    def figure(self, rows: Sequence[Mapping[str, Any]]) -> Figure:
        """See `published_figure`."""
        return published_figure(self.published, rows)

    def table(self, rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
        """See `published_table`."""
        return published_table(self.published, rows)


def published_table(published: Published, rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """The published number, ours and the verdict, as a table of text cells, the heading first."""
    ours = measured(rows)
    bound = '' if published.direction == 'equal' else f'{published.direction} '
    spread = f' ± {published.spread:.4g}' if published.spread else ''
    interval = '' if ours.low is None or ours.high is None else f' [{ours.low:.4f}, {ours.high:.4f}]'
    return [
        ['metric', 'published', 'ours', 'seeds', 'verdict'],
        [
            published.metric,
            f'{bound}{published.value:.4g}{spread}',
            f'{ours.mean:.4f}{interval}',
            str(ours.n),
            str(verdict(published, ours)),
        ],
    ]


def published_figure(published: Published, rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Our number of every seed, and a line at the published one."""
    figure, (axes,) = panels(1)
    axes.plot(range(len(rows)), [row['value'] for row in rows], 'o', label='ours')
    axes.axhline(published.value, color='0.4', ls='--', label='published')
    axes.set(title=published.metric, xlabel='seed')
    axes.set_xticks(range(len(rows)))
    axes.legend(frameon=False)
    return figure
