"""The confirmed accuracy of every row as it is, without gate, without decay, and for longer, seed by seed."""

import numpy as np

from attnlab.compare.axes import styles
from attnlab.experiment.results import aside, dashed, legend_beside, named_parts, panels

HALF = 0.1
"""Half the width of the line that marks a mean."""


def figure(studies):
    """A point a seed, and a line at their mean, by what is left out."""
    rows, changes = (list(dict.fromkeys(part)) for part in zip(*map(named_parts, studies), strict=True))
    looks, compared = styles(rows), {named_parts(study): study for study in studies}
    figure, (axis,) = panels(1, width=7.5)
    for number, row in enumerate(rows):
        places = np.arange(len(changes)) + aside(number, len(rows), 2.4 * HALF)
        colour, seeds = looks[row].colour, [compared[row, change]['confirmed'] for change in changes]
        axis.hlines([np.mean(values) for values in seeds], places - HALF, places + HALF, color=colour, label=row)
        for place, values in zip(places, seeds, strict=True):
            axis.plot([place] * len(values), values, '.', color=colour)
    dashed(axis, studies[0]['baselines'].values())
    axis.set(ylabel=studies[0]['reported'])
    axis.set_xticks(range(len(changes)), [change.replace('_', ' ') for change in changes])
    legend_beside(figure, axis)
    return figure
