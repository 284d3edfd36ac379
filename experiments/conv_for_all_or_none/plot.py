"""The confirmed score of every mixer without and with convolutions, seed by seed: a panel a task."""

import numpy as np

from attnlab.compare.axes import styles
from attnlab.experiment.results import aside, dashed, legend_beside, named_parts, panels, seeds_on_line


def figure(studies):
    """A line a mixer from none to all, through the means of the fresh seeds, which are points."""
    reports = list(dict.fromkeys(study['report'] for study in studies))
    recipes, kinds = (list(dict.fromkeys(part)) for part in zip(*map(named_parts, studies), strict=True))
    looks = styles(recipes)
    figure, axes = panels(len(reports))
    for axis, report in zip(axes, reports, strict=True):
        compared = {named_parts(study): study for study in studies if study['report'] == report}
        for number, recipe in enumerate(recipes):
            seeds = [compared[recipe, kind]['confirmed'] for kind in kinds]
            places = np.arange(len(kinds)) + aside(number, len(recipes), 0.04)
            seeds_on_line(axis, places, seeds, looks[recipe].colour, recipe)
        first = next(iter(compared.values()))
        dashed(axis, first['baselines'].values())
        axis.set(title=report, ylabel=first['metric'], xlim=(-0.4, len(kinds) - 0.6))
        axis.set_xticks(range(len(kinds)), [f'convolutions: {kind}' for kind in kinds])
    legend_beside(figure, axes[0])
    return figure
