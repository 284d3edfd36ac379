"""What an evaluation by slices shows: a figure of every metric by label, and one of all metrics by length."""

import numpy as np
import pytest

from attnlab.evals.by_slice import SlicedEvaluation
from attnlab.train import figures

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
def test_the_training_length_is_marked_where_it_is_and_there_are_longer_ones(lengths, marked, tmp_path, monkeypatch):
    lines = []
    monkeypatch.setattr(figures, '_write', lambda figure, axes, path: lines.extend(axes.get_lines()))
    curves = {name: np.ones(length) for name, length in lengths.items()}
    SlicedEvaluation({}, {'accuracy': curves}).draw(tmp_path)
    assert [line.get_xdata()[0] for line in lines if line.get_label() == 'training length'] == marked
