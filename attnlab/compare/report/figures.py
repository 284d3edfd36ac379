"""The figures of a page of studies: small panels, each drawn from the lines of a CSV file and from nothing else."""

import dataclasses
import html
import io
import itertools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib import style as looks
from matplotlib import ticker
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from attnlab.compare.axes import MARKERS, Style, power, scale, scale_metric, short, styles
from attnlab.compare.costs import COSTS, matched_cost
from attnlab.compare.report.chart import SHAPES
from attnlab.compare.report.comparison import COLUMNS, StudyResult, ranked_metric, scored
from attnlab.compare.report.contents import Contents, costs_of, frontier, paid
from attnlab.compare.report.style import GREY, GRID, PALE, themed
from attnlab.evals.measured import Measured, is_share

SIZE = (3.2, 2.5)
WIDE = (3.7, 2.7)
FONTS = "'DejaVu Sans', Arial, Helvetica, sans-serif"
"""What figures are laid out with comes first; the others are narrower, so that nothing overlaps in them either."""

CsvRow = tuple[Any, ...]


def top(metric: str) -> float:
    """Where an axis of a metric ends: at 1 for shares."""
    return 1.0 if is_share(metric) else math.inf


@dataclasses.dataclass(frozen=True)
class Plot:
    """A figure.

    Attributes:
      name: of its file, without an ending.
      title: what it shows, for those who do not see it.
      data: the name of its CSV file, without an ending.
      header: of its CSV file.
      lines: of its CSV file: everything that is drawn.
      draw: draws the lines onto axes.
      keyed: the studies that are told apart by colour and marker alone, by name.
      size: in inches.
    """

    name: str
    title: str
    data: str
    header: tuple[str, ...]
    lines: tuple[CsvRow, ...]
    draw: Callable[[Any, Sequence[CsvRow]], None]
    keyed: tuple[str, ...]
    size: tuple[float, float] = SIZE


def cost_plots(contents: Contents) -> list[Plot]:
    """The confirmed value, or the best where nothing was confirmed, over each cost but the one that was matched."""
    rows = [study.row for study in contents.studies]
    comparison = contents.comparison
    metric = ranked_metric(rows, comparison.metric, comparison.score)
    plots = [_cost_plot(contents, cost, metric, rows, f'cost_{cost}') for cost in _unmatched(contents)]
    return [plot for plot in plots if plot.lines]


def companion_plots(contents: Contents) -> list[Plot]:
    """The same by the second metric; nothing where there is none."""
    rows = [study.companion for study in contents.studies if study.companion is not None]
    if contents.companion is None or len(rows) != len(contents.studies):
        return []
    start = f'cost_{contents.companion.rpartition("/")[2]}'
    plots = [_cost_plot(contents, cost, contents.companion, rows, f'{start}_{cost}') for cost in _unmatched(contents)]
    return [plot for plot in plots if plot.lines]


def _unmatched(contents: Contents) -> list[str]:
    return [cost for cost in costs_of(contents) if cost != matched_cost(contents.comparison.by, contents.length)]


def _cost_plot(contents: Contents, cost: str, metric: str, rows: Sequence[StudyResult], name: str) -> Plot:
    optimal, score = frontier(contents, cost, rows), scored(rows)
    lines = tuple(
        (row.name, value, *_ends(row.statistics[score]), mark, _survivors(row, score))
        for study, row, mark in zip(contents.studies, rows, optimal, strict=True)
        if (value := paid(study.costs, cost)) is not None and row.statistics
    )
    names = tuple(study.row.name for study in contents.studies)
    look = styles(names)

    def draw(axes: Any, lines: Sequence[CsvRow]) -> None:
        front = sorted((x, y) for _, x, y, _, _, mark, _ in lines if mark)
        if front:
            axes.plot(*zip(*front, strict=True), color=PALE, lw=1.2, zorder=1)
        for study, x, y, low, high, mark, survivors in lines:
            style = look[study]
            axes.plot([x, x], [low, high], color=style.colour, lw=1, zorder=2)
            face = style.colour if mark else 'white'
            axes.plot([x], [y], style.marker, color=style.colour, mfc=face, ms=6, zorder=3, clip_on=False)
            _note(axes, survivors, x, y)
        scale(axes.xaxis, [line[1] for line in lines], short, least=5.0)
        scale_metric(axes.yaxis, [value for line in lines for value in line[2:5]], most=top(metric))
        axes.set(xlabel=COSTS[cost].axis, ylabel=f'{score} {metric}')

    header = ('study', cost, score, 'low', 'high', 'pareto_optimal', 'survivors')
    return Plot(name, f'{metric} over {COSTS[cost].axis}', name, header, lines, draw, names)


