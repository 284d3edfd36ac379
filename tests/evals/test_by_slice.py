"""What an evaluation by slices shows: a figure of every metric by label, and one of all metrics by length."""

import numpy as np
import pytest
from flax import nnx

from attnlab import figures
from attnlab.evals import by_slice
from attnlab.evals.by_slice import BySlice, SlicedEvaluation
from attnlab.evals.cadence import AtEnd
from attnlab.metrics import Average
from attnlab.train.setup import prepare
from configs import series

NUMBERS = {
    '1x/loss': 0.1,
    '1x/accuracy': 0.9,
    '2x/loss': 0.3,
    '2x/accuracy': 0.7,
    '16x/loss': 2.0,
    '16x/accuracy': 0.5,
    'pairs=4/accuracy': 0.2,
}


def test_metrics_by_length():
    found = SlicedEvaluation(NUMBERS, {}).by_length()
    assert found == {'loss': {1: 0.1, 2: 0.3, 16: 2.0}, 'accuracy': {1: 0.9, 2: 0.7, 16: 0.5}}


def test_figures(tmp_path):
    SlicedEvaluation(NUMBERS, {'accuracy': {'1x': np.linspace(0, 1, 9), '2x': np.ones(1)}}).draw(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        'lengths.csv',
        'lengths.png',
        'position_accuracy.csv',
        'position_accuracy.png',
    ]
    SlicedEvaluation({'1x/loss': 1.0, 'all/loss': 2.0}, {'accuracy': {'1x': np.ones(1)}}).draw(tmp_path / 'one')
    assert not (tmp_path / 'one').exists()


@pytest.mark.parametrize(
    ('lengths', 'marked'),
    [({'1x': 9, '2x': 18}, [9]), ({'2x': 18, '1x': 9}, [9]), ({'2x': 18, '4x': 36}, []), ({'1x': 9, 'pairs=4': 9}, [])],
)
def test_what_is_trained_on_is_marked_where_it_is_and_there_are_longer_ones(lengths, marked, tmp_path, monkeypatch):
    lines = lines_drawn(monkeypatch)
    curves = {name: np.ones(length) for name, length in lengths.items()}
    SlicedEvaluation({}, {'accuracy': curves}).draw(tmp_path)
    assert [line.get_xdata()[0] for line in lines if line.get_label() == 'labels in training'] == marked


def test_forecasts_are_by_step_ahead_and_their_line_is_the_horizon(tmp_path, monkeypatch):
    lines = lines_drawn(monkeypatch)
    monkeypatch.setattr(
        by_slice, 'totals', lambda setup, _, source, length: {'position_mse': by_place(len(source[0]['targets']))}
    )
    setup = prepare(series.get_config('system=linear,lookback=24,horizon=4'))
    found = BySlice(AtEnd(), multiples=(1, 2), examples=2).evaluate(setup, nnx.State({}))
    found.draw(tmp_path)
    marked = [line for line in lines if line.get_label() == 'horizon']
    assert [line.get_xdata()[0] for line in marked] == [4] and marked[0].axes.get_xlabel() == 'step ahead'


def by_place(count):
    return Average(np.ones(count), np.ones(count))


def lines_drawn(monkeypatch):
    """What is drawn, in place of its files."""
    lines = []
    monkeypatch.setattr(figures, '_write', lambda figure, axes, path: lines.extend(axes.get_lines()))
    return lines
