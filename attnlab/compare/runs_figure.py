"""The figure of `attnlab compare RUN...`: scores over what they cost, a row of panels a task."""

import itertools
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from attnlab.compare.axes import Style, scale, short, styles
from attnlab.compare.runs import RunResult, baselines_of, costs_of, short_names
from attnlab.evals.measured import Kind
from attnlab.files import replacing

INTERVALS: Mapping[Kind, tuple[str, str]] = {
    'seeds': ('-', '95 % over seeds'),
    'range': ('-', 'range of two seeds'),
    'documents': (':', '95 % over documents'),
    'examples': (':', '95 % over examples'),
}
"""How the line of an interval looks, by what it is over, and what the legend says of it."""

ENTRY = 0.19
"""How high a line of the legend is, in inches."""

LINE = 0.08
"""How high a line of text is, as a share of a panel."""


def draw_costs(groups: Mapping[str, Sequence[RunResult]], path: pathlib.Path) -> None:
    """Writes the figure, in the format that the path ends in; a pure function of the results."""
    # Names of runs may have a dollar sign.
    with matplotlib.rc_context({'svg.hashsalt': 'runs', 'svg.fonttype': 'none', 'text.parse_math': False}):
        metadata = {'Date': None} if path.suffix == '.svg' else {'Software': None}
        with replacing(path) as temporary:
            costs_figure(groups).savefig(temporary, format=path.suffix[1:], dpi=120, metadata=metadata)


def costs_figure(groups: Mapping[str, Sequence[RunResult]]) -> Figure:
    """A row of panels a task, its runs as points; a run that bears one name in several tasks looks the same in all.

    Dashed lines are what trivial predictors reach, named at the end of a row.
    """
    names = dict.fromkeys(itertools.chain.from_iterable(short_names(group) for group in groups.values()))
    looks = styles(list(names))
    titles = costs_of(itertools.chain.from_iterable(groups.values()))
    panels = [cost for cost in titles if cost != 'state_bytes_8x']
    handles = _legend(groups, looks)
    # What a legend has beyond the figure's lower end is cut off.
    height = max(2.3 * len(groups) + 0.4, ENTRY * len(handles) + 0.2)
    figure = Figure(figsize=(2.6 * len(panels) + 1.6, height), layout='constrained')
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(groups), len(panels), squeeze=False, sharey='row')
    for row, (task, group) in zip(axes, groups.items(), strict=True):
        for axis, cost in zip(row, panels, strict=True):
            _panel(axis, group, cost, looks)
            axis.set_xlabel(titles[cost])
        metrics = ', '.join(dict.fromkeys(one.metric for one in group))
        row[0].set_ylabel(f'{task}\n{metrics}')
        _name_lines(row[-1], group)
    figure.legend(handles=handles, loc='outside right upper', frameon=False, fontsize='small')
    return figure


def _legend(groups: Mapping[str, Sequence[RunResult]], looks: Mapping[str, Style]) -> list[Line2D]:
    """The names of runs, and what their intervals are over."""
    named = [Line2D([], [], ls='', marker=look.marker, color=look.colour, label=name) for name, look in looks.items()]
    kinds = {one.measured.kind for one in itertools.chain.from_iterable(groups.values())}
    return named + [
        Line2D([], [], ls=line, color='0.3', lw=1, label=words)
        for kind, (line, words) in INTERVALS.items()
        if kind in kinds
    ]


def _panel(axis: Any, group: Sequence[RunResult], cost: str, looks: Mapping[str, Style]) -> None:
    """Scores over a cost, with their intervals, and dashed lines at what trivial predictors reach; a classifier does
    not decode, has no state, and stays out of that panel.
    """
    costs = [getattr(one, cost) or None for one in group]
    for one, name, value in zip(group, short_names(group), costs, strict=True):
        if value is not None:
            axis.plot(value, one.score, looks[name].marker, color=looks[name].colour, ms=6, alpha=0.85)
            if (kind := one.measured.kind) in INTERVALS:
                axis.vlines(value, one.low, one.high, color=looks[name].colour, lw=1, ls=INTERVALS[kind][0])
    reached = sorted(set(_guessed(group).values()))
    axis.hlines(reached, 0, 1, transform=axis.get_yaxis_transform(), color='0.6', lw=1, ls='--')
    known = [float(value) for value in costs if value is not None]
    if known:
        scale(axis.xaxis, known, short, least=3.0)
    else:
        axis.set_xticks([])
    axis.grid(alpha=0.3)
    axis.spines[['top', 'right']].set_visible(False)
    axis.tick_params(labelsize='small')


def _guessed(group: Sequence[RunResult]) -> dict[str, float]:
    """What trivial predictors reach, by name, the least first."""
    return dict(sorted(baselines_of(group).items(), key=lambda item: item[1]))


def _name_lines(axis: Any, group: Sequence[RunResult]) -> None:
    """The names of trivial predictors right of their lines, in their order, each at least a line above the last."""
    low, high = axis.get_ylim()
    place = -math.inf
    for name, value in _guessed(group).items():
        place = max(place + LINE, (value - low) / (high - low))
        axis.text(1.02, place, name, transform=axis.transAxes, color='0.4', fontsize='x-small', va='center')
