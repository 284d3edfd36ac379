"""What a judge says of drawn images over the speed of drawing, and over the share of keys that attention reads."""

import math

import numpy as np
from matplotlib.ticker import LogLocator

from attnlab.compare.axes import styles
from attnlab.evals.measured import SHARE
from attnlab.experiment.results import at_best_rate, panels, plus_minus, rate_of

BOUNDS = {'accuracy': SHARE} | dict.fromkeys(('score', 'deviation_error', 'distance'), (0.0, math.inf))


def figure(rows):
    """Means over seeds at the better rate: a point a number of steps; then attention by the share of keys it reads."""
    chosen = better(rows)
    looks = styles(list(chosen))
    figure, axes = panels(3)
    for name, seeds in chosen.items():
        points = [
            [np.mean([seed['drawn'][steps][what] for seed in seeds]) for what in ('tokens_per_second', 'accuracy')]
            for steps in seeds[0]['drawn']
        ]
        # Tokens of an image are read once a step, so that fewer steps draw it sooner.
        images = [speed / int(steps) for (speed, _), steps in zip(points, seeds[0]['drawn'], strict=True)]
        axes[0].plot(images, [accuracy for _, accuracy in points], marker='o', color=looks[name].colour, label=name)
    axes[0].set(xlabel='tokens of finished images a second', ylabel='label asked for is found', xscale='log')
    # Less than two decades: as many labels as there is room for.
    axes[0].xaxis.set(major_locator=LogLocator(subs=(1, 2, 5)), major_formatter='{x:,.0f}')
    axes[0].minorticks_off()
    axes[0].set_title(f'{", ".join(next(iter(chosen.values()))[0]["drawn"])} steps')
    axes[0].legend(frameon=False)
    for axis, what in zip(axes[1:], ('distance', 'accuracy'), strict=True):
        for name, seeds in chosen.items():
            for kept in seeds[0].get('reused', {}):
                shares = list(seeds[0]['reused'][kept])
                values = [np.mean([seed['reused'][kept][share][what] for seed in seeds]) for share in shares]
                axis.plot([float(share) for share in shares], values, marker='o', label=f'{name}, kept: {kept}')
        axis.set(xlabel='share of keys', xscale='log', ylim=(0, None))
        axis.set_xticks([float(share) for share in shares], shares)
        axis.minorticks_off()
        axis.legend(frameon=False, fontsize=7)
    axes[1].set_ylabel('from images with all keys, deviations')
    axes[2].set_ylabel('label asked for is found')
    return figure


def pictures(rows):
    """What the first seed of every recipe drew at the better rate; of attention also with an eighth of the keys."""
    found = {}
    for name, seeds in better(rows).items():
        drawn = f'{seeds[0]["label"]}/drawn'
        found[name] = f'{drawn}/all_keys/drawn.png'
        for kept in seeds[0].get('reused', {}):
            keys = f'0.125-{kept.replace(" ", "_")}'
            found[f'{name}-{keys}'] = f'{drawn}/{keys}/drawn.png'
    return found


def table(rows):
    """A line a recipe and number of steps; then a line a share of keys and what is kept."""
    lines = [['drawn by', 'rate', 'steps', 'keys', 'accuracy', 'score', 'deviations off', 'distance', 'tokens/s']]
    lines[0] += ['seeds']
    for name, seeds in better(rows).items():
        rate, steps = rate_of(seeds[0]), list(seeds[0]['drawn'])
        for each in steps:
            lines.append([name, rate, each, 'all', *cells([seed['drawn'][each] for seed in seeds])])
        for kept, shares in seeds[0].get('reused', {}).items():
            for share in shares:
                keys = f'{share}, kept: {kept}'
                lines.append([name, rate, steps[-1], keys, *cells([seed['reused'][kept][share] for seed in seeds])])
    judge = next(row for row in rows if 'accuracy' in row)
    return [*lines, ['judge', '', '', '', f'{judge["accuracy"]:.3f}', '', '', '', '', '1']]


def cells(seeds):
    """Means over seeds with their errors."""
    found = [
        plus_minus([seed[name] for seed in seeds], 3, bounds=bounds) if name in seeds[0] else ''
        for name, bounds in BOUNDS.items()
    ]
    return [*found, plus_minus([seed['tokens_per_second'] for seed in seeds], 0), f'{len(seeds)}']


def better(rows):
    """The runs of every recipe at the rate with the lower loss on validation, the mean over its seeds."""
    return at_best_rate([row for row in rows if 'drawn' in row], lambda row: row['valid'])
