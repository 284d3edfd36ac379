"""Confirmed accuracy over bytes of state: a line a recipe, of four sizes; seeds are dots."""

import numpy as np

from attnlab.compare.axes import scale, short, styles
from attnlab.experiment.results import dashed, grouped, legend_beside, panels


def figure(studies):
    """The mean of the fresh seeds with its interval; dashed: what predictors reach that need no training."""
    found = grouped(studies)
    looks = styles(list(found))
    figure, (axis,) = panels(1, width=8, height=5)
    for recipe, sizes in found.items():
        sizes = sorted(sizes, key=lambda study: study['costs']['state_bytes'])
        at = [study['costs']['state_bytes'] for study in sizes]
        look = looks[recipe]
        axis.plot(
            at, [np.mean(study['confirmed']) for study in sizes], look.marker + '-', color=look.colour, label=recipe
        )
        for place, study in zip(at, sizes, strict=True):
            interval = study['statistics']['confirmed']
            axis.plot([place] * len(study['confirmed']), study['confirmed'], '.', color=look.colour, ms=3, alpha=0.6)
            if interval['low'] is not None:
                axis.vlines(place, interval['low'], interval['high'], color=look.colour, lw=0.8, alpha=0.5)
    dashed(axis, studies[0]['baselines'].values())
    scale(axis.xaxis, [study['costs']['state_bytes'] for study in studies], short, least=2.0)
    axis.set(xlabel='bytes of state', ylabel=studies[0].get('reported') or studies[0]['metric'], ylim=(0, 1.02))
    legend_beside(figure, axis)
    return figure
