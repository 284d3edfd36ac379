"""The confirmed accuracy of every row as it is, without gate, without decay, and for longer, seed by seed."""

import numpy as np

from attnlab.compare.axes import styles
from attnlab.experiment.results import aside, dashed, legend_beside, named_parts, panels, seeds_on_line


def figure(studies):
    """A line a row over what is left out, through the means of the fresh seeds, which are points."""
    rows, changes = (list(dict.fromkeys(part)) for part in zip(*map(named_parts, studies), strict=True))
    looks, compared = styles(rows), {named_parts(study): study for study in studies}
    figure, (axis,) = panels(1)
    for number, row in enumerate(rows):
        seeds = [compared[row, change]['confirmed'] for change in changes]
        places = np.arange(len(changes)) + aside(number, len(rows), 0.04)
        seeds_on_line(axis, places, seeds, looks[row].colour, row)
    dashed(axis, studies[0]['baselines'].values())
    axis.set(ylabel=studies[0]['metric'])
    axis.set_xticks(range(len(changes)), changes)
    legend_beside(figure, axis)
    return figure
