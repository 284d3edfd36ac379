"""The confirmed accuracy of every mixer by length: a panel a problem."""

import numpy as np

from attnlab.compare.axes import styles
from attnlab.experiment.experiment import label_of, parts_of
from attnlab.experiment.results import aside, dashed, legend_beside, panels, seeds_on_line


def figure(studies):
    """Points are fresh seeds, lines their means; dashed: what predictors reach that need no training."""
    reports = list(dict.fromkeys(study['report'] for study in studies))
    problems, lengths = (list(dict.fromkeys(part)) for part in zip(*map(parts_of, reports), strict=True))
    recipes = list(dict.fromkeys(study['study'] for study in studies))
    looks = styles(recipes)
    found = {(study['report'], study['study']): study for study in studies}
    figure, axes = panels(len(problems))
    for axis, problem in zip(axes, problems, strict=True):
        for number, recipe in enumerate(recipes):
            seeds = [found[label_of(problem, length), recipe]['confirmed'] for length in lengths]
            places = np.arange(len(lengths)) + aside(number, len(recipes), 0.04)
            seeds_on_line(axis, places, seeds, looks[recipe].colour, recipe)
        dashed(axis, found[label_of(problem, lengths[0]), recipes[0]]['baselines'].values())
        axis.set(title=problem, xlim=(-0.4, len(lengths) - 0.6), ylim=(0, 1.02))
        axis.set_xticks(range(len(lengths)), lengths)
    axes[0].set_ylabel('accuracy')
    legend_beside(figure, axes[0])
    return figure
