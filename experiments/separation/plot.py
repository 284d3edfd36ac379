"""Improvement of the separated sources over the frames that a separator sees, at the rate that validation chose."""

import numpy as np

from attnlab.compare.axes import styles
from attnlab.experiment.results import at_best_rate, legend_beside, panels, plus_minus, rate_of


def figure(rows):
    """Dots are seeds; a line joins convolutions that differ in dilations alone; dashed: an oracle's masks."""
    found = chosen(rows)
    alone = [system for system in found if not system.startswith('tcn')]
    looks = styles(['dilations', *alone])
    figure, (axis,) = panels(1, width=6.0, height=4.0)
    cycles = sorted((system for system in found if system not in alone), key=lambda system: frames(found[system]))
    for label, systems in (('dilations', cycles), *((system, [system]) for system in alone)):
        means = [np.mean([row['test_gain'] for row in found[system]]) for system in systems]
        # What sees everything stands side by side.
        aside = 1.0 if systems == cycles else 1.03 ** (1 + alone.index(label))
        places = [frames(found[system]) * aside for system in systems]
        axis.plot(places, means, 'o-' if systems == cycles else 's', color=looks[label].colour, label=label)
        for place, system in zip(places, systems, strict=True):
            axis.plot(
                [place] * len(found[system]),
                [row['test_gain'] for row in found[system]],
                '.',
                color=looks[label].colour,
            )
    axis.axhline(next(iter(found.values()))[0]['ideal_mask'], ls='--', color='0.5', lw=0.9, label='ideal mask')
    axis.set(xscale='log', xlabel='frames that the last one sees', ylabel='improvement on test, dB')
    seen = sorted({frames(seeds) for seeds in found.values()})
    axis.set_xticks(seen, [f'{count}' for count in seen])
    axis.set_xticks([], minor=True)
    legend_beside(figure, axis, fontsize='small')
    return figure


def table(rows):
    """A line a separator, then the oracle."""
    lines = [['separator', 'frames seen', 'parameters', 'rate', 'improvement, dB', 'seeds', 'seconds a run']]
    found = chosen(rows)
    for system, seeds in found.items():
        gain = plus_minus([row['test_gain'] for row in seeds], 2)
        seconds = np.mean([row['seconds'] for row in seeds])
        size = f'{seeds[0]["parameters"]:,}'
        lines.append([system, f'{frames(seeds)}', size, rate_of(seeds[0]), gain, f'{len(seeds)}', f'{seconds:.0f}'])
    oracle = next(iter(found.values()))[0]['ideal_mask']
    return [*lines, ['(ideal mask)', '', '', '', f'{oracle:.2f}', '', '']]


def frames(seeds):
    """That all seeds of a separator see."""
    return seeds[0]['frames']


def chosen(rows):
    """The runs of every separator at the rate with the greatest mean improvement on validation."""
    return at_best_rate(rows, lambda row: row['valid_gain'], highest=True)
