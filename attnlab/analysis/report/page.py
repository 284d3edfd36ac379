"""`attnlab report`: one HTML page that needs nothing else, and the numbers in it as CSV; the same bytes every time."""

import csv
import html
import io
import os
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from rich.console import Console

from attnlab.analysis.report.comparison import COLUMNS, Comparison, cells, headers

STYLE = """\
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62em; margin: 2em auto; padding: 0 1em; color: #222; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25em .8em; border-bottom: 1px solid #ddd; text-align: right; }
th:first-child, td:first-child { text-align: left; }
.unmatched { background: #fdd; padding: .5em 1em; font-weight: bold; }
.matched { background: #dfd; padding: .5em 1em; }
svg { max-width: 100%; height: auto; }
"""
NOTES = """\
Intervals are 95% percentiles of 1000 bootstrap resamples of the trials of a study. Trials are done/pruned/failed. Top
quarter: the median of the best quarter of the trials. Area: the mean over the logarithm of the learning rate, by
trapezoids. A failed trial counts as the worst that did not fail, a pruned one as what it had reached. Confirmed: the
winner's settings with fresh seeds."""


def write_report(comparison: Comparison, folder: pathlib.Path, console: Console) -> None:
    """Writes `index.html`, `studies.csv` and `trials.csv`, a pure function of the comparison."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        'index.html': page(comparison),
        'studies.csv': table(_headers(comparison), _study_lines(comparison)),
        'trials.csv': table(('study', 'trial', 'learning_rate', 'seed', 'state', 'value'), _trial_lines(comparison)),
    }
    for name, text in files.items():
        partial = folder / f'{name}.partial'
        partial.write_text(text)
        os.replace(partial, folder / name)
    console.print(f'written: {", ".join(str(folder / name) for name in files)}', highlight=False, soft_wrap=True)


def page(comparison: Comparison) -> str:
    """The page as HTML."""
    state = 'unmatched' if comparison.reasons else 'matched'
    names = ''.join(f'<th>{html.escape(name)}</th>' for name in headers(comparison))
    body = ''.join(
        f'<tr>{"".join(f"<td>{html.escape(cell)}</td>" for cell in cells(row))}</tr>' for row in comparison.rows
    )
    figures = ''.join(f'<h2>{title}</h2>\n{svg(title, draw, comparison)}\n' for title, draw in FIGURES.items())
    title = html.escape(f'{comparison.metric}: {", ".join(row.name for row in comparison.rows)}')
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>\n<style>\n{STYLE}</style>'
        f'</head><body>\n<h1>{title}</h1>\n<p class="{state}">{html.escape(comparison.head)}</p>\n'
        f'<table><thead><tr>{names}</tr></thead><tbody>{body}</tbody></table>\n<p>{NOTES}</p>\n{figures}</body></html>\n'
    )


def svg(name: str, draw: Callable[[Any, Comparison], None], comparison: Comparison) -> str:
    """A figure as an SVG element, without dates and with the same identifiers every time."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout='constrained')
    FigureCanvasSVG(figure)
    with matplotlib.rc_context({'svg.hashsalt': name, 'svg.fonttype': 'path'}):
        draw(figure.add_subplot(), comparison)
        buffer = io.StringIO()
        figure.savefig(buffer, format='svg', metadata={'Date': None, 'Creator': None})
    text = buffer.getvalue()
    return text[text.index('<svg') :].strip()


def draw_rates(axes: Any, comparison: Comparison) -> None:
    """The value of each trial over its learning rate, and the mean where several share one."""
    for index, row in enumerate(comparison.rows):
        known = [(point.rate, point.value) for point in row.points if point.value is not None]
        if not known:
            continue
        rates, values = (np.array(column) for column in zip(*known, strict=True))
        found, places = np.unique(rates, return_inverse=True)
        axes.plot(rates, values, '.', color=f'C{index}', alpha=0.5)
        axes.plot(found, np.bincount(places, values) / np.bincount(places), color=f'C{index}', label=row.name)
    axes.set(xscale='log', xlabel='learning rate', ylabel=comparison.metric)
    _legend(axes)


def draw_progress(axes: Any, comparison: Comparison) -> None:
    """The best value among the first trials, over how many they are."""
    for index, row in enumerate(comparison.rows):
        worst, choose = (np.inf, np.minimum) if row.goal == 'min' else (-np.inf, np.maximum)
        values = [worst if point.value is None else point.value for point in row.points]
        if values:
            axes.plot(range(1, len(values) + 1), choose.accumulate(values), color=f'C{index}', label=row.name)
    axes.set(xlabel='trials', ylabel=f'best {comparison.metric}')
    _legend(axes)


def draw_intervals(axes: Any, comparison: Comparison) -> None:
    """Every statistic with its interval, studies side by side."""
    for index, row in enumerate(comparison.rows):
        found = row.statistics()
        for place, name in enumerate(COLUMNS):
            if name in found:
                one = found[name]
                x = place + 0.6 * ((index + 0.5) / len(comparison.rows) - 0.5)
                axes.plot([x, x], [one.low, one.high], color=f'C{index}', label=row.name if place == 0 else None)
                axes.plot([x], [one.value], 'o', color=f'C{index}')
    axes.set_xticks(range(len(COLUMNS)), COLUMNS)
    axes.set(ylabel=comparison.metric)
    _legend(axes)


FIGURES = {
    'By learning rate': draw_rates,
    'Best so far': draw_progress,
    'Statistics with 95% intervals': draw_intervals,
}


def table(header: Sequence[str], lines: Iterable[Sequence[Any]]) -> str:
    """CSV with a header."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator='\n')
    writer.writerow(header)
    writer.writerows(lines)
    return buffer.getvalue()


def _headers(comparison: Comparison) -> tuple[str, ...]:
    ends = tuple(f'{name.replace(" ", "_")}{end}' for name in COLUMNS for end in ('', '_low', '_high'))
    return ('study', comparison.by, 'flops', 'trials', *ends)


def _study_lines(comparison: Comparison) -> Iterable[list[Any]]:
    for row in comparison.rows:
        found = row.statistics()
        numbers = [getattr(found[name], part) if name in found else '' for name in COLUMNS for part in PARTS]
        yield [row.name, row.size, row.flops, len(row.points), *numbers]


PARTS = ('value', 'low', 'high')


def _trial_lines(comparison: Comparison) -> Iterable[list[Any]]:
    for row in comparison.rows:
        for number, point in enumerate(row.points):
            yield [row.name, number, point.rate, point.seed, point.state, '' if point.value is None else point.value]


def _legend(axes: Any) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)
