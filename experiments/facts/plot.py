"""Where facts sit: what clean values bring back by layer and token, and what edits do by place."""

import numpy as np

from attnlab.evals.measured import SHARE
from attnlab.experiment.results import at_best_rate, panels, plus_minus, rate_of

TOKENS = ('first name', 'last name', 'relation', 'asked')
CHOOSING, SHOWN = 0, 1
"""Halves of the edits: a place is chosen by one, and the other is shown."""


def figure(rows):
    """A row of maps a recipe, means over seeds; then how often edits take, and leave other facts as they were."""
    found = best(rows)
    kinds = {recipe: list(seeds[0]['maps']) for recipe, seeds in found.items()}
    columns = max(map(len, kinds.values())) + 1
    figure, axes = panels(columns, rows=len(found), width=3.2, height=2.6)
    for row, (recipe, seeds) in enumerate(found.items()):
        places = iter(axes[row * columns :])
        for kind in kinds[recipe]:
            axis = next(places)
            axis.imshow(
                np.mean([row['maps'][kind] for row in seeds], axis=0), vmin=0, vmax=1, aspect='auto', cmap='Blues'
            )
            axis.set(title=f'{recipe}: {kind}', ylabel='layer')
            axis.set_xticks(range(len(TOKENS)), TOKENS, rotation=40, ha='right')
        axis = next(places)
        edits = list(seeds[0]['edits'])
        for number, name in enumerate(('takes', 'subject', 'others')):
            means = [np.mean([row['edits'][each][name][SHOWN] for row in seeds]) for each in edits]
            axis.plot(range(len(edits)), means, 'o-', color=f'C{number}', label=name, ms=3)
        axis.set(title=f'{recipe}: edits', ylim=(-0.03, 1.03))
        axis.set_xticks(range(len(edits)), edits, rotation=90, fontsize=6)
        for unused in axes[row * columns + len(kinds[recipe]) + 1 : (row + 1) * columns]:
            unused.set_axis_off()
    axes[len(next(iter(kinds.values())))].legend(frameon=False, fontsize=7)
    return figure


def table(rows):
    """A line a recipe: the place that brings back most at the last name, and the place where edits take best."""
    lines = [
        [
            'recipe',
            'learning rate',
            'accuracy',
            'brought back at the last name: by the mixer, in layer',
            'by the channel mixer, in layer',
            'at the token asked: by the mixer, in layer',
            'of the stream, first layer with more than half at the token asked',
            'best edit',
            'takes',
            'same subject unchanged',
            'others unchanged',
            'takes two layers from where traces point',
            'seeds',
        ]
    ]
    for recipe, seeds in best(rows).items():
        edit = max(seeds[0]['edits'], key=lambda name: np.mean([score(row['edits'][name]) for row in seeds]))
        values = [[row['edits'][edit][name][SHOWN] for row in seeds] for name in ('takes', 'subject', 'others')]
        lines.append(
            [
                recipe,
                rate_of(seeds[0]),
                plus_minus([row['accuracy'] for row in seeds], 3, bounds=SHARE),
                most(seeds, 'mixer.output', 1),
                most(seeds, 'mlp.output', 1),
                most(seeds, 'mixer.output', 3),
                ', '.join(map(str, map(changes_hands, seeds))),
                edit,
                *(plus_minus(each, 3, bounds=SHARE) for each in values),
                elsewhere(seeds),
                f'{len(seeds)}',
            ]
        )
    return lines


def most(seeds, kind, token):
    """The most that comes back at a token, in the mean over seeds, and the layer."""
    if kind not in seeds[0]['maps']:
        return 'none'
    by_layer = np.array([[layer[token] for layer in row['maps'][kind]] for row in seeds])
    layer = int(by_layer.mean(axis=0).argmax())
    return f'{plus_minus(by_layer[:, layer].tolist(), 3)} ({layer})'


def changes_hands(row):
    """The first layer after which more than half of the answer is in the stream at the token that asks."""
    return next((layer for layer, shares in enumerate(row['maps']['residual']) if shares[3] > 0.5), 'none')


def elsewhere(seeds):
    """How often edits take two layers from where most comes back at the last name, on the side that takes more often in
    the half that chooses."""
    kind = 'mlp' if 'mlp.output' in seeds[0]['maps'] else 'mixer'
    by_layer = np.mean([[layer[1] for layer in row['maps'][f'{kind}.output']] for row in seeds], axis=0)
    places = [f'{int(by_layer.argmax()) + away}.{kind}' for away in (-2, 2)]
    found = [[row['edits'][place]['takes'] for row in seeds] for place in places if place in seeds[0]['edits']]
    if not found:
        return 'none'
    chosen = max(found, key=lambda halves: np.mean([half[CHOOSING] for half in halves]))
    return plus_minus([half[SHOWN] for half in chosen], 3, bounds=SHARE)


def score(edit):
    """How good an edit is: the harmonic mean of what it does and what it leaves alone."""
    values = np.maximum([edit[name][CHOOSING] for name in ('takes', 'subject', 'others')], 1e-6)
    return float(len(values) / np.sum(1 / values))


def best(rows):
    """The runs by recipe, of the learning rate with the lowest mean loss."""
    return at_best_rate(rows, lambda row: row['loss'])
