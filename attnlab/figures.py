"""Figures of runs, their evaluations and analyses, and beside each the numbers in it, as CSV."""

import itertools
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from attnlab.files import replacing, write
from attnlab.tables import csv_lines


def loss_curve(lines: Sequence[Mapping[str, Any]], path: pathlib.Path) -> None:
    """Bits per byte (or the loss) over steps, for training and every evaluation that reports it.

    The loss of training is what it minimises, which of some heads is another than that of evaluations.

    Numbers that are not finite are gaps; the CSV has them as they were recorded.
    """
    key = 'bits_per_byte' if any(name.endswith('bits_per_byte') for line in lines for name in line) else 'loss'
    names = dict.fromkeys(name for line in lines for name in line if name.endswith(f'/{key}'))
    curves = {name: [(line['step'], line[name]) for line in lines if name in line] for name in names}
    figure, axes = _axes('step', key.replace('_', ' '))
    drawn = []
    for name, points in curves.items():
        steps, values = zip(*points, strict=True)
        # Those that are not finite are recorded as text.
        drawn.append(np.array(values, float))
        training = name.startswith('train/')
        title = 'train, as minimised' if name == 'train/loss' else name.removesuffix(f'/{key}')
        axes.plot(
            steps,
            drawn[-1],
            label=title,
            lw=1 if training else 2,
            marker=None if training else 'o',
            ms=3,
        )
    limits = _limits(drawn)
    if limits is not None:
        axes.set_ylim(*_widened(*limits))
    _write(figure, axes, path)
    rows = [(name, step, value) for name, points in curves.items() for step, value in points]
    write_csv(path.with_suffix('.csv'), ('curve', 'step', 'value'), rows)


def _limits(curves: Iterable[np.ndarray]) -> tuple[float, float] | None:
    """From the least value up to the greatest, or to twice as far as the lower nine tenths of every curve reach.

    So the first steps of training, and steps that failed, leave room for the others. `None` where nothing is finite.
    """
    finite = [found for values in curves if (found := values[np.isfinite(values)]).size]
    if not finite:
        return None
    low, high = min(map(np.min, finite)), max(map(np.max, finite))
    most = max(np.quantile(values, 0.9, method='higher') for values in finite)
    return float(low), float(min(high, 2 * most - low))


def position_curves(
    curves: Mapping[str, np.ndarray],
    path: pathlib.Path,
    *,
    trained: int | None,
    mark: str = 'training length',
    x: str = 'position in the window',
    y: str = 'nats per token',
) -> None:
    """A metric by position, smoothed, one curve per length; `trained`, unless it is `None`, is a line called `mark`.

    The CSV has positions from 1 on, as they were measured; nothing stands where nothing was.
    """
    figure, axes = _axes(x, y)
    for name, values in curves.items():
        positions, smooth = _smoothed(values)
        axes.plot(positions, smooth, label=name, lw=1.5)
    longest = max(len(values) for values in curves.values())
    if trained is not None and longest > trained:
        axes.axvline(trained, color='0.6', lw=1, ls='--', label=mark)
        axes.set_xscale('log', base=2)
    _write(figure, axes, path)
    lines = [
        (name, position, value if np.isfinite(value) else '')
        for name, values in curves.items()
        for position, value in enumerate(values.tolist(), 1)
    ]
    write_csv(path.with_suffix('.csv'), ('curve', 'position', 'value'), lines)


def layer_curves(curves: Mapping[str, Sequence[float]], path: pathlib.Path) -> None:
    """Statistics by layer, one panel each; layers without the statistic are omitted."""
    figure, panels = _panels(curves, 'layer')
    for axes, values in zip(panels, curves.values(), strict=True):
        axes.plot(range(len(values)), values, marker='o', ms=3, lw=1.5)
        axes.set_ylim(0, None)
        tick_whole(axes.xaxis)
    save(figure, path)
    lines = [(name, layer, value) for name, values in curves.items() for layer, value in enumerate(values)]
    write_csv(path.with_suffix('.csv'), ('statistic', 'layer', 'value'), lines)


def length_curves(curves: Mapping[str, Mapping[int, float]], path: pathlib.Path) -> None:
    """Metrics by length, in multiples of the training length, one panel each."""
    figure, panels = _panels(curves, 'times the training length')
    for axes, values in zip(panels, curves.values(), strict=True):
        axes.plot(values.keys(), values.values(), marker='o', ms=3, lw=1.5)
        axes.set_xscale('log', base=2)
        axes.set_xticks(list(values), [str(multiple) for multiple in values])
    save(figure, path)
    lines = [(name, length, value) for name, values in curves.items() for length, value in values.items()]
    write_csv(path.with_suffix('.csv'), ('metric', 'times_the_length', 'value'), lines)


def cost_curves(curves: Mapping[str, Mapping[str, float]], costs: Mapping[str, float], path: pathlib.Path) -> None:
    """Metrics over operations, one panel each; every point is one way of running a model, and is named."""
    figure, panels = _panels(curves, 'operations a token')
    for axes, values in zip(panels, curves.values(), strict=True):
        axes.plot([costs[name] for name in values], values.values(), marker='o', ms=3, lw=1.5)
        for name, value in values.items():
            axes.annotate(name, (costs[name], value), fontsize='small', xytext=(3, 3), textcoords='offset points')
    save(figure, path)
    lines = [(metric, name, costs[name], value) for metric, values in curves.items() for name, value in values.items()]
    write_csv(path.with_suffix('.csv'), ('metric', 'way', 'operations', 'value'), lines)


Panel = tuple[str, np.ndarray, Mapping[str, np.ndarray], tuple[np.ndarray, ...]]
"""Of a window: its title, the look-back, forecasts by name, and the two ends of an interval, if there is one."""


