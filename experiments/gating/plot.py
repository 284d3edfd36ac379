"""Loss of language models by gate, and the errors of planted experts and of their gates by size of the sample."""

import numpy as np

from attnlab.compare.axes import styles
from attnlab.experiment.results import at_best_rate, legend_beside, named_parts, panels, plus_minus, rate_of

LOADS = ('load', 'first_load', 'dropped', 'first_dropped')
ERRORS = ('error', 'misrouted', 'misplaced', 'excess')


def figure(rows):
    """The loss on text at each best rate; mean errors over samples, with as many experts and with twice as many."""
    texts, planted = best_texts(rows), of_planted(rows)
    shown_errors = [
        (name, fitted) for fitted in dict.fromkeys(fitted for _, fitted in planted) for name in ('error', 'misrouted')
    ]
    shown, (loss, *errors) = panels(1 + len(shown_errors))
    looks = styles([*dict.fromkeys([*texts, *(gate for gate, _ in planted)])])
    for place, (arm, seeds) in enumerate(texts.items()):
        loss.plot([place] * len(seeds), [row['loss_with_room'] for row in seeds], 'o', color=looks[arm].colour)
    loss.set_xticks(range(len(texts)), list(texts), rotation=30, ha='right')
    loss.set(title='text, best rate, room for all', ylabel='loss, nats a byte')
    for axis, (name, fitted) in zip(errors, shown_errors, strict=True):
        for (gate, count), found in planted.items():
            if count == fitted:
                means = [np.mean(values[name]) for values in found.values()]
                axis.plot(list(found), means, marker='o', color=looks[gate].colour, label=gate)
        of = {'error': 'experts', 'misrouted': 'gate'}[name]
        axis.set(title=f'{fitted} fitted to 4 planted', xlabel='points', xscale='log', yscale='log')
        axis.set_ylabel(f'error of the {of}')
    if errors:
        legend_beside(shown, errors[0])
    return shown


def table(rows):
    """A line a gate on text, and one for each number of fitted experts."""
    lines = [['problem', 'gate', 'learning rate', 'loss or error', 'loss, room for all', 'greatest load']]
    lines[0] += [
        'after a tenth',
        'dropped',
        'after a tenth',
        'rate',
        'error of the gate',
        'rate',
        'misplaced',
        'excess',
        'seeds',
    ]
    for arm, seeds in best_texts(rows).items():
        cells = [plus_minus([row[name] for row in seeds], 3) if name in seeds[0] else '' for name in LOADS]
        losses = [plus_minus([row[name] for row in seeds], 4) for name in ('loss', 'loss_with_room')]
        lines.append(['text', arm, rate_of(seeds[0]), *losses, *cells, *[''] * 5, f'{len(seeds)}'])
    for (gate, fitted), found in of_planted(rows).items():
        most = found[max(found)]
        lines.append(
            [
                f'{fitted} of 4, {max(found):,} points',
                gate,
                '',
                plus_minus(most['error'], 4),
                *[''] * (1 + len(LOADS)),
                f'{slope(found, "error"):+.2f}',
                plus_minus(most['misrouted'], 3),
                f'{slope(found, "misrouted"):+.2f}',
                *[plus_minus(most[name], 4) for name in ('misplaced', 'excess')],
                f'{len(most["error"])}',
            ]
        )
    for row in rows:
        check, gate, fitted, *_ = named_parts(row)
        if check in ('longer', 'nearer'):
            numbers = [f'{row["error"]:.4f}', *[''] * (2 + len(LOADS)), f'{row["misrouted"]:.3f}', '']
            numbers += [f'{row["misplaced"]:.4f}', f'{row["excess"]:.4f}', '1']
            lines.append([f'{fitted}, {check}', gate, '', *numbers])
    return lines


def best_texts(rows):
    """The seeds of every arm at the rate with the least mean loss."""
    texts = [row for row in rows if named_parts(row)[0] == 'text']
    return {arm: seeds for (_, arm), seeds in at_best_rate(texts, lambda row: row['loss']).items()}


def of_planted(rows):
    """By gate and number of fitted experts: by size of the sample the errors, a number a seed."""
    found = {}
    for row in rows:
        kind, *rest = named_parts(row)
        if kind == 'planted':
            gate, fitted, count, _ = rest
            numbers = found.setdefault((gate, int(fitted)), {}).setdefault(int(count), {name: [] for name in ERRORS})
            for name, values in numbers.items():
                values.append(row[name])
    return found


def slope(found, name):
    """The exponent of one of the errors in the size of the sample, fitted to the logarithms of all seeds."""
    points = [(count, error) for count, numbers in found.items() for error in numbers[name]]
    sizes, errors = np.log(np.array(points, np.float64).T)
    return np.polyfit(sizes, errors, 1)[0] if len(set(sizes)) > 1 else float('nan')
