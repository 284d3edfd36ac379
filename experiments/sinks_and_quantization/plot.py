"""Sinks and what rounding costs: over the size of the model, and by map at one size."""

import numpy as np

from attnlab.experiment.results import grouped, panels, plus_minus

NUMBERS = {
    'sink_rate': 'sink rate',
    'highest_sink_rate': 'highest layer',
    'kurtosis': 'kurtosis',
    'max_abs': 'largest activation',
}
BITS = ('8', '6', '4')


def figure(rows):
    """A panel a number over the parameters of `mha`, a dot a seed, other maps beside; and what rounding adds."""
    found = grouped(rows)
    figure, axes = panels(len(NUMBERS) + 1, width=3, height=3)
    for number, (recipe, _) in enumerate(found):
        seeds = found[recipe, _]
        sizes = [row['parameters'] for row in seeds]
        colour = 'k' if recipe == 'mha' else f'C{number}'
        for axis, name in zip(axes, NUMBERS, strict=False):
            axis.plot(
                sizes, [row[name] for row in seeds], '.', color=colour, label=recipe if name == 'sink_rate' else None
            )
        for bits, mark in zip(BITS, ('.', 'x', '+'), strict=True):
            axes[-1].plot(sizes, [added(row, bits) for row in seeds], mark, color=colour)
    for axis, title in zip(axes, [*NUMBERS.values(), 'nats added by few bits'], strict=True):
        axis.set(title=title, xlabel='parameters', xscale='log')
    axes[-1].set_yscale('symlog', linthresh=0.01)
    axes[-1].set_ylabel('8 bits: .   6 bits: x   4 bits: +')
    handles, labels = axes[0].get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    axes[0].legend(once.values(), once.keys(), frameon=False, fontsize=7)
    return figure


def table(rows):
    """A line a map and size."""
    lines = [['map', 'size', 'parameters', 'loss', *NUMBERS.values(), *(f'{bits} bits' for bits in BITS), 'seeds']]
    for (recipe, size), seeds in grouped(rows).items():
        numbers = [[row[name] for row in seeds] for name in ('loss', *NUMBERS)]
        costs = [[added(row, bits) for row in seeds] for bits in BITS]
        cells = [plus_minus(values, 3) for values in (*numbers, *costs)]
        lines.append([recipe, size, f'{seeds[0]["parameters"]:,}', *cells, f'{len(seeds)}'])
    return lines


def added(row, bits):
    """The nats that so many bits add."""
    return float(np.float64(row['loss_by_bits'][bits]) - row['loss_by_bits']['32'])
