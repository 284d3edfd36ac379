"""Accuracy, and the share of the weights that the largest item gets, over the number of items."""

import numpy as np

from attnlab.analysis.experiment import confidence, panels

TRAINED = 16
ADAPTIVE = 'adaptive temperature'


def figure(rows):
    """A panel each; lines are means over seeds."""
    figure, axes = panels(2, width=5)
    for name, seeds in curves(rows).items():
        dashed = '--' if name == ADAPTIVE else '-'
        for axis, metric in zip(axes, ('accuracy', 'share'), strict=True):
            items = [int(count) for count in seeds[0][metric]]
            values = np.array([list(seed[metric].values()) for seed in seeds])
            axis.plot(items, values.mean(axis=0), dashed, marker='o', ms=3, label=name)
            axis.fill_between(items, values.min(axis=0), values.max(axis=0), alpha=0.12, lw=0)
    for axis, label in zip(axes, ('accuracy', 'share of the weights on the largest item'), strict=True):
        axis.axvline(TRAINED, color='0.6', lw=1, ls=':')
        axis.set_xscale('log', base=2)
        axis.set(xlabel='items (dotted: the most trained on)', ylabel=label, ylim=(0, 1.02))
    axes[0].legend(frameon=False)
    return figure


def table(rows):
    """A line a map, the best at the most items first: accuracies with half a 95 % confidence interval over seeds."""
    found = curves(rows)
    items = list(next(iter(found.values()))[0]['accuracy'])
    heading = ['accuracy at items', *items, f'share at {items[1]}', f'share at {items[-1]}']
    lines = {
        name: [confidence([seed['accuracy'][n] for seed in seeds]) for n in items] for name, seeds in found.items()
    }
    ordered = sorted(lines, key=lambda name: -lines[name][-1][0])
    shares = {
        name: [f'{np.mean([seed["share"][n] for seed in found[name]]):.3f}' for n in (items[1], items[-1])]
        for name in found
    }
    return [
        heading,
        *([name, *(f'{m:.3f} ± {half:.3f}' for m, half in lines[name]), *shares[name]] for name in ordered),
    ]


def curves(rows):
    """By the name of the map, what was measured of each seed."""
    found = {}
    for row in rows:
        name = row['label'].rpartition('-')[0]
        found.setdefault(name, []).append(row)
        if 'adaptive' in row:
            found.setdefault(ADAPTIVE, []).append(row['adaptive'])
    return found
