"""Bits per byte over the length of the window, and nats over the position in the longest."""

from attnlab.experiment.results import least_first, legend_beside, panels

TRAINED = 256
REFERENCE = 'sliding_window'
"""What cannot lose by length; the text itself is harder here and there."""


def figure(rows):
    """A panel each."""
    figure, axes = panels(2, width=5)
    reference = next((row['by_position'] for row in rows if row['label'] == REFERENCE), None)
    for row in rows:
        label, lengths, positions = row['label'].replace('_', ' '), row['bits_per_byte'], row['by_position']
        axes[0].plot(list(map(int, lengths)), list(lengths.values()), marker='o', ms=3, label=label)
        if reference is not None:
            more = [positions[end] - reference[end] for end in positions]
            axes[1].plot(list(map(int, positions)), more, marker='o', ms=3)
    for axis in axes:
        axis.axvline(TRAINED, color='0.6', lw=1, ls=':')
        axis.set_xscale('log', base=2)
    axes[0].set(xlabel='bytes in the window (dotted: trained on)', ylabel='bits per byte')
    axes[1].set(xlabel='position in a window of 8192, up to', ylabel='nats less those of the window')
    legend_beside(figure, axes[0])
    return figure


def table(rows):
    """A line a recipe, the best at the longest first: bits per byte."""
    lengths = list(rows[0]['bits_per_byte'])
    ordered = sorted(rows, key=lambda row: least_first(row['bits_per_byte'][lengths[-1]]))
    lines = [[row['label'], *(f'{row["bits_per_byte"][length]:.3f}' for length in lengths)] for row in ordered]
    return [['bits per byte at', *lengths], *lines]
