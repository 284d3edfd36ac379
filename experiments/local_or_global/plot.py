"""The confirmed accuracy of every mixer, a panel a task, seed by seed; by difficulty too where examples have one."""

import numpy as np

from attnlab.compare.axes import styles
from attnlab.experiment.results import dashed, panels

PICTURED = 'count'
"""The task of which pictures are kept, as in `sweep.py`."""

SEGMENTED = ('mha', 'pvt', 'swin', 'neighbourhood')
"""Recipes whose classes of patches are shown; they are of single runs, whose command is in the README."""


CLOSE = 0.04
"""Accuracies whose names would be written over each other."""


def figure(studies):
    """A column a mixer: its fresh seeds as points and their mean as a bar; dashed lines are trivial predictors."""
    reports = list(dict.fromkeys(study['report'] for study in studies))
    recipes = list(dict.fromkeys(study['study'] for study in studies))
    looks = styles(recipes)
    sliced = [
        report for report in reports if any(len(study['slices']) > 1 for study in studies if study['report'] == report)
    ]
    figure, axes = panels(len(reports) + len(sliced), width=4.4, height=3.4)
    for axis, report in zip(axes, reports, strict=False):
        compared = [study for study in studies if study['report'] == report]
        for place, study in enumerate(compared):
            colour, seeds = looks[study['study']].colour, study['confirmed']
            axis.plot([place] * len(seeds), seeds, '.', color=colour)
            axis.hlines(np.mean(seeds), place - 0.3, place + 0.3, color=colour, lw=2)
        dashed(axis, compared[0]['baselines'].values())
        for names, value in beside(compared[0]['baselines']):
            axis.annotate(names, (0.01, value), xycoords=('axes fraction', 'data'), va='bottom', fontsize=6)
        axis.set(title=report, ylabel=compared[0]['reported'], ylim=(0, 1.03))
        names = [study['study'].replace('_', '\n') for study in compared]
        axis.set_xticks(range(len(compared)), names, fontsize=6)
    for axis, report in zip(axes[len(reports) :], sliced, strict=True):
        for study in (study for study in studies if study['report'] == report):
            kinds = [kind for kind in study['slices'] if kind != 'all']
            look, means = looks[study['study']], [np.mean(study['slices'][kind]) for kind in kinds]
            axis.plot(kinds, means, look.marker + '-', color=look.colour, label=study['study'], ms=4)
        axis.set(title=f'{report}, by difficulty', ylim=(0, 1.03))
        axis.tick_params(axis='x', labelsize=6)
        axis.legend(frameon=False, fontsize=6)
    return figure


def beside(baselines):
    """The names of trivial predictors at the highest of their lines, those of lines that lie close in one."""
    found = []
    for name, value in sorted(baselines.items(), key=lambda item: -item[1]):
        if found and found[-1][1] - value < CLOSE:
            found[-1] = (f'{found[-1][0]}, {name}', found[-1][1])
        else:
            found.append((name, value))
    return found


def pictures(studies):
    """What the token in the middle of an image has seen in the first fresh seed of every mixer; classes of patches."""
    fields = {
        study['study']: f'{PICTURED}/{study["study"]}/confirm/trials/0000/figures/receptive_field.png'
        for study in studies
        if study['report'] == PICTURED
    }
    return fields | {f'segments_{recipe}': f'segments/{recipe}/figures/segmented.png' for recipe in SEGMENTED}
