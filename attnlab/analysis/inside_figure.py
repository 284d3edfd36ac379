"""The figure of a look inside: predictions by layer, memory, states, and what tokens read."""

import dataclasses
import itertools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from attnlab.figures import canvas, legend, save, styled, tick_whole

COLUMNS = 4
"""Panels beside each other."""

MAPS = 8
"""The most layers whose maps are shown and whose curves are named, spread evenly, and the most heads of each."""

DARKEST, BRIGHTEST = 0.0, 0.85
"""Ends of the colours of curves, from the first layer to the last."""


DASHES = ('-', '--', ':', '-.', (0, (5, 1, 1, 1, 1, 1)), (0, (8, 2)))
"""Lines of the arrays of a state, by name."""


@dataclasses.dataclass(frozen=True)
class Drawn:
    """What is drawn.

    Attributes:
      losses: of predictions from the embedding, and from every layer.
      tuned: the same of the tuned lens, if there is one.
      influences: by layer, by distance.
      states: by layer, the arrays of its state with `norms` by head at `positions`, and shares `kept` by head.
      maps: by layer, what tokens of a row read, by head; without heads one map.
      weighted: whether these are weights; else they are sizes of derivatives.
    """

    losses: Sequence[float]
    tuned: Sequence[float]
    influences: Sequence[Sequence[float]]
    states: Sequence[Mapping[str, Mapping[str, Any]]]
    maps: Sequence[Float[np.ndarray, '_ _ s']]
    weighted: Sequence[bool]


def draw(drawn: Drawn, path: pathlib.Path) -> None:
    """Writes the figure."""
    from matplotlib import colormaps
    from matplotlib.ticker import NullFormatter

    depth = len(drawn.maps)
    shown = np.unique(np.linspace(0, depth - 1, min(MAPS, depth)).astype(int))
    rows = 1 + -(-len(shown) // COLUMNS)
    figure = canvas(3.4 * COLUMNS, 2.9 * rows)
    panels = figure.subplots(rows, COLUMNS, squeeze=False)
    colours = colormaps['viridis'](np.linspace(DARKEST, BRIGHTEST, depth))
    lens, influence, norms, kept = panels[0]
    lens.plot(range(depth + 1), drawn.losses, marker='o', ms=3, lw=1.5, label='logit lens')
    if drawn.tuned:
        lens.plot(range(depth + 1), drawn.tuned, marker='s', ms=3, lw=1.5, label='tuned lens')
        legend(lens, fontsize=7)
    lens.set(title='predicted from the stream', xlabel='after layers', ylabel='loss')
    tick_whole(lens.xaxis)
    for layer, strengths in enumerate(drawn.influences):
        most = max(strengths) or 1.0
        # From 1, so that the token itself is shown on an axis of logarithms.
        influence.plot(
            np.arange(len(strengths)) + 1,
            np.asarray(strengths) / most,
            color=colours[layer],
            lw=1.2,
            # As many names as there is room for.
            label=f'layer {layer}' if layer in shown else None,
        )
    influence.set(title='influence of inputs', xlabel='1 + tokens back', ylabel='share of the largest')
    influence.set(xscale='log', yscale='log', ylim=(1e-4, 1.5))
    names = dict.fromkeys(name for arrays in drawn.states for name in arrays)
    dashes = dict(zip(names, itertools.cycle(DASHES), strict=False))
    for layer, arrays in enumerate(drawn.states):
        for name, one in arrays.items():
            total = np.linalg.norm(np.asarray(one['norms']), axis=0)
            norms.plot(one['positions'], total, color=colours[layer], ls=dashes[name], lw=1.2)
            kept.plot([layer] * len(one['kept']), one['kept'], '_', color=colours[layer], ms=12)
    norms.set(title='size of states', xlabel='position', ylabel='norm')
    if dashes:
        for name, dash in dashes.items():
            norms.plot([], [], color='black', ls=dash, lw=1.2, label=name)
        legend(norms, fontsize=6)
    most = max((share for arrays in drawn.states for one in arrays.values() for share in one['kept']), default=1.0)
    kept.set(title='kept of a state by a token', xlabel='layer', ylim=(-0.02, 1.05 * max(most, 1.0)))
    tick_whole(kept.xaxis)
    if not any(drawn.states):
        for axes in (norms, kept):
            axes.text(0.5, 0.5, 'no state', ha='center', transform=axes.transAxes)
    influence.xaxis.set_minor_formatter(NullFormatter())
    legend(influence, fontsize=6)
    for axes in panels[0]:
        styled(axes)
    places = [axes for row in panels[1:] for axes in row]
    for layer, axes in zip(shown, places, strict=False):
        what = 'weights by head' if drawn.weighted[layer] else 'influence'
        _map(axes, drawn.maps[layer], f'layer {layer}: {what}')
    for axes in places[len(shown) :]:
        axes.set_axis_off()
    save(figure, path)


def _map(axes: Any, maps: Float[np.ndarray, 'h _ s'], title: str) -> None:
    """Heads in a square of tiles, each row of a map scaled to its largest entry."""
    maps = np.abs(maps[:MAPS])
    scaled = maps / np.maximum(maps.max(axis=-1, keepdims=True), 1e-30)
    count, height, width = scaled.shape
    across = int(np.ceil(np.sqrt(count)))
    down = -(-count // across)
    gap_y, gap_x = max(height // 32, 1), max(width // 32, 1)
    tiles = np.full((down * (height + gap_y) - gap_y, across * (width + gap_x) - gap_x), np.nan)
    for head, one in enumerate(scaled):
        top, left = (head // across) * (height + gap_y), (head % across) * (width + gap_x)
        tiles[top : top + height, left : left + width] = one
    axes.imshow(tiles, cmap='magma_r', vmin=0, vmax=1, aspect='auto', interpolation='nearest')
    axes.set(title=title, xticks=[], yticks=[], xlabel='read', ylabel='reading')
