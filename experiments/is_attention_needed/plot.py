"""Errors on test of every system, at the rate that validation chose: a panel a series and horizon."""

import numpy as np

from attnlab.compare.axes import styles
from attnlab.experiment.results import aside, at_best_rate, legend_beside, panels, plus_minus, rate_of, seeds_on_line

BASELINES = ('repeat_last', 'ridge', 'ridge_last_value')


def figure(rows):
    """A line a system from the short look-back to the long one; dots are seeds, dashed lines what needs no training."""
    found = chosen(rows)
    problems = list(dict.fromkeys(key[:2] for key in found))
    lookbacks, systems = (list(dict.fromkeys(key[place] for key in found)) for place in (2, 3))
    looks = styles(systems)
    figure, axes = panels(len(problems), width=3.4)
    for axis, problem in zip(axes, problems, strict=True):
        for number, system in enumerate(systems):
            seeds = [[row['test_mse'] for row in found[(*problem, lookback, system)]] for lookback in lookbacks]
            places = np.arange(len(lookbacks)) + aside(number, len(systems), 0.04)
            seeds_on_line(axis, places, seeds, looks[system].colour, system)
        for name, style in zip(BASELINES, ('--', ':', '-.'), strict=True):
            values = [found[(*problem, lookback, systems[0])][0][name] for lookback in lookbacks]
            axis.plot(range(len(lookbacks)), values, style, color='0.5', lw=0.9, label=name.replace('_', ' '))
        axis.set(title=' series, horizon '.join(problem), yscale='log', xlim=(-0.4, len(lookbacks) - 0.6))
        axis.set_xticks(range(len(lookbacks)), [f'{each} look-back' for each in lookbacks], fontsize='small')
    axes[0].set_ylabel('mean squared error on test')
    legend_beside(figure, axes[0])
    return figure


def table(rows):
    """A line a series, horizon, look-back and system, then the baselines of each."""
    lines = [['series', 'horizon', 'look-back', 'system', 'rate', 'test error', 'seeds']]
    found = chosen(rows)
    for place, ((series, horizon, lookback, system), seeds) in enumerate(found.items()):
        error = plus_minus([row['test_mse'] for row in seeds], 4)
        lines.append([series, horizon, lookback, system, rate_of(seeds[0]), error, f'{len(seeds)}'])
        following = [*found][place + 1 : place + 2]
        if not following or following[0][:3] != (series, horizon, lookback):
            for name in BASELINES:
                lines.append(
                    [series, horizon, lookback, f'({name.replace("_", " ")})', '', f'{seeds[0][name]:.4f}', '']
                )
    return lines


def chosen(rows):
    """The runs of every series, horizon, look-back and system at the rate with the least mean error on validation."""
    return at_best_rate(rows, lambda row: row['valid_mse'])
