"""Losses of all maps, sorted, with their confidence intervals."""

import numpy as np

from attnlab.evals.measured import of_seeds
from attnlab.experiment.results import grouped, least_first, panels, plus_minus

SOFTMAX = 'mha'


def figure(rows):
    """A point a map; dots are seeds."""
    found = by_map(rows)
    figure, (axis,) = panels(1, width=7, height=0.24 * len(found) + 1)
    for place, (name, seeds) in enumerate(found.items()):
        losses = [seed['loss'] for seed in seeds]
        measured = of_seeds(losses)
        colour = 'C3' if name == SOFTMAX else 'C0'
        axis.errorbar(measured.mean, place, xerr=measured.half_width, fmt='o', color=colour, capsize=2)
        axis.plot(losses, [place] * len(losses), '.', color='0.4', ms=3)
    best = np.mean([seed['loss'] for seed in found[SOFTMAX]]) if SOFTMAX in found else None
    if best is not None:
        axis.axvline(best, color='C3', lw=1, ls=':')
    axis.set(xlabel='nats per byte on held-out text', ylim=(len(found) - 0.4, -0.6))
    axis.set(yticks=range(len(found)), yticklabels=[name.replace('_', ' ') for name in found])
    return figure


def table(rows):
    """A line a map, the lowest loss first."""
    heading = ['map', 'nats/byte', 'seeds', 'tokens/s', 'state bytes', 'parameters']
    return [heading, *(_line(name, seeds) for name, seeds in by_map(rows).items())]


def by_map(rows):
    """The seeds of every map, the lowest mean loss first."""
    return dict(sorted(grouped(rows).items(), key=lambda item: least_first(np.mean([row['loss'] for row in item[1]]))))


def _line(name, seeds):
    speed = np.median([seed['tokens_per_second'] for seed in seeds])
    state = next(iter(seeds[0]['state_bytes_per_sequence'].values()))
    return [
        name,
        plus_minus([seed['loss'] for seed in seeds], 4),
        f'{len(seeds)}',
        f'{speed:,.0f}',
        f'{state:,}',
        f'{seeds[0]["parameters"]:,}',
    ]
