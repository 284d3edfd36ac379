"""Accuracy on sums shown and not shown, and the share of sums whose loss has collapsed, over steps."""

from attnlab.experiment.results import legend_beside, panels

KNOWN = 0.95
"""The accuracy from which sums count as known."""


def figure(rows):
    """A panel each for the accuracies, the collapse, and the loss on the sums shown."""
    figure, axes = panels(3)
    for row in rows:
        curves, label = row['curves'], row['label'].replace('_', ' ')
        (line,) = axes[0].plot(*zip(*curves['test/accuracy'], strict=True), label=label)
        axes[0].plot(*zip(*curves['train/accuracy'], strict=True), color=line.get_color(), ls=':', lw=1)
        axes[1].plot(*zip(*curves['train/collapsed'], strict=True), color=line.get_color())
        axes[2].plot(*zip(*curves['train/loss'], strict=True), color=line.get_color())
    axes[0].set(xlabel='step', ylabel='accuracy', title='sums not shown (dotted: shown)', xscale='log', ylim=(0, 1.02))
    axes[1].set(xlabel='step', ylabel='share of the sums shown', title='collapsed: no gradient to the right class')
    axes[1].set(xscale='log', ylim=(-0.02, 1.02))
    axes[2].set(xlabel='step', ylabel='nats', title='training loss', xscale='log', yscale='log')
    legend_beside(figure, axes[0])
    return figure


def table(rows):
    """A line a method; of the shares of silent sums the greatest and the last."""
    heading = [
        'method',
        f'shown, {KNOWN:.0%} right at step',
        f'others, {KNOWN:.0%} right at step',
        'others right in the end',
    ]
    return [[*heading, 'collapsed', 'vanished'], *(_line(row['label'], row['curves']) for row in rows)]


def _line(label, curves):
    shown, others = (_known(curves[f'{split}/accuracy']) for split in ('train', 'test'))
    silent = ([share for _, share in curves[f'train/{name}']] for name in ('collapsed', 'vanished'))
    shares = (f'{max(each):.3f}, {each[-1]:.3f}' for each in silent)
    return [label.replace('_', ' '), shown, others, f'{curves["test/accuracy"][-1][1]:.4f}', *shares]


def _known(curve):
    return next((str(step) for step, value in curve if value >= KNOWN), 'never')
