"""The confirmed accuracy of every mixer: a panel a task; dashed: predictors that need no training of a network."""

from attnlab.compare.axes import styles
from attnlab.experiment.results import panels, seeds_on_bar


def figure(studies):
    """Points are fresh seeds, bars their means."""
    tasks = list(dict.fromkeys(study['report'] for study in studies))
    recipes = list(dict.fromkeys(study['study'] for study in studies))
    looks = styles(recipes)
    found = {(study['report'], study['study']): study for study in studies}
    figure, axes = panels(len(tasks))
    for axis, task in zip(axes, tasks, strict=True):
        for place, recipe in enumerate(recipes):
            seeds = found[task, recipe]['confirmed']
            seeds_on_bar(axis, place, seeds, looks[recipe].colour)
        for name, value in found[task, recipes[0]]['baselines'].items():
            axis.axhline(value, color='0.5', lw=0.8, ls='--', zorder=0)
            axis.text(len(recipes) - 0.45, value, name, fontsize='x-small', color='0.4', ha='right', va='bottom')
        axis.set(title=task, ylim=(0, 1.02))
        axis.set_xticks(range(len(recipes)), recipes, rotation=90)
    axes[0].set_ylabel('accuracy')
    return figure
