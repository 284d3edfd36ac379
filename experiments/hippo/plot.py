"""Error of what is remembered by the range of steps: a panel a problem; hollow: the best read at the start."""

import numpy as np

from attnlab.compare.axes import styles
from attnlab.experiment.results import aside, at_best_rate, dashed, legend_beside, panels, plus_minus, rate_of


def figure(rows):
    """Dots are seeds at the rate that validation chose, lines their means; predicting zero has an error of one."""
    found = chosen(rows)
    problems, starts, ranges = (list(dict.fromkeys(key[place] for key in found)) for place in range(3))
    looks = styles(starts)
    figure, axes = panels(len(problems), width=4.6)
    for axis, problem in zip(axes, problems, strict=True):
        for number, start in enumerate(starts):
            shift = aside(number, len(starts), 0.1)
            there = [(place + shift, found.get((problem, start, steps))) for place, steps in enumerate(ranges)]
            there = [(place, seeds) for place, seeds in there if seeds]
            places, colour = [place for place, _ in there], looks[start].colour
            axis.plot(places, [mean(seeds, 'test') for _, seeds in there], color=colour, lw=0.8, label=start)
            best = [mean(seeds, 'best_at_start') for _, seeds in there]
            axis.plot(places, best, 'o', color=colour, mfc='none', ms=6)
            for place, seeds in there:
                axis.plot([place] * len(seeds), [row['test'] for row in seeds], '.', color=colour)
        dashed(axis, [1.0])
        axis.set(title=problem, xlim=(-0.5, len(ranges) - 0.5), ylim=(-0.05, 1.25), xlabel='steps at the start')
        axis.set_xticks(range(len(ranges)), ranges)
    axes[0].set_ylabel('mean squared error on test')
    legend_beside(figure, axes[0])
    return figure


def table(rows):
    """A line a problem, start and range of steps."""
    lines = [['problem', 'start', 'steps', 'rate', 'error', 'best read at the start', 'best read after', 'seconds']]
    lines[0] += ['seeds']
    for (problem, start, steps), seeds in chosen(rows).items():
        error = plus_minus([row['test'] for row in seeds], 3)
        best = [f'{mean(seeds, name):.3f}' for name in ('best_at_start', 'best_after')]
        seconds = f'{mean(seeds, "seconds"):.0f}'
        lines.append([problem, start, steps, rate_of(seeds[0]), error, *best, seconds, f'{len(seeds)}'])
    return lines


def mean(seeds, name):
    """Over seeds."""
    return float(np.mean([row[name] for row in seeds]))


def chosen(rows):
    """The runs by problem, start and range of steps, at the rate with the least mean error on validation."""
    return at_best_rate(rows, lambda row: row['valid'])
