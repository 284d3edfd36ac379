"""Accuracy by size of the images: positions, mixers, and a reduction that is raised after training."""

import numpy as np

from attnlab.compare.axes import styles
from attnlab.evals.measured import SHARE
from attnlab.experiment.results import at_best_rate, panels, plus_minus, rate_of

PANELS = {
    'positions of attention': ('learned', 'sinusoidal', 'without', 'axial_rope'),
    'mixers': ('learned', 'pvt', 'embedding_free', 'fasa', 'swin', 'neighbourhood', 'vmamba'),
}
SEEN = ('learned', 'axial_rope', 'pvt', 'swin', 'neighbourhood', 'vmamba')
"""Models of which pictures are kept: one of every way of seeing, and positions of two kinds."""

DASHES = ('-', '--', ':')


def figure(rows):
    """Means over seeds at the better rate; dashed and dotted are other ways of carrying the same model over."""
    chosen = better(rows)
    figure, axes = panels(len(PANELS) + 1, width=5.2)
    for axis, (title, names) in zip(axes, PANELS.items(), strict=False):
        looks = styles(names)
        for name in names:
            look = looks[name]
            for way, dash in zip(ways(chosen[name]), DASHES, strict=False):
                if not way.startswith('factor'):
                    label = name if way == 'as it is' else f'{name}, {way}'
                    axis.plot(*curve(chosen[name], way), dash, color=look.colour, marker=look.marker, ms=4, label=label)
        axis.set(title=title, xlabel='pixels on a side', ylabel='accuracy', ylim=(0, 1.03))
        # Room for the legend beside the largest.
        axis.set_xlim(right=1.46 * axis.dataLim.x1)
        axis.legend(frameon=False, fontsize=7, loc='right')
    last = chosen['embedding_free']
    for way, dash in zip(ways(last), DASHES, strict=False):
        axes[-1].plot(*curve(last, way), dash, color='C0', marker='.', label=way)
    axes[-1].set(
        title='embedding_free, reduction after training', xlabel='pixels on a side', ylabel='accuracy', ylim=(0, 1.03)
    )
    axes[-1].legend(frameon=False, fontsize=7)
    return figure


def table(rows):
    """A line a model and way of carrying it over."""
    chosen = better(rows)
    sizes = list(next(iter(chosen.values()))[0]['accuracy']['as it is'])
    lines = [['model', 'carried over', 'rate', *(f'{size} pixels' for size in sizes), 'seeds']]
    for name, seeds in chosen.items():
        for way in ways(seeds):
            values = [[seed['accuracy'][way][size] for seed in seeds] for size in sizes]
            cells = ['' if None in each else plus_minus(each, 3, bounds=SHARE) for each in values]
            lines.append([name, way, rate_of(seeds[0]), *cells, f'{len(seeds)}'])
    return lines


def pictures(rows):
    """What the token in the middle has seen in the first seed at the better rate, as in training and at the largest."""
    chosen = better(rows)
    sizes = list(chosen['learned'][0]['accuracy']['as it is'])
    return {
        f'{name}-{size}': f'{chosen[name][0]["label"]}/seen/{size}/receptive_field.png'
        for size in (sizes[2], sizes[-1])
        for name in SEEN
    }


def ways(seeds):
    """The ways in which a model is carried over."""
    return list(seeds[0]['accuracy'])


def curve(seeds, way):
    """Sizes, and the mean accuracy over seeds."""
    found = {
        int(size): [seed['accuracy'][way][size] for seed in seeds]
        for size, value in seeds[0]['accuracy'][way].items()
        if value is not None
    }
    return list(found), [np.mean(values) for values in found.values()]


def better(rows):
    """The runs of every model at the rate that validation prefers, the mean over its seeds."""
    return at_best_rate(rows, lambda row: row['valid'], highest=True)
