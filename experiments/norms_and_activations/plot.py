"""For every norm and activation, at its best rate: loss, largest number, and what eight bits cost."""

import math

import numpy as np

from attnlab.experiment.results import grouped, least_first, named_parts, panels

SHOWN = {
    'loss': ('loss, nats per byte', '.3f'),
    'largest': ('largest number of the stream', '.1f'),
    'more_with_8_bits': ('loss added by 8 bits', '.4f'),
}
"""What is drawn: its title, and how a cell says it."""


def figure(rows):
    """A panel a measure, norms by activations; where all rates failed, a cell is empty."""
    best = at_best(rows)
    norms, activations = (list(dict.fromkeys(key[place] for key in best)) for place in (0, 1))
    figure, axes = panels(len(SHOWN), width=4.6, height=3.0)
    for axis, (name, (title, form)) in zip(axes, SHOWN.items(), strict=True):
        values = np.array(
            [[best[norm, each][name] if (norm, each) in best else math.nan for each in activations] for norm in norms]
        )
        axis.imshow(values, aspect='auto', cmap='viridis_r')
        axis.grid(visible=False)
        axis.set_xticks(range(len(activations)), activations, rotation=60, ha='right', fontsize='small')
        axis.set_yticks(range(len(norms)), norms, fontsize='small')
        axis.set_title(title, fontsize='small')
        middle = np.nanmedian(values)
        for row, column in np.ndindex(*values.shape):
            if not math.isnan(value := values[row, column]):
                colour = 'white' if value > middle else 'black'
                axis.text(column, row, format(value, form), ha='center', va='center', fontsize='xx-small', color=colour)
    return figure


def table(rows):
    """A line a norm and activation: the losses at every rate, then the rest at the best of them."""
    rates = list(dict.fromkeys(named_parts(row)[-1] for row in rows))
    found = by_pair(rows)
    lines = [['norm', 'activation', *(f'loss, {rate} rate' for rate in rates), 'largest', 'kurtosis', '8 bits add']]
    for (norm, activation), best in at_best(rows).items():
        losses = [found[norm, activation].get(rate) for rate in rates]
        cells = ['failed' if each is None else f'{each["loss"]:.4f}' for each in losses]
        rest = [f'{best["largest"]:.1f}', f'{best["kurtosis"]:.1f}', f'{best["more_with_8_bits"]:+.4f}']
        lines.append([norm, activation, *cells, *rest])
    return lines


def at_best(rows):
    """The run with the least loss of every norm and activation."""
    return {key: min(rates.values(), key=lambda row: least_first(row['loss'])) for key, rates in by_pair(rows).items()}


def by_pair(rows):
    """The runs by norm and activation, then by rate."""
    return {key: {named_parts(row)[-1]: row for row in runs} for key, runs in grouped(rows).items()}
