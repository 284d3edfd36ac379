"""Loss by initial distribution, and the difference to attnlab's own, seed by seed."""

import numpy as np

from attnlab.compare.axes import styles
from attnlab.experiment.results import grouped, named_parts, panels, plus_minus

OWN = 'framework'


def figure(rows):
    """A panel a recipe: training loss over steps, the mean of the seeds."""
    found = by_start(rows)
    recipes = list(dict.fromkeys(recipe for recipe, _ in found))
    looks = styles(list(dict.fromkeys(start for _, start in found)))
    figure, axes = panels(len(recipes))
    for axis, recipe in zip(axes, recipes, strict=True):
        for (name, start), seeds in found.items():
            if name == recipe:
                curves = np.array([seed['training'] for seed in seeds.values()])
                axis.plot(curves[0, :, 0], curves[:, :, 1].mean(0), color=looks[start].colour, label=start)
        axis.set(title=recipe, xlabel='step', ylabel='training loss, nats per byte')
    axes[0].legend(frameon=False)
    return figure


def table(rows):
    """A line a recipe and start; the difference is that to attnlab's own start with the same seed."""
    found = by_start(rows)
    lines = [['recipe', 'start', 'nats/byte', 'minus attnlab’s own start', 'seeds']]
    for (recipe, start), seeds in found.items():
        own = found.get((recipe, OWN), {})
        paired = [seed['loss'] - own[number]['loss'] for number, seed in seeds.items() if number in own]
        shown = plus_minus(paired, 4) if paired and start != OWN else ''
        lines.append([recipe, start, plus_minus([seed['loss'] for seed in seeds.values()], 4), shown, f'{len(seeds)}'])
    return lines


def by_start(rows):
    """The runs by recipe and start, then by seed."""
    return {key: {named_parts(row)[-1]: row for row in seeds} for key, seeds in grouped(rows).items()}