def forecast_panels(windows: Sequence[Panel], path: pathlib.Path, *, truth: str, interval: str) -> None:
    """Windows side by side: the look-back and what came in black, forecasts in colour, the first with its interval."""
    figure, panels = _panels([title for title, *_ in windows], 'steps ahead')
    for axes, (_, past, forecasts, ends) in zip(panels, windows, strict=True):
        steps = np.arange(1, len(forecasts[truth]) + 1)
        axes.plot(np.arange(1 - len(past), 1), past, color='0.4', lw=1)
        axes.plot(steps, forecasts[truth], color='0', lw=1.2, label=truth)
        others = [name for name in forecasts if name != truth]
        for place, name in enumerate(others):
            axes.plot(steps, forecasts[name], color=f'C{place}', lw=0.8 if place else 1.5, label=name.replace('_', ' '))
        if ends:
            axes.fill_between(steps, *ends, color='C0', alpha=0.25, lw=0, label=interval)
        axes.axvline(0.5, color='0.7', lw=0.8)
    figure.legend(*panels[0].get_legend_handles_labels(), frameon=False, loc='outside right upper', fontsize='small')
    save(figure, path)


def spectrum_curves(
    frequencies: np.ndarray, spectra: Mapping[str, np.ndarray], path: pathlib.Path, *, truth: str
) -> None:
    """Power over frequency, that of what came in black; powers of zero are left out, and names of what has no other."""
    figure, axes = _axes('cycles a step', 'power')
    others = [name for name in spectra if name != truth]
    for name, power in spectra.items():
        if not (power > 0).any():
            continue
        colour = '0' if name == truth else f'C{others.index(name)}'
        axes.plot(frequencies, np.where(power > 0, power, np.nan), label=name.replace('_', ' '), color=colour, lw=1.3)
    axes.set_yscale('log')
    _write(figure, axes, path)


def trajectory_panels(runs: Mapping[str, np.ndarray], path: pathlib.Path) -> None:
    """Trajectories side by side: the last variate of each over the first, on the axes of the first run."""
    figure, panels = _panels(runs, 'first variate')
    for axes, rows in zip(panels, runs.values(), strict=True):
        axes.plot(rows[:, 0], rows[:, -1], color='C0', lw=0.3)
    limits = [(rows[:, place].min(), rows[:, place].max()) for rows in runs.values() for place in (0, -1)][:2]
    for axes in panels:
        axes.set(xlim=_widened(*limits[0]), ylim=_widened(*limits[1]))
    panels[0].set_ylabel('last variate')
    save(figure, path)


def tick_whole(axis: Any) -> None:
    """Ticks at whole numbers alone, such as layers, also where there is but one."""
    from matplotlib.ticker import MaxNLocator

    # By default fractions make up a second tick.
    axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def _widened(low: float, high: float) -> tuple[float, float]:
    """A range with a tenth of it, or a half around one number, on either side."""
    margin = 0.1 * (high - low) or 0.5
    return low - margin, high + margin


def canvas(width: float, height: float) -> Any:
    """An empty figure, in inches, that no window shows."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout='constrained')
    FigureCanvasAgg(figure)
    return figure


def styled(axes: Any) -> Any:
    """These axes, with a faint grid and without the upper and the right edge."""
    axes.grid(alpha=0.3)
    axes.spines[['top', 'right']].set_visible(False)
    return axes


def write_csv(path: pathlib.Path, header: Sequence[str], lines: Iterable[Sequence[Any]]) -> None:
    """Writes a table of numbers with a header."""
    write(path, csv_lines(header, lines))


def _panels(titles: Iterable[str], x: str) -> tuple[Any, list[Any]]:
    """A figure with one panel per title, side by side."""
    names = [title.replace('_', ' ') for title in titles]
    figure = canvas(3.0 * len(names), 2.6)
    panels = list(figure.subplots(1, len(names), squeeze=False)[0])
    for axes, name in zip(panels, names, strict=True):
        styled(axes).set(title=name, xlabel=x)
    return figure, panels


def _smoothed(values: np.ndarray, points: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """Means over geometrically growing windows of positions, so that the first positions stay separate."""
    edges = np.unique(np.geomspace(1, len(values) + 1, points).astype(int))
    pairs = [(a, b) for a, b in itertools.pairwise(edges) if np.isfinite(values[a - 1 : b - 1]).any()]
    centres = np.array([(a + b - 1) / 2 for a, b in pairs])
    return centres, np.array([np.nanmean(values[a - 1 : b - 1]) for a, b in pairs])


def _axes(x: str, y: str) -> tuple[Any, Any]:
    figure = canvas(6.0, 4.0)
    return figure, styled(figure.add_subplot(xlabel=x, ylabel=y))


def _write(figure: Any, axes: Any, path: pathlib.Path) -> None:
    if axes.get_legend_handles_labels()[0]:
        legend(axes)
    save(figure, path)


def legend(axes: Any, **options: Any) -> None:
    """Writes the legend of axes where it covers least.

    That place is asked for by name: as matplotlib's default it gives a warning where it takes more than a second.
    """
    axes.legend(loc='best', frameon=False, **options)


def save(figure: Any, path: pathlib.Path) -> None:
    """Writes a figure in the format that its name ends in.

    Texts are shown as they are, for a name may have a dollar sign; powers of ten along an axis are formulas.
    """
    from matplotlib.axis import Tick
    from matplotlib.text import Text

    powers = {label for tick in figure.findobj(Tick) for label in (tick.label1, tick.label2)}
    for text in set(figure.findobj(Text)) - powers:
        text.set_parse_math(False)
    with replacing(path) as temporary:
        figure.savefig(temporary, format=path.suffix[1:], dpi=120)
