"""The figure of `attnlab compare RUN...`: scores over what they cost, a row of panels a task."""

import itertools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from attnlab.compare.axes import Style, scale, short, styles
from attnlab.compare.runs import RunResult, costs_of, short_names
from attnlab.files import replacing


def draw_costs(groups: Mapping[str, Sequence[RunResult]], path: pathlib.Path) -> None:
    """Writes the figure, in the format that the path ends in; a pure function of the results."""
    # Names of runs may have a dollar sign.
    with matplotlib.rc_context({'svg.hashsalt': 'runs', 'svg.fonttype': 'none', 'text.parse_math': False}):
        metadata = {'Date': None} if path.suffix == '.svg' else {'Software': None}
        with replacing(path) as temporary:
            costs_figure(groups).savefig(temporary, format=path.suffix[1:], dpi=120, metadata=metadata)


def costs_figure(groups: Mapping[str, Sequence[RunResult]]) -> Figure:
    """A row of panels a task, its runs as points; a run that bears one name in several tasks looks the same in all."""
    names = dict.fromkeys(itertools.chain.from_iterable(short_names(group) for group in groups.values()))
    looks = styles(list(names))
    titles = costs_of(itertools.chain.from_iterable(groups.values()))
    panels = [cost for cost in titles if cost != 'state_bytes_8x']
    figure = Figure(figsize=(2.6 * len(panels) + 1.6, 2.3 * len(groups) + 0.4), layout='constrained')
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(groups), len(panels), squeeze=False, sharey='row')
    for row, (task, group) in zip(axes, groups.items(), strict=True):
        for axis, cost in zip(row, panels, strict=True):
            _panel(axis, group, cost, looks)
            axis.set_xlabel(titles[cost])
        metrics = ', '.join(dict.fromkeys(one.metric for one in group))
        row[0].set_ylabel(f'{task}\n{metrics}')
    handles = [Line2D([], [], ls='', marker=look.marker, color=look.colour, label=name) for name, look in looks.items()]
    figure.legend(handles=handles, loc='outside right upper', frameon=False, fontsize='small')
    return figure


def _panel(axis: Any, group: Sequence[RunResult], cost: str, looks: Mapping[str, Style]) -> None:
    """Scores over a cost, with intervals over seeds, and dashed lines at what trivial predictors reach; a classifier
    does not decode, has no state, and stays out of that panel.
    """
    costs = [getattr(one, cost) or None for one in group]
    for one, name, value in zip(group, short_names(group), costs, strict=True):
        if value is not None:
            axis.plot(value, one.score, looks[name].marker, color=looks[name].colour, ms=6, alpha=0.85)
            if one.seeds > 1 and one.low is not None:
                axis.vlines(value, one.low, one.high, color=looks[name].colour, lw=1)
    guessed = {value for one in group for value in one.baselines.values()}
    axis.hlines(sorted(guessed), 0, 1, transform=axis.get_yaxis_transform(), color='0.6', lw=1, ls='--')
    known = [float(value) for value in costs if value is not None]
    if known:
        scale(axis.xaxis, known, short, least=3.0)
    axis.grid(alpha=0.3)
    axis.spines[['top', 'right']].set_visible(False)
    axis.tick_params(labelsize='small')