def _ends(one: Measured) -> tuple[float, float, float]:
    """The value and the ends of its interval; of none, the value itself."""
    return (one.mean, one.mean if one.low is None else one.low, one.mean if one.high is None else one.high)


def _survivors(row: StudyResult, statistic: str) -> str:
    """How many of its seeds a confirmed value is of where others failed: `2 of 3 seeds`; else nothing."""
    done = len(row.confirmed)
    return f'{done} of {done + row.failed} seeds' if statistic == 'confirmed' and row.failed else ''


def _note(axes: Any, text: str, x: int | float, y: int | float) -> None:
    """A few words beside a point."""
    if text:
        offset = {'xytext': (5, -3), 'textcoords': 'offset points'}
        axes.annotate(text, (x, y), **offset, fontsize=6, color=GREY, annotation_clip=False)


def rate_plots(contents: Contents) -> list[Plot]:
    """Every trial's value over its learning rate: a panel a study, the others behind it, all on the same axes."""
    rows = [study.row for study in contents.studies]
    look = styles([row.name for row in rows])
    seeds = sorted({point.seed for row in rows for point in row.points})
    marks = dict(zip(seeds, itertools.cycle(MARKERS), strict=False))
    every = [
        (row.name, point.rate, point.seed, point.state, '' if point.value is None else point.value)
        for row in rows
        for point in row.points
    ]
    known = [line for line in every if line[4] != '']
    if not known:
        return []

    def panel(row: StudyResult) -> Plot:
        def draw(axes: Any, lines: Sequence[CsvRow]) -> None:
            behind = [line for line in lines if line[0] != row.name and line[4] != '']
            axes.plot([line[1] for line in behind], [line[4] for line in behind], '.', color=PALE, ms=4, zorder=1)
            mine = [line for line in lines if line[0] == row.name]
            colour = look[row.name].colour
            _draw_repeated(axes, [line for line in mine if line[4] != ''], colour)
            for _, rate, seed, state, value in mine:
                if value == '':
                    axes.plot([rate], [0.97], 'x', color=colour, ms=5, transform=axes.get_xaxis_transform(), zorder=4)
                else:
                    face = colour if state == 'done' else 'white'
                    axes.plot([rate], [value], marks[seed], color=colour, mfc=face, ms=4.5, mew=1, zorder=3)
            scale(axes.xaxis, [line[1] for line in lines], power, least=2.0)
            values = [line[4] for line in lines if line[4] != '']
            scale_metric(axes.yaxis, values, room=0.1, most=top(contents.comparison.metric))
            axes.set(xlabel='learning rate', ylabel=contents.comparison.metric)
            axes.set_title(row.name, color=colour, fontsize='medium', fontweight='bold', loc='left')

        header = ('study', 'learning_rate', 'seed', 'state', 'value')
        title = f'{row.name}: {contents.comparison.metric} over learning rate'
        return Plot(f'learning_rate_{row.name}', title, 'learning_rates', header, tuple(every), draw, ())

    return [panel(row) for row in rows]


def _draw_repeated(axes: Any, lines: Sequence[CsvRow], colour: str) -> None:
    """The median, and the band from least to most, over rates that several trials share."""
    by_rate: dict[float, list[float]] = {}
    for _, rate, _, _, value in lines:
        by_rate.setdefault(rate, []).append(value)
    rates = sorted(by_rate)
    if len(lines) > len(rates) > 1:
        axes.fill_between(
            rates,
            [min(by_rate[rate]) for rate in rates],
            [max(by_rate[rate]) for rate in rates],
            color=colour,
            alpha=0.15,
            lw=0,
        )
        axes.plot(rates, [float(np.median(by_rate[rate])) for rate in rates], color=colour, lw=1.2)


