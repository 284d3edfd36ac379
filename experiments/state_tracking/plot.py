"""The confirmed accuracy of every mixer, at six times the length it was trained on: a panel a problem."""

from attnlab.compare.axes import styles
from attnlab.experiment.results import dashed, panels, seeds_on_bar


def figure(studies):
    """Points are fresh seeds, bars their means; dashed: what predictors reach that need no training."""
    reports = list(dict.fromkeys(study['report'] for study in studies))
    looks = styles(list(dict.fromkeys(study['study'] for study in studies)))
    found = {(study['report'], study['study']): study for study in studies}
    figure, axes = panels(len(reports))
    for axis, report in zip(axes, reports, strict=True):
        recipes = [recipe for at, recipe in found if at == report]
        for place, recipe in enumerate(recipes):
            seeds = found[report, recipe]['confirmed']
            seeds_on_bar(axis, place, seeds, looks[recipe].colour)
        dashed(axis, found[report, recipes[0]]['baselines'].values())
        axis.set(title=report, ylim=(0, 1.02))
        axis.set_xticks(range(len(recipes)), recipes, rotation=90)
    axes[0].set_ylabel('accuracy')
    return figure
