"""The confirmed score of every mixer without and with convolutions, seed by seed: a panel a task."""

import numpy as np

from attnlab.compare.axes import styles
from attnlab.experiment.results import panels


def figure(studies):
    """A line a mixer from none to all, through the means of the fresh seeds, which are points."""
    reports = list(dict.fromkeys(study['report'] for study in studies))
    recipes = list(dict.fromkeys(study['study'].rpartition('-')[0] for study in studies))
    looks = styles(recipes)
    figure, axes = panels(len(reports))
    for axis, report in zip(axes, reports, strict=True):
        compared = {study['study']: study for study in studies if study['report'] == report}
        kinds = list(dict.fromkeys(name.rpartition('-')[2] for name in compared))
        for number, recipe in enumerate(recipes):
            seeds = [compared[f'{recipe}-{kind}']['confirmed'] for kind in kinds]
            colour, shift = looks[recipe].colour, 0.04 * (number - (len(recipes) - 1) / 2)
            places = np.arange(len(kinds)) + shift
            axis.plot(places, [np.mean(values) for values in seeds], color=colour, label=recipe)
            for place, values in zip(places, seeds, strict=True):
                axis.plot([place] * len(values), values, '.', color=colour)
        for value in next(iter(compared.values()))['baselines'].values():
            axis.axhline(value, color='0.6', lw=0.8, ls='--', zorder=0)
        axis.set(title=report, ylabel=next(iter(compared.values()))['metric'], xlim=(-0.4, len(kinds) - 0.6))
        axis.set_xticks(range(len(kinds)), [f'convolutions: {kind}' for kind in kinds])
    figure.legend(*axes[0].get_legend_handles_labels(), frameon=False, loc='outside right upper')
    return figure
