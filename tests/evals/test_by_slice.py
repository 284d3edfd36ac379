"""What an evaluation by slices shows: a figure of every metric by label, and one of all metrics by length."""

import numpy as np

from attnlab.evals.by_slice import SlicedEvaluation

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
