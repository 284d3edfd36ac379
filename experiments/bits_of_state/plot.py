"""Additional loss by number of bits: a panel for weights, one for inputs, one for states."""

import numpy as np

from attnlab.compare.axes import styles
from attnlab.experiment.results import grouped, legend_beside, panels, plus_minus

LEAST = 1e-4
"""Nats below which a point is drawn at the foot of a panel: rounding also takes a little off by chance."""


def figure(rows):
    """A curve a recipe, the mean of the seeds."""
    found = grouped(rows)
    looks = styles(list(found))
    kinds = list(rows[0]['more'])
    # As high as the names of all recipes.
    figure, axes = panels(len(kinds), height=max(3.4, 0.28 * len(found)))
    for axis, what in zip(axes, kinds, strict=True):
        for recipe, seeds in found.items():
            points = [
                # A loss that is no number has no point.
                (int(bits), np.maximum(LEAST, np.mean(of(seeds, 'more', what, bits))))
                for bits in seeds[0]['more'][what]
            ]
            look = looks[recipe]
            axis.plot(*zip(*points, strict=True), marker=look.marker, color=look.colour, label=recipe)
        axis.set(title=what, xlabel='bits', yscale='log')
        axis.invert_xaxis()
    axes[0].set_ylabel(f'additional loss, nats per byte (at least {LEAST:g})')
    legend_beside(figure, axes[0])
    return figure


def table(rows):
    """A line a recipe and what is rounded; then how much more of it there is late in a window, at four bits."""
    bits = list(rows[0]['more']['state'])
    lines = [['recipe', 'nats/byte', 'rounded', *(f'{each} bits' for each in bits), 'later, 4 bits', 'seeds']]
    for recipe, seeds in grouped(rows).items():
        loss = plus_minus([seed['loss'] for seed in seeds], 3)
        for what in seeds[0]['more']:
            cells = [plus_minus(of(seeds, 'more', what, each), 3) for each in bits]
            later = plus_minus(of(seeds, 'late', what, '4'), 3)
            lines.append([recipe, loss, what, *cells, later, f'{len(seeds)}'])
    return lines


def of(seeds, name, what, bits):
    """A number of every seed, `nan` where it is missing."""
    return np.array([seed[name][what][bits] for seed in seeds], np.float64).tolist()
