"""The divergence from the source by width of the head."""

import numpy as np

from attnlab.compare.axes import styles
from attnlab.experiment.results import grouped, legend_beside, panels, plus_minus


def figure(rows):
    """A curve a head, the mean of the seeds."""
    found = by_head(rows)
    heads = list(dict.fromkeys(head for head, _ in found))
    looks = styles(heads)
    figure, (axis,) = panels(1, width=6.5)
    for head in heads:
        points = [(width, np.mean(values)) for (name, width), values in found.items() if name == head]
        axis.plot(*zip(*points, strict=True), marker='o', color=looks[head].colour, label=head.replace('_', ' '))
    axis.set(xlabel='width that the head reads', ylabel='divergence from the source, nats', yscale='log')
    legend_beside(figure, axis)
    return figure


def table(rows):
    """A line a head and width."""
    lines = [['head', 'width', 'divergence, nats', 'seeds']]
    for (head, width), values in by_head(rows).items():
        lines.append([head.replace('_', ' '), f'{width}', plus_minus(values, 4), f'{len(values)}'])
    return lines


def by_head(rows):
    """The divergences by head and width, a number a seed."""
    found = grouped(rows)
    return {(head, seeds[0]['width']): [row['divergence'] for row in seeds] for (head, _), seeds in found.items()}
