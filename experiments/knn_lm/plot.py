"""What neighbours take off the loss: by key, number, share and temperature, and by the size of the store."""

import numpy as np

from attnlab.compare.axes import scale, short, styles
from attnlab.experiment.results import dashed, legend_beside, panels, plus_minus

NAMES = {
    'head': 'head: what the head reads',
    'stream': 'stream: what the last norm reads',
    'mlp': 'mlp: what the last channel mixer reads',
    'mlp_output': 'mlp_output: what it makes',
    'mixer': 'mixer: what the last mixer reads',
}
KEY = 'mlp'


def figure(rows):
    """Means over seeds, a line a key; of the store, a point a seed."""
    looks = styles(list(NAMES))
    figure, axes = panels(4, width=3.6, height=3.4)
    for axis, name in zip(axes, ('count', 'share', 'temperature'), strict=False):
        for key in NAMES:
            curves = [
                [(one[name], one['loss'] - row['loss']) for one in row['by_key'][key][f'by_{name}']] for row in rows
            ]
            axis.plot(*np.mean(curves, axis=0).T, marker='.', color=looks[key].colour, label=NAMES[key])
        dashed(axis, [0])
        axis.set(xscale='log')
    axes[0].set(xlabel='neighbours', ylabel='nats per byte more than alone')
    axes[1].set(xlabel='share of neighbours')
    axes[2].set(xlabel='temperature')
    for axis in axes[1:3]:
        axis.set_ylim(top=min(axis.get_ylim()[1], 0.1))
    for row in rows:
        sizes = [(int(size), one['loss'] - row['loss']) for size, one in row['by_size'].items()]
        axes[3].plot(*zip(*sizes, strict=True), marker='.', lw=0.8, color=looks[KEY].colour)
    scale(axes[3].xaxis, list(map(float, rows[0]['by_size'])), short, least=2.0)
    axes[3].set(xlabel='states stored')
    legend_beside(figure, axes[0], loc='outside lower center', ncols=3)
    return figure


def table(rows):
    """A line a key, then of the paper's key a line a number of neighbours, temperature, size and text of the store."""
    lines = [['varied', 'neighbours', 'temperature', 'share', 'loss', 'more than alone', 'seeds']]
    lines.append(['the model alone', '', '', '', plus_minus([row['loss'] for row in rows], 4), '', f'{len(rows)}'])
    lines += [line(f'key {key}', [row['by_key'][key]['chosen'] for row in rows], rows) for key in NAMES]
    for name, said in (('count', '{} neighbours'), ('temperature', 'temperature {}'), ('share', 'share {}')):
        places = range(len(rows[0]['by_key'][KEY][f'by_{name}']))
        for found in ([row['by_key'][KEY][f'by_{name}'][place] for row in rows] for place in places):
            lines.append(line(said.format(f'{found[0][name]:g}'), found, rows))
    for size in rows[0]['by_size']:
        lines.append(line(f'{int(size):,} states', [row['by_size'][size] for row in rows], rows))
    other = [row['other'] for row in rows]
    lines.append(['other text: alone', '', '', '', plus_minus([one['loss'] for one in other], 4), '', f'{len(rows)}'])
    for store in ('of the text trained on', 'of the other text'):
        lines.append(line(f'other text: a store {store}', [one[store] for one in other], other))
    return lines


def line(name, found, alone):
    """What was chosen in each seed, and the losses."""
    chosen = [' '.join(dict.fromkeys(f'{one[part]:g}' for one in found)) for part in ('count', 'temperature', 'share')]
    values = [one['loss'] for one in found]
    less = [value - each['loss'] for value, each in zip(values, alone, strict=True)]
    return [name, *chosen, plus_minus(values, 4), plus_minus(less, 4), f'{len(found)}']