def length_plots(contents: Contents) -> list[Plot]:
    """The metric of each study's best trial, and of those that confirm it, over the length that it is evaluated at."""
    lines = tuple(
        (study.row.name, 'confirmation' if trial.confirms else 'best', trial.number, multiple, value, survivors)
        for study in contents.studies
        for trial in study.trials
        if trial.best or trial.confirms
        for survivors in (_survivors(study.row, 'confirmed' if trial.confirms else 'best'),)
        for multiple, value in trial.lengths.items()
    )
    names = tuple(study.row.name for study in contents.studies)
    look = styles(names)

    def draw(axes: Any, lines: Sequence[CsvRow]) -> None:
        for name, style in look.items():
            best = [line[3:5] for line in lines if line[:2] == (name, 'best')]
            if best:
                axes.plot(*zip(*best, strict=True), color=style.colour, marker=style.marker, ms=4, lw=1.4, zorder=3)
            again = [line[3:] for line in lines if line[:2] == (name, 'confirmation')]
            shared = sorted({multiple for multiple, *_ in again})
            values = [[value for multiple, value, _ in again if multiple == one] for one in shared]
            low, high = [min(column) for column in values], [max(column) for column in values]
            axes.fill_between(shared, low, high, color=style.colour, alpha=0.2, lw=0, zorder=2)
            for multiple, value, survivors in again[-1:]:
                _note(axes, survivors, multiple, value)
        found = sorted({line[3] for line in lines})
        axes.set_xscale('log', base=2)
        axes.set_xticks(found, [f'{multiple}x' for multiple in found])
        axes.xaxis.set_minor_locator(ticker.NullLocator())
        axes.axvline(1, color=GREY, lw=0.8, ls=':')
        scale_metric(axes.yaxis, [line[4] for line in lines], most=top(contents.comparison.score))
        axes.set(xlabel=f'length, in those trained on ({contents.length})', ylabel=contents.comparison.score)

    header = ('study', 'run', 'trial', 'multiple', 'value', 'survivors')
    title = f'{contents.comparison.score} over length'
    return [Plot('lengths', title, 'lengths', header, lines, draw, names, WIDE)] if lines else []


def progress_plots(contents: Contents) -> list[Plot]:
    """The best value among the first trials, over how many they are."""
    rows = [study.row for study in contents.studies]
    lines = tuple((row.name, number, value) for row in rows for number, value in enumerate(_best_so_far(row), 1))
    names = tuple(row.name for row in rows)
    look = styles(names)

    def draw(axes: Any, lines: Sequence[CsvRow]) -> None:
        for name, group in itertools.groupby(lines, lambda line: line[0]):
            known = [(number, value) for _, number, value in group if value != '']
            if known:
                style = look[name]
                numbers, values = zip(*known, strict=True)
                last = len(known) - 1
                axes.plot(
                    numbers,
                    values,
                    color=style.colour,
                    marker=style.marker,
                    markevery=[last],
                    ms=5,
                    lw=1.4,
                    drawstyle='steps-post',
                )
        axes.xaxis.set_major_locator(ticker.MaxNLocator(6, integer=True))
        every = [line[2] for line in lines if line[2] != '']
        scale_metric(axes.yaxis, every, most=top(contents.comparison.metric))
        axes.set(xlabel='trials', ylabel=f'best {contents.comparison.metric} so far')

    known = any(line[2] != '' for line in lines)
    header = ('study', 'trials', 'best_so_far')
    return [Plot('progress', 'Best so far over trials', 'progress', header, lines, draw, names, WIDE)] if known else []


def _best_so_far(row: StudyResult) -> list[float | str]:
    none_ended = not any(point.ended for point in row.points)
    found: list[float | str] = []
    best: float | None = None
    for point in row.points:
        if (point.ended or none_ended) and point.value is not None:
            better = best is None or (point.value < best) == (row.goal == 'min')
            best = point.value if better else best
        found.append('' if best is None else best)
    return found


