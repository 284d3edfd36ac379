"""Errors on test by normalisation of the window, at the rate that validation chose: a panel a change."""

import numpy as np

from attnlab.compare.axes import styles
from attnlab.experiment.results import aside, at_best_rate, legend_beside, panels, plus_minus, rate_of, seeds_on_line


def figure(rows):
    """Dots are seeds, lines their means from norm to norm; dashed: the best that needs no training."""
    found = chosen(rows)
    changes, models, norms = (list(dict.fromkeys(key[place] for key in found)) for place in range(3))
    looks = styles(models)
    figure, axes = panels(len(changes), width=3.4)
    for axis, change in zip(axes, changes, strict=True):
        for number, model in enumerate(models):
            there = [norm for norm in norms if (change, model, norm) in found]
            seeds = [[row['test_mse'] for row in found[change, model, norm]] for norm in there]
            places = np.array([norms.index(norm) for norm in there]) + aside(number, len(models), 0.06)
            seeds_on_line(axis, places, seeds, looks[model].colour, model)
        name, value = least(next(seeds for key, seeds in found.items() if key[0] == change)[0]['baselines'])
        axis.axhline(value, ls='--', color='0.5', lw=0.9)
        axis.set(title=f'{change}\n(dashed: {name.replace("_", " ")})', yscale='log', xlim=(-0.4, len(norms) - 0.6))
        axis.set_xticks(range(len(norms)), [norm.replace('_', ' ') for norm in norms], fontsize='small')
    axes[0].set_ylabel('mean squared error on test')
    legend_beside(figure, axes[0])
    return figure


def table(rows):
    """A line a change and model, a column a norm; then the baselines of each change."""
    found = chosen(rows)
    changes, models, norms = (list(dict.fromkeys(key[place] for key in found)) for place in range(3))
    lines = [['change', 'model', *(f'norm={norm}' for norm in norms), 'rates', 'seeds']]
    for change in changes:
        for model in models:
            groups = {norm: found[change, model, norm] for norm in norms if (change, model, norm) in found}
            errors = [plus_minus([row['test_mse'] for row in groups[n]], 4) if n in groups else '' for n in norms]
            rates = ', '.join(rate_of(seeds[0]) for seeds in groups.values())
            counts = sorted({len(seeds) for seeds in groups.values()})
            if groups:
                lines.append([change, model, *errors, rates, ', '.join(map(str, counts))])
        first = next(seeds for key, seeds in found.items() if key[0] == change)[0]
        for name, value in first['baselines'].items():
            lines.append([change, f'({name.replace("_", " ")})', f'{value:.4f}', *[''] * (len(norms) + 1)])
    return lines


def least(values):
    """The name and the number of the best baseline."""
    return min(values.items(), key=lambda item: item[1])


def chosen(rows):
    """The runs of every change, model and norm at the rate with the least mean error on validation."""
    return at_best_rate(rows, lambda row: row['valid_mse'])
