"""The accuracy of heads on frequent, middle and rare classes, and what a call of each costs."""

import numpy as np

from attnlab.compare.axes import styles
from attnlab.experiment.results import panels, plus_minus
from attnlab.tasks.many_classes import BANDS


def figure(rows):
    """Accuracy by how frequent classes are, a line a head, that of the best guess dashed; then time and memory."""
    found, costs = best(rows), by_head(rows)
    looks = styles(list(found))
    shown, (accuracy, cost) = panels(2)
    for head, seeds in found.items():
        means = [np.mean([row['accuracy'][band] for row in seeds]) for band in BANDS]
        accuracy.plot(BANDS, means, marker='o', color=looks[head].colour, label=head.replace('_', ' '))
        if head in costs:
            cost.plot(*costs[head].values(), 'o', color=looks[head].colour)
    guesses = [row['best'] for row in rows if 'best' in row]
    limits = [np.mean([each['accuracy'][band] for each in guesses]) for band in BANDS]
    accuracy.plot(BANDS, limits, color='0.4', ls='--', label='the best guess')
    accuracy.set(title='accuracy, best rate', ylim=(0, 1))
    cost.set(title="the head's objective and gradients", xlabel='milliseconds', ylabel='temporaries, MiB')
    cost.set(xscale='log', yscale='log')
    shown.legend(*accuracy.get_legend_handles_labels(), frameon=False, loc='outside right upper')
    return shown


def table(rows):
    """A line a head, at its best rate, and one of the best guess."""
    bands = [f'accuracy, {band}' for band in BANDS]
    lines = [['head', 'rate', 'loss', 'loss, rare', 'accuracy', *bands, 'ms a call', 'MiB a call', 'seeds']]
    costs = by_head(rows)
    for head, seeds in best(rows).items():
        losses = [[row['loss'][part] for row in seeds] for part in ('all', 'rare')]
        accuracies = [[row['accuracy'][part] for row in seeds] for part in ('all', *BANDS)]
        lines.append(
            [
                head.replace('_', ' '),
                seeds[0]['label'].split('-')[1],
                *(plus_minus(values, 3) for values in (*losses, *accuracies)),
                *(f'{value:.1f}' for value in costs[head].values()),
                f'{len(seeds)}',
            ]
        )
    seeds = [row['best'] for row in rows if 'best' in row]
    losses = [[each['loss'][part] for each in seeds] for part in ('all', 'rare')]
    accuracies = [[each['accuracy'][part] for each in seeds] for part in ('all', *BANDS)]
    cells = [plus_minus(values, 3) for values in (*losses, *accuracies)]
    lines.append(['the best guess', '', *cells, '', '', f'{len(seeds)}'])
    return lines


def by_head(rows):
    """What a call of each head costs, which was measured once."""
    return {row['label'].split('-')[0]: row['head'] for row in rows if 'head' in row}


def best(rows):
    """The seeds of every head at the rate with the best accuracy on the validation split."""
    found = {}
    for row in rows:
        head, rate, _ = row['label'].split('-')
        found.setdefault(head, {}).setdefault(rate, []).append(row)
    return {
        head: max(rates.values(), key=lambda seeds: np.mean([row['chosen_by'] for row in seeds]))
        for head, rates in found.items()
    }
