"""Sinks, outliers and sparsity by map, and what few bits cost."""

from attnlab.experiment.results import least_first, panels

NUMBERS = {
    'sink_rate': 'sink rate',
    'kurtosis': 'kurtosis, mean of layers',
    'max_abs': 'largest activation',
    'sparsity': 'weights exactly zero',
}


def figure(rows):
    """A panel of bars a number, and one of the loss that rounding adds."""
    figure, axes = panels(len(NUMBERS) + 1, width=2.9, height=3)
    names = [row['label'].replace('_', ' ') for row in rows]
    places = range(len(rows))
    for axis, (name, title) in zip(axes, NUMBERS.items(), strict=False):
        axis.barh(places, [row[name] for row in rows], color='C0', height=0.7)
        axis.set(title=title, xlim=(0, max(0.1, 1.05 * max(row[name] for row in rows))))
    for bits, color in ((8, 'C2'), (6, 'C1'), (4, 'C3')):
        added = [row['loss_by_bits'][str(bits)] - row['loss_by_bits']['32'] for row in rows]
        axes[-1].plot(added, places, 'o', color=color, label=f'{bits} bits')
    axes[-1].set(title='nats added by rounding')
    axes[-1].set_xscale('symlog', linthresh=0.01)
    axes[-1].legend(frameon=False, loc='upper left', bbox_to_anchor=(1, 1))
    for axis in axes:
        axis.set(yticks=places, yticklabels=names if axis is axes[0] else [], ylim=(len(rows) - 0.4, -0.6))
    return figure


def table(rows):
    """A line a map, the lowest loss first."""
    heading = ['map', 'loss', *NUMBERS.values(), '8 bits', '6 bits', '4 bits']
    ordered = sorted(rows, key=lambda row: least_first(row['loss']))
    return [heading, *(_line(row) for row in ordered)]


def _line(row):
    losses = row['loss_by_bits']
    rounded = [f'{losses[bits] - losses["32"]:+.4f}' for bits in ('8', '6', '4')]
    return [
        row['label'],
        f'{row["loss"]:.4f}',
        f'{row["sink_rate"]:.2f}',
        f'{row["kurtosis"]:.2f}',
        f'{row["max_abs"]:.1f}',
        f'{row["sparsity"]:.3f}',
        *rounded,
    ]
