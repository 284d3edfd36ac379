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
        _trivial(axis, found[task, recipes[0]]['baselines'])
        axis.set(title=task, ylim=(0, 1.02))
        axis.set_xticks(range(len(recipes)), recipes, rotation=90)
    axes[0].set_ylabel('accuracy')
    return figure


def _trivial(axis, baselines):
    """A line a predictor; those too near each other for two labels share one."""
    groups = []
    for name, value in sorted(baselines.items(), key=lambda line: line[1]):
        axis.axhline(value, color='0.5', lw=0.8, ls='--', zorder=0)
        if groups and value - groups[-1][1] < 0.06:
            groups[-1] = (f'{groups[-1][0]}, {name}', value)
        else:
            groups.append((name, value))
    for names, value in groups:
        paper = {'facecolor': 'white', 'edgecolor': 'none', 'alpha': 0.5, 'pad': 0.5}
        axis.text(0.99, value + 0.015, names, transform=axis.get_yaxis_transform(), ha='right', va='bottom', bbox=paper,
                  fontsize='x-small', color='0.2', zorder=1.5)  # fmt: skip
