"""Where a model that runs by itself goes, how it swings, in how many regions, and how fast differences grow."""

import numpy as np

from attnlab.compare.axes import styles
from attnlab.experiment.results import at_best_rate, panels, plus_minus, rate_of, seeds_on_bar

KNOWN = 0.906
"""The greatest Lyapunov exponent of the Lorenz system, a unit of time (Sprott 2003)."""

SHOWN = {
    'test_model_divergence': 'divergence, nats',
    'test_model_spectral_distance': 'spectral distance',
    'test_regions': 'regions visited',
    'exponent': 'exponent a unit of time',
}


def figure(rows):
    """Dots are seeds, bars their means; dashed: the true system at another time, dotted: normal rows, or the truth."""
    found = chosen(rows)
    looks = styles(list(found))
    figure, axes = panels(len(SHOWN))
    for axis, (name, title) in zip(axes, SHOWN.items(), strict=True):
        for place, (system, seeds) in enumerate(found.items()):
            seeds_on_bar(axis, place, [row[name] for row in seeds], looks[system].colour)
        axis.set(title=title)
        axis.set_xticks(range(len(found)), found, rotation=90)
    first = next(iter(found.values()))[0]
    for axis, measure in zip(axes, ('divergence', 'spectral_distance'), strict=False):
        axis.axhline(first[f'test_truth_again_{measure}'], color='0.4', lw=0.9, ls='--')
        axis.axhline(first[f'test_gaussian_{measure}'], color='0.4', lw=0.9, ls=':')
    axes[2].set_yscale('log', base=2)
    axes[3].axhline(KNOWN, color='0.4', lw=0.9, ls=':')
    return figure


def table(rows):
    """A line a system, then what stands beside them."""
    lines = [
        ['system', 'rate', 'divergence', 'spectral distance', 'error 20 rows on', 'regions', 'exponent', 'seconds']
    ]
    found = chosen(rows)
    for system, seeds in found.items():
        cells = [
            plus_minus([row['test_model_divergence'] for row in seeds], 2),
            plus_minus([row['test_model_spectral_distance'] for row in seeds], 3),
            plus_minus([row['test_error'] for row in seeds], 4),
            ', '.join(f'{row["test_regions"]:.0f}' for row in seeds),
            ', '.join(f'{row["exponent"]:.2f}' for row in seeds),
            f'{np.mean([row["seconds"] for row in seeds]):.0f}',
        ]
        lines.append([system, rate_of(seeds[0]), *cells])
    first = next(iter(found.values()))[0]
    for run in ('truth_again', 'gaussian'):
        measures = [f'{first[f"test_{run}_divergence"]:.2f}', f'{first[f"test_{run}_spectral_distance"]:.3f}']
        exponent = f'{KNOWN}' if run == 'truth_again' else ''
        lines.append([f'({run.replace("_", " ")})', '', *measures, '', '', exponent, ''])
    return lines


def chosen(rows):
    """The runs of every system at the rate whose mean divergence on validation is least."""
    return at_best_rate(rows, lambda row: row['valid_model_divergence'])
