"""The accuracy of heads on frequent, middle and rare classes, and what a call of each costs."""

import numpy as np

from attnlab.compare.axes import styles
from attnlab.evals.measured import SHARE
from attnlab.experiment.results import at_best_rate, legend_beside, named_parts, panels, plus_minus, rate_of
from attnlab.tasks.many_classes import BANDS

COSTS = {'milliseconds': 1, 'of_softmax': 2, 'temporary_mib': 1}
"""What a call costs, and the digits that are shown."""


def figure(rows):
    """Accuracy by how frequent classes are, a line a head, that of the best guess dashed; then time and memory."""
    found, costs = best(rows), by_head(rows)
    looks = styles(list(found))
    shown, (accuracy, cost) = panels(2)
    for head, seeds in found.items():
        means = [np.mean([row['accuracy'][band] for row in seeds]) for band in BANDS]
        accuracy.plot(BANDS, means, marker='o', color=looks[head].colour, label=head.replace('_', ' '))
        if head in costs:
            cost.plot(costs[head]['of_softmax'], costs[head]['temporary_mib'], 'o', color=looks[head].colour)
    guesses = [row['best'] for row in rows if 'best' in row]
    limits = [np.mean([each['accuracy'][band] for each in guesses]) for band in BANDS]
    accuracy.plot(BANDS, limits, color='0.4', ls='--', label='the best guess')
    accuracy.set(title='accuracy, best rate', ylim=(0, 1))
    cost.set(title='a call of the objective', xlabel='time, over that of softmax', ylabel='temporaries, MiB')
    cost.set(xscale='log', yscale='log')
    legend_beside(shown, accuracy)
    return shown


def table(rows):
    """A line a head, at its best rate, and one of the best guess."""
    bands = [f'accuracy, {band}' for band in BANDS]
    lines = [['head', 'rate', 'loss', 'loss, rare', 'accuracy', *bands, 'ms a call', 'of softmax', 'MiB a call']]
    lines[0] += ['seeds']
    costs = by_head(rows)
    for head, seeds in best(rows).items():
        losses = [[row['loss'][part] for row in seeds] for part in ('all', 'rare')]
        accuracies = [[row['accuracy'][part] for row in seeds] for part in ('all', *BANDS)]
        lines.append(
            [
                head.replace('_', ' '),
                rate_of(seeds[0]),
                *(plus_minus(values, 3) for values in losses),
                *(plus_minus(values, 3, bounds=SHARE) for values in accuracies),
                *(f'{costs[head][name]:.{digits}f}' if head in costs else '' for name, digits in COSTS.items()),
                f'{len(seeds)}',
            ]
        )
    seeds = [row['best'] for row in rows if 'best' in row]
    losses = [[each['loss'][part] for each in seeds] for part in ('all', 'rare')]
    accuracies = [[each['accuracy'][part] for each in seeds] for part in ('all', *BANDS)]
    cells = [plus_minus(values, 3) for values in losses]
    cells += [plus_minus(values, 3, bounds=SHARE) for values in accuracies]
    lines.append(['the best guess', '', *cells, *[''] * len(COSTS), f'{len(seeds)}'])
    return lines


def by_head(rows):
    """What a call of each head costs, which was measured once."""
    return {named_parts(row)[0]: row['head'] for row in rows if 'head' in row}


def best(rows):
    """The seeds of every head at the rate with the best accuracy on the validation split."""
    return at_best_rate(rows, lambda row: row['chosen_by'], highest=True)
