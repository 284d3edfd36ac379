"""The accuracy of every loss on rare classes, over all, and how far its confidence is from its accuracy."""

import numpy as np

from attnlab.evals.measured import SHARE
from attnlab.experiment.results import at_best_rate, panels, plus_minus, rate_of

SHOWN = {
    'accuracy': 'accuracy, all classes',
    'tail': 'accuracy, the three rarest',
    'calibration': 'calibration error',
}


def figure(rows):
    """A panel a measure, a row a loss, a dot a seed."""
    found = best(rows)
    shown, axes = panels(len(SHOWN), width=3.4, height=4.6)
    for axis, (name, title) in zip(axes, SHOWN.items(), strict=True):
        for place, seeds in enumerate(found.values()):
            values = [row[name] for row in seeds]
            axis.plot(values, [place] * len(values), '.', color='C0', alpha=0.6)
            axis.plot([np.mean(values)], [place], '|', color='k', ms=12)
        axis.set(title=title, xlim=(0, None))
        axis.set_yticks(range(len(found)), [''] * len(found))
    axes[0].set_yticks(range(len(found)), [head.replace('_', ' ') for head in found])
    return shown


def table(rows):
    """A line a loss, at its best rate."""
    lines = [['loss', 'rate', 'accuracy', 'the three rarest', 'the three most frequent', 'calibration error']]
    lines[0] += ['cross-entropy', 'seeds']
    for head, seeds in best(rows).items():
        names = ('accuracy', 'tail', 'common', 'calibration', 'loss')
        bounds = {name: SHARE for name in names if name != 'loss'}
        cells = [
            plus_minus([row[name] for row in seeds], 3, bounds=bounds.get(name, (-np.inf, np.inf))) for name in names
        ]
        lines.append([head.replace('_', ' '), rate_of(seeds[0]), *cells, f'{len(seeds)}'])
    return lines


def best(rows):
    """The seeds of every loss at the rate with the best accuracy on the validation split."""
    return at_best_rate(rows, lambda row: row['chosen_by'], highest=True)
