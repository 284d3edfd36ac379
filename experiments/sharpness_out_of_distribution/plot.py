"""Accuracy, and the share of the weights that the largest item gets, over the number of items, with 95 % intervals."""

import numpy as np

from attnlab.data.synthetic.sets import MaxRetrieval
from attnlab.evals.measured import SHARE, of_seeds
from attnlab.experiment.results import least_first, legend_beside, named_parts, panels

TRAINED = 16
ADAPTIVE = 'adaptive temperature'
CHANCE = 1 / MaxRetrieval().classes
SETS = 1024
"""Drawn once for every number of items, and asked of all seeds and maps."""


def figure(rows):
    """A panel each; lines are means, and bands 95 % intervals, of accuracies as the table has them."""
    figure, axes = panels(2, width=5)
    for name, seeds in curves(rows).items():
        dashed = '--' if name == ADAPTIVE else '-'
        for axis, metric in zip(axes, ('accuracy', 'share'), strict=True):
            items = [int(count) for count in seeds[0][metric]]
            by_items = zip(*(seed[metric].values() for seed in seeds), strict=True)
            shown = [measured(values, metric) for values in by_items]
            axis.plot(items, [each.mean for each in shown], dashed, marker='o', ms=3, label=name)
            # One seed has no interval.
            if len(seeds) > 1:
                ends = zip(*((each.low, each.high) for each in shown), strict=True)
                axis.fill_between(items, *ends, alpha=0.12, lw=0)
    for axis, label in zip(axes, ('accuracy', 'share of weights on the largest'), strict=True):
        axis.axvline(TRAINED, color='0.6', lw=1, ls=':')
        axis.set_xscale('log', base=2)
        axis.set(xlabel='items (dotted: the most trained on)', ylabel=label, ylim=(0, 1.02))
    axes[0].axhline(CHANCE, color='0.5', lw=1, ls='--')
    axes[0].annotate('chance', (TRAINED / 4, CHANCE), (0, 3), textcoords='offset points', fontsize=8, color='0.4')
    legend_beside(figure, axes[0])
    return figure


def table(rows):
    """A line a map, the best at the most items first: accuracies with half a 95 % interval over seeds and sets."""
    found = curves(rows)
    items = list(next(iter(found.values()))[0]['accuracy'])
    heading = ['accuracy at items', *items, f'share at {items[1]}', f'share at {items[-1]}']
    means = {name: np.mean([seed['accuracy'][items[-1]] for seed in seeds]) for name, seeds in found.items()}
    ordered = sorted(found, key=lambda name: least_first(-means[name]))
    chance = ['(chance)', *[f'{CHANCE:.3f}'] * len(items), '', '']
    return [heading, *(_line(name, found[name], items) for name in ordered), chance]


def _line(name, seeds, items):
    accuracies = [measured([seed['accuracy'][count] for seed in seeds]).text(3) for count in items]
    shares = [f'{np.mean([seed["share"][count] for seed in seeds]):.3f}' for count in (items[1], items[-1])]
    return [name, *accuracies, *shares]


def measured(values, metric='accuracy'):
    """The mean over seeds with its interval, which has the noise of the sets where they are known to be that many."""
    share = np.mean(values)
    noise = (share * (1 - share) / SETS) ** 0.5 if metric == 'accuracy' else None
    return of_seeds(values, noise).within(*SHARE)


def curves(rows):
    """By the name of the map, what was measured of each seed."""
    found = {}
    for row in rows:
        name, _ = named_parts(row)
        found.setdefault(name, []).append(row)
        if 'adaptive' in row:
            found.setdefault(ADAPTIVE, []).append(row['adaptive'])
    return found
