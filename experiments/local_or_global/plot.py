"""The confirmed accuracy of every mixer, a panel a task: those that see near tokens, all, and both, seed by seed."""

import numpy as np

from attnlab.compare.axes import styles
from attnlab.experiment.results import panels


def figure(studies):
    """A column a mixer: its fresh seeds as points and their mean as a bar; dashed lines are trivial predictors."""
    reports = list(dict.fromkeys(study['report'] for study in studies))
    recipes = list(dict.fromkeys(study['study'] for study in studies))
    looks = styles(recipes)
    figure, axes = panels(len(reports), width=4.4, height=3.4)
    for axis, report in zip(axes, reports, strict=True):
        compared = [study for study in studies if study['report'] == report]
        for place, study in enumerate(compared):
            colour, seeds = looks[study['study']].colour, study['confirmed']
            axis.plot([place] * len(seeds), seeds, '.', color=colour)
            axis.hlines(np.mean(seeds), place - 0.3, place + 0.3, color=colour, lw=2)
        for name, value in compared[0]['baselines'].items():
            axis.axhline(value, color='0.6', lw=0.8, ls='--', zorder=0)
            axis.annotate(name, (1, value), xycoords=('axes fraction', 'data'), ha='right', va='bottom', fontsize=6)
        axis.set(title=report, ylabel=compared[0]['metric'], ylim=(0, 1.03))
        names = [study['study'].replace('_', '\n') for study in compared]
        axis.set_xticks(range(len(compared)), names, fontsize=6)
    return figure
