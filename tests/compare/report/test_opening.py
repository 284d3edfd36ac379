"""The opening of a page: what is bold in its table, and where the axes of a share end."""

import dataclasses
import re

import pytest
from matplotlib.figure import Figure

from attnlab.compare.axes import styles
from attnlab.compare.report import figures, opening
from attnlab.compare.report.chart import WIDE
from attnlab.compare.report.opening import Opening, Scored
from attnlab.evals.measured import SHARE, of_seeds
from tests.compare.report import made

APART = {'gla': (0.50, 0.51, 0.52), 'mha': (0.90, 0.91, 0.92)}
TOGETHER = {'gla': (0.50, 0.51, 0.52), 'mha': (0.50, 0.53, 0.56)}
AT_ONE = {'gla': (0.90, 0.91, 0.92), 'mha': (0.98, 1.0, 1.0)}
LARGEST = 'M[0-9.]+ [0-9.]+V([0-9.]+)M'
"""The upper end of an interval, in pixels from above."""


def opening_of(scores, *, share=True, told_apart=True):
    """Of these scores by name, each over three seeds, at one cost or at several."""
    entries = [
        Scored(name, of_seeds(values).within(*SHARE), {'state_bytes': 1024.0 * (1 + told_apart * place)})
        for place, (name, values) in enumerate(scores.items())
    ]
    words = {'name': 'score', 'metric': 'test/accuracy', 'task': 'Recall', 'baselines': {'chance': 0.5}}
    return Opening(
        entries=entries, looks=styles(list(scores)), higher=True, share=share, matched=(), tolerance=0.01, **words
    )


@pytest.mark.parametrize(('scores', 'bold'), [(APART, True), (TOGETHER, False)], ids=['apart', 'together'])
def test_the_best_is_bold_where_it_is_separated_and_nothing_else_is(scores, bold):
    shown = opening_of(scores)
    rows = opening.table(shown, {name: name for name in scores}).split('</tr>')
    best, second = (next(row for row in rows if f'>{name}<' in row) for name in ('mha', 'gla'))
    text = shown.order[0].score.text(3)
    assert (f'><b>{text}</b><' if bold else f'>{text}<') in best and ' ± ' in text
    assert '<b>' not in second and ''.join(rows).count('<b>') == bold
    assert ('bold: the interval of the best does not overlap' in opening.caption(shown)) == bold


@pytest.mark.parametrize(
    ('least', 'most', 'shown'),
    [
        (65536.0, 131072.0, ['64 KiB', '80 KiB', '96 KiB', '112 KiB', '128 KiB']),
        (1048576.0, 1310720.0, ['1 MiB', '1.062 MiB', '1.125 MiB', '1.188 MiB', '1.25 MiB']),
    ],
)
def test_bytes_along_an_axis_are_round_where_they_are_close_too(least, most, shown):
    sizes = zip(APART.items(), (least, most), strict=True)
    entries = [Scored(name, of_seeds(values), {'state_bytes': size}) for (name, values), size in sizes]
    close = dataclasses.replace(opening_of(APART), entries=entries)
    drawn = opening.draw(close, opening.lines(close), WIDE)
    assert re.findall('>([0-9.]+ [KM]iB)</text>', drawn) == shown


def test_brackets_are_explained_where_there_are_some():
    for scores, some in ((AT_ONE, True), (APART, False)):
        shown = opening_of(scores)
        assert ('[' in opening.table(shown, {name: name for name in scores})) == some
        assert ('brackets' in opening.caption(shown)) == some


def test_the_axis_of_a_share_ends_at_one():
    """An interval that ends at one ends where the figure does, and below it if the score is no share."""
    for share in (True, False):
        shown = opening_of(AT_ONE, share=share)
        drawn = opening.draw(shown, opening.lines(shown), WIDE)
        highest = min(float(one) for one in re.findall(LARGEST, drawn))
        assert (highest == 16) if share else (highest > 16)


def test_the_axis_of_a_share_ends_at_one_where_no_cost_tells_apart():
    for share in (True, False):
        shown = opening_of(AT_ONE, share=share, told_apart=False)
        assert shown.cost is None
        drawn = opening.draw(shown, opening.lines(shown), WIDE)
        furthest = max(float(one) for one in re.findall('M[0-9.]+ [0-9.]+H([0-9.]+)"', drawn))
        edge = WIDE[0] - 16 - 8
        assert (furthest == edge) if share else (furthest < edge)


def test_the_axes_of_small_figures_of_a_share_end_at_one():
    plot = figures.companion_plots(made.contents(2, 5, companion=True))[0]
    name, cost, *_, mark, survivors = plot.lines[0]
    axes = Figure().subplots()
    plot.draw(axes, [(name, cost, 0.99, 0.97, 1.0, mark, survivors), *plot.lines[1:]])
    assert axes.get_ylim()[1] == 1 and max(axes.get_yticks()) <= 1
