"""The figure of a look inside: what is written in it can be read, whatever the depth."""

import numpy as np
import pytest

from attnlab.analysis import inside_figure
from attnlab.analysis.inside_figure import MAPS, Drawn, draw


def drawn(depth):
    """What is drawn of so many layers."""
    array = {'norms': [[1.0, 2.0]], 'positions': [0, 1], 'kept': [0.9]}
    state = {'memory': array, 'sum': array}
    return Drawn(
        losses=[1.0] * (depth + 1),
        tuned=[],
        influences=[[1.0, 0.5]] * depth,
        states=[state] * depth,
        maps=[np.eye(4)[None]] * depth,
        weighted=[False] * depth,
    )


@pytest.mark.parametrize('depth', [1, 3, 40])
def test_layers_are_named_beside_their_curves_as_many_as_fit(depth, tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(inside_figure, 'save', lambda figure, path: figures.append(figure))
    draw(drawn(depth), tmp_path / 'inside.png')
    (figure,) = figures
    figure.draw_without_rendering()
    _, influence, norms, *_ = figure.axes
    named = [text.get_text() for text in influence.get_legend().get_texts()]
    assert len(influence.lines) == depth and len(named) == min(depth, MAPS)
    assert named[0] == 'layer 0' and named[-1] == f'layer {depth - 1}'
    panel, legend = influence.get_window_extent(), influence.get_legend().get_window_extent()
    assert panel.y0 <= legend.y0 and legend.y1 <= panel.y1
    # Arrays of states by their lines, each named once.
    assert [text.get_text() for text in norms.get_legend().get_texts()] == ['memory', 'sum']
    assert {line.get_linestyle() for line in norms.lines[: 2 * depth]} == {'-', '--'}