def interval_plots(contents: Contents) -> list[Plot]:
    """A panel a statistic: its value and interval in each study."""
    rows = [study.row for study in contents.studies]
    look = styles([row.name for row in rows])

    def panel(statistic: str) -> Plot:
        lines = tuple(
            (row.name, *_ends(row.statistics[statistic]), _survivors(row, statistic))
            for row in rows
            if statistic in row.statistics
        )

        def draw(axes: Any, lines: Sequence[CsvRow]) -> None:
            for place, (name, value, low, high, survivors) in enumerate(lines):
                style = look[name]
                axes.plot([low, high], [place, place], color=style.colour, lw=1.6)
                axes.plot([value], [place], style.marker, color=style.colour, ms=5.5)
                _note(axes, survivors, value, place)
            axes.set_yticks(range(len(lines)), [line[0] for line in lines])
            axes.set_ylim(len(lines) - 0.5, -0.5)
            axes.tick_params(axis='y', length=0)
            values = [value for line in lines for value in line[1:4]]
            metric = contents.comparison.score if statistic == 'confirmed' else contents.comparison.metric
            scale_metric(axes.xaxis, values, most=top(metric))
            axes.set(xlabel=metric)
            axes.set_title(statistic, fontsize='medium', fontweight='bold', loc='left')

        header = ('study', 'value', 'low', 'high', 'survivors')
        size = (SIZE[0], 0.95 + 0.2 * max(len(lines), 3))
        name = f'interval_{_word(statistic)}'
        return Plot(name, f'{statistic}, with intervals', name, header, lines, draw, (), size)

    return [plot for plot in map(panel, COLUMNS[1:]) if plot.lines]


SETTINGS: dict[str, Any] = {
    'svg.fonttype': 'none',
    'text.parse_math': False,
    'font.family': 'DejaVu Sans',
    'font.size': 8,
    'axes.linewidth': 0.6,
    'axes.edgecolor': GREY,
    'xtick.color': GREY,
    'ytick.color': GREY,
    'xtick.labelcolor': '#333333',
    'ytick.labelcolor': '#333333',
}
"""Of Matplotlib, over its defaults: a reader's own settings change nothing."""


def svg(plot: Plot, *, key: bool) -> str:
    """A figure as an SVG element: text as text, no dates, identifiers of its own; with `key`, one of colours below."""
    height = plot.size[1]
    ordered = plot.keyed if key else ()
    if ordered:
        columns = max(1, int(plot.size[0] * 13 // (max(map(len, ordered)) + 4)))
        columns = min(columns, len(ordered))
        height += 0.17 * math.ceil(len(ordered) / columns) + 0.1
    with looks.context(['default', SETTINGS | {'svg.hashsalt': plot.name}]):
        figure = Figure(figsize=(plot.size[0], height), layout='constrained')
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        axes.grid(color=GRID, lw=0.6)
        axes.set_axisbelow(True)
        axes.spines[['top', 'right']].set_visible(False)
        plot.draw(axes, plot.lines)
        if ordered:
            figure.legend(
                handles=[_handle(name, style) for name, style in styles(ordered).items()],
                loc='outside lower center',
                ncols=columns,
                frameon=False,
                fontsize=7,
                handletextpad=0.2,
                columnspacing=1.0,
                labelspacing=0.3,
            )
        buffer = io.StringIO()
        figure.savefig(buffer, format='svg', metadata=dict.fromkeys(('Date', 'Creator', 'Format', 'Type')))
    return _mended(buffer.getvalue(), plot)


def _handle(name: str, style: Style) -> Line2D:
    return Line2D([], [], ls='', marker=style.marker, color=style.colour, ms=5, label=name)


def _mended(text: str, plot: Plot) -> str:
    """The element alone, with a title, rules and identifiers that hold for it only, and fonts that every reader has."""
    text = text[text.index('<svg') :].strip()
    text = text.replace('*{stroke-linejoin', 'svg *{stroke-linejoin').replace("'DejaVu Sans'", FONTS)
    prefix = re.sub(r'[^A-Za-z0-9_]', lambda match: f'-{ord(match[0]):x}-', plot.name)
    text = re.sub(r'( id="|href="#|url\(#)', rf'\g<1>{prefix}-', text)
    title = html.escape(plot.title)
    opening, rest = text.split('>', 1)
    return f'{opening} role="img" aria-label="{title}">\n <title>{title}</title>{rest}\n'


def _word(name: str) -> str:
    return name.replace(' ', '_')


def swatch(style: Style) -> str:
    """A study's mark, as an SVG element."""
    shape = SHAPES[style.marker]
    drawn = f'<svg class="mark" viewBox="0 0 12 12" aria-hidden="true" style="fill:{style.colour}">{shape}</svg>'
    return themed(drawn)
