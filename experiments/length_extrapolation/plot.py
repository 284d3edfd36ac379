"""Bits per byte over the length of the window, and nats over the position in the longest."""

from attnlab.analysis.experiment import panels

TRAINED = 256


def figure(rows):
    """A panel each."""
    figure, axes = panels(2, width=5)
    for row in rows:
        label = row['label'].replace('_', ' ')
        for axis, name in zip(axes, ('bits_per_byte', 'by_position'), strict=True):
            axis.plot(list(map(int, row[name])), list(row[name].values()), marker='o', ms=3, label=label)
    for axis in axes:
        axis.axvline(TRAINED, color='0.6', lw=1, ls=':')
        axis.set_xscale('log', base=2)
    axes[0].set(xlabel='bytes in the window (dotted: trained on)', ylabel='bits per byte')
    axes[1].set(xlabel='position in a window of 8192, up to', ylabel='nats per byte')
    axes[0].legend(frameon=False)
    return figure


def table(rows):
    """A line a recipe, the best at the longest first: bits per byte."""
    lengths = list(rows[0]['bits_per_byte'])
    ordered = sorted(rows, key=lambda row: row['bits_per_byte'][lengths[-1]])
    lines = [[row['label'], *(f'{row["bits_per_byte"][length]:.3f}' for length in lengths)] for row in ordered]
    return [['bits per byte at', *lengths], *lines]
