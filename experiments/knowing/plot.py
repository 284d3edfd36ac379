"""How well scores tell other inputs from digits, and what small models reach that hand on to large ones."""

import math

import numpy as np

from attnlab.compare.axes import styles
from attnlab.evals.measured import SHARE
from attnlab.experiment.results import aside, dashed, grouped, legend_beside, panels, plus_minus

BOUNDS = (SHARE, SHARE, SHARE, (0.0, math.inf))
"""Of accuracy, calibration error, coverage and the size of a set."""

SHOWN = ('max_probability', 'max_logit', 'energy', 'mahalanobis', 'vim')


def figure(rows):
    """A panel a kind of input, dots for every run of a large model; then accuracy over the cost of a cascade."""
    found = grouped(rows)
    recipes = list(dict.fromkeys(recipe for recipe, _ in found))
    looks = styles(recipes)
    kinds = list(rows[0]['other'])
    figure, axes = panels(len(kinds) + 1, width=3.6)
    for axis, kind in zip(axes, kinds, strict=False):
        for number, recipe in enumerate(recipes):
            for place, name in enumerate(SHOWN):
                values = [row['other'][kind][name] for row in found[recipe, 'large']]
                label = recipe if place == 0 else None
                shift = place + aside(number, len(recipes), 0.15)
                axis.plot([shift] * len(values), values, '.', color=looks[recipe].colour, label=label)
        dashed(axis, [0.5])
        axis.set(title=kind, ylim=(0, 1.03))
        axis.set_xticks(range(len(SHOWN)), [name.replace('_', ' ') for name in SHOWN], rotation=40, ha='right')
    axes[0].set_ylabel('a digit scores above, probability')
    for recipe in recipes:
        cascades = [row['cascade'] for row in found[recipe, 'large']]
        cost = np.mean([each['cost'] for each in cascades], axis=0)
        for name, style in (('accuracy', '-'), ('by_chance', ':')):
            axes[-1].plot(cost, np.mean([each[name] for each in cascades], axis=0), style, color=looks[recipe].colour)
    axes[-1].set(title='handed on, from none to all', xlabel='cost, of the large model alone', ylabel='accuracy')
    legend_beside(figure, axes[0])
    return figure


def table(rows):
    """A line a recipe and model."""
    kinds = list(rows[0]['other'])
    lines = [
        [
            'recipe',
            'model',
            'accuracy',
            'calibration error',
            'coverage',
            'mean size',
            *(f'{kind}: best score' for kind in kinds),
            'seeds',
        ]
    ]
    for (recipe, model), seeds in grouped(rows).items():
        numbers = [
            [row['accuracy'] for row in seeds],
            [row['error'] for row in seeds],
            [row['conformal']['coverage'] for row in seeds],
            [row['conformal']['mean size'] for row in seeds],
        ]
        cells = [plus_minus(values, 3, bounds=bounds) for values, bounds in zip(numbers, BOUNDS, strict=True)]
        lines.append([recipe, model, *cells, *(best(seeds, kind) for kind in kinds), f'{len(seeds)}'])
    return lines


def best(seeds, kind):
    """The score that tells a kind of input apart best in the mean over seeds, and how well."""
    names = [name for name in seeds[0]['other'][kind] if name != 'accuracy']
    values = {name: [row['other'][kind][name] for row in seeds] for name in names}
    name = max(names, key=lambda name: np.mean(values[name]))
    return f'{plus_minus(values[name], 3, bounds=SHARE)} ({name.replace("_", " ")})'
