"""Figures of a run, and the numbers in them."""

from attnlab.train.figures import cost_curves, loss_curve


def test_losses_have_their_numbers_beside_them(tmp_path):
    lines = [{'step': 1, 'train/loss': 2.5}, {'step': 2, 'train/loss': 2.25, 'valid/loss': 2.75}]
    loss_curve(lines, tmp_path / 'loss.png')
    found = (tmp_path / 'loss.csv').read_text().splitlines()
    assert found == ['curve,step,value', 'train/loss,1,2.5', 'train/loss,2,2.25', 'valid/loss,2,2.75']
    assert (tmp_path / 'loss.png').stat().st_size > 1000


def test_metrics_over_operations(tmp_path):
    curves = {'all/accuracy': {'1': 0.9, '2': 0.85}}
    cost_curves(curves, {'1': 200.0, '2': 150.0}, tmp_path / 'reductions.png')
    found = (tmp_path / 'reductions.csv').read_text().splitlines()
    assert found == ['metric,way,operations,value', 'all/accuracy,1,200.0,0.9', 'all/accuracy,2,150.0,0.85']
