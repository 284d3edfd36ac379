"""The confirmed accuracy of every mixer by length: a panel a problem."""

import numpy as np

from attnlab.compare.axes import styles
from attnlab.experiment.results import panels


def figure(studies):
    """Points are fresh seeds, lines their means; dashed: what predictors reach that need no training."""
    reports = list(dict.fromkeys(study['report'] for study in studies))
    problems = list(dict.fromkeys(report.rpartition('-')[0] for report in reports))
    lengths = list(dict.fromkeys(report.rpartition('-')[2] for report in reports))
    recipes = list(dict.fromkeys(study['study'] for study in studies))
    looks = styles(recipes)
    found = {(study['report'], study['study']): study for study in studies}
    figure, axes = panels(len(problems))
    for axis, problem in zip(axes, problems, strict=True):
        for number, recipe in enumerate(recipes):
            seeds = [found[f'{problem}-{length}', recipe]['confirmed'] for length in lengths]
            places = np.arange(len(lengths)) + 0.04 * (number - (len(recipes) - 1) / 2)
            colour = looks[recipe].colour
            axis.plot(places, [np.mean(values) for values in seeds], color=colour, label=recipe)
            for place, values in zip(places, seeds, strict=True):
                axis.plot([place] * len(values), values, '.', color=colour)
        for value in found[f'{problem}-{lengths[0]}', recipes[0]]['baselines'].values():
            axis.axhline(value, color='0.6', lw=0.8, ls='--', zorder=0)
        axis.set(title=problem, xlim=(-0.4, len(lengths) - 0.6), ylim=(0, 1.02))
        axis.set_xticks(range(len(lengths)), lengths)
    axes[0].set_ylabel('accuracy')
    figure.legend(*axes[0].get_legend_handles_labels(), frameon=False, loc='outside right upper')
    return figure
