"""Figures of a run, and the numbers in them."""

import numpy as np
import pytest

from attnlab import figures
from attnlab.figures import (
    canvas,
    cost_curves,
    forecast_panels,
    layer_curves,
    loss_curve,
    position_curves,
    save,
    spectrum_curves,
)


@pytest.fixture
def axes(monkeypatch):
    """The axes that are drawn, in place of their files."""
    found = []
    monkeypatch.setattr(figures, '_write', lambda figure, axes, path: found.append(axes))
    return found


def of(name, values, every=1):
    return [{'step': every * place, name: value} for place, value in enumerate(values, 1)]


def test_losses_have_their_numbers_beside_them(tmp_path):
    lines = [{'step': 1, 'train/loss': 2.5}, {'step': 2, 'train/loss': 2.25, 'valid/loss': 2.75}]
    loss_curve(lines, tmp_path / 'loss.png')
    found = (tmp_path / 'loss.csv').read_text().splitlines()
    assert found == ['curve,step,value', 'train/loss,1,2.5', 'train/loss,2,2.25', 'valid/loss,2,2.75']
    assert (tmp_path / 'loss.png').stat().st_size > 1000


CURVES = {
    'a fall below zero': (np.linspace(2, -12, 60), [-3.0, -11.0], (-12, 2)),
    'all below zero': (np.linspace(-2, -12, 60), [-3.0, -11.0], (-12, -2)),
    'learned late': (4.7 * np.exp(-np.arange(300) / 10), [6.0] * 20 + [3.0, 0.5, 0.0], (0, 6)),
    'zero everywhere else': (np.zeros(50), [5.0, 4.0], (0, 5)),
    'far off at first, and once more': ([50.0] * 2 + [2.0, 1.5] * 40 + [1e6], [2.5], (1.5, 3.5)),
    'one number': ([3.0], [3.0], (3, 3)),
}
"""Losses of training, of a test, and the range that is to be seen of them."""


@pytest.mark.parametrize('name', CURVES)
def test_all_of_an_evaluation_is_within_the_limits_and_so_is_training_but_for_what_is_far_off(name, axes, tmp_path):
    training, test, (low, high) = CURVES[name]
    training = [float(value) for value in training]
    loss_curve(of('train/loss', training) + of('test/1x/loss', test, 10), tmp_path / 'loss.png')
    margin = 0.1 * (high - low) or 0.5
    assert axes[0].get_ylim() == pytest.approx((low - margin, high + margin))
    assert [line.get_label() for line in axes[0].get_lines()] == ['train, as minimised', 'test/1x']


@pytest.mark.parametrize('first', ['nan', 'inf', 3.0])
def test_losses_that_are_not_finite_are_gaps_in_a_curve_of_numbers(first, axes, tmp_path):
    lines = of('test/4x/loss', [first, 2.0, 'nan'], 10) + of('train/loss', [4.0, 3.0])
    loss_curve(lines, tmp_path / 'loss.png')
    there, training = axes[0].get_lines()
    np.testing.assert_array_equal(there.get_ydata(), [float(first), 2.0, np.nan])
    np.testing.assert_array_equal(training.get_ydata(), [4.0, 3.0])
    assert axes[0].get_ylim() == pytest.approx((1.8, 4.2)) and not axes[0].yaxis.have_units()
    assert (tmp_path / 'loss.csv').read_text().splitlines()[3] == 'test/4x/loss,30,nan'


def test_a_run_of_which_nothing_is_finite_has_a_figure(tmp_path):
    loss_curve(of('train/loss', ['nan', 'inf']), tmp_path / 'loss.png')
    assert (tmp_path / 'loss.png').stat().st_size > 1000


def test_what_is_drawn_has_its_own_name(axes, tmp_path):
    loss_curve(of('train/loss', [2.0]), tmp_path / 'loss.png')
    loss_curve([{'step': 1, 'train/loss': 2.0, 'train/bits_per_byte': 1.0}], tmp_path / 'loss.png')
    assert [found.get_ylabel() for found in axes] == ['loss', 'bits per byte']


def test_metrics_over_operations(tmp_path):
    curves = {'all/accuracy': {'1': 0.9, '2': 0.85}}
    cost_curves(curves, {'1': 200.0, '2': 150.0}, tmp_path / 'reductions.png')
    found = (tmp_path / 'reductions.csv').read_text().splitlines()
    assert found == ['metric,way,operations,value', 'all/accuracy,1,200.0,0.9', 'all/accuracy,2,150.0,0.85']


@pytest.mark.parametrize('depth', [1, 2, 12])
def test_layers_are_whole_numbers_on_their_axis(depth, tmp_path, monkeypatch):
    found = []
    monkeypatch.setattr(figures, 'save', lambda figure, path: found.extend(figure.axes))
    layer_curves({'kurtosis': [3.0] * depth}, tmp_path / 'layers.png')
    low, high = found[0].get_xlim()
    ticks = [tick for tick in found[0].get_xticks() if low <= tick <= high]
    assert ticks[0] == 0 and all(tick == round(tick) for tick in ticks) and len(ticks) <= depth


def test_what_has_no_power_is_not_named_and_leaves_others_their_colours(axes, tmp_path):
    powers = {'truth': np.ones(3), 'repeat_last': np.zeros(3), 'seasonal_naive': np.array([0.0, 1.0, 2.0])}
    spectrum_curves(np.arange(1, 4), powers, tmp_path / 'spectra.png', truth='truth')
    found = {line.get_label(): line.get_color() for line in axes[0].get_lines()}
    assert found == {'truth': '0', 'seasonal naive': 'C1'}


def test_a_constant_has_a_figure_of_its_spectrum(tmp_path):
    spectrum_curves(np.arange(1, 4), {'truth': np.zeros(3)}, tmp_path / 'spectra.png', truth='truth')
    assert (tmp_path / 'spectra.png').stat().st_size > 1000


@pytest.mark.parametrize('name', ['bid $^$ ask', r'a$\b$'])
def test_names_have_dollar_signs(name, tmp_path):
    two, three = np.zeros(2), np.zeros(3)
    panels = [(f'window 1, {name}', two, {'truth': three, name: three}, (three, three))]
    forecast_panels(panels, tmp_path / 'forecasts.svg', truth='truth', interval=name)
    cost_curves({name: {name: 1.0}}, {name: 1.0}, tmp_path / 'costs.svg')
    spectrum_curves(np.arange(1, 4), {name: np.ones(3)}, tmp_path / 'spectra.svg', truth='truth')
    position_curves({name: np.ones(8)}, tmp_path / 'positions.svg', trained=4, mark=name, x=name, y=name)
    loss_curve(of(f'{name}/loss', (1.0, 2.0)), tmp_path / 'loss.svg')
    for path in tmp_path.glob('*.svg'):
        assert f'<!-- {name}' in path.read_text() or f', {name} -->' in path.read_text()


def test_ticks_of_a_logarithm_are_powers(tmp_path):
    figure = canvas(3.0, 2.0)
    axes = figure.add_subplot(title='cost in $')
    axes.plot([1.0, 100.0])
    axes.set_yscale('log')
    save(figure, tmp_path / 'powers.png')
    assert not axes.title.get_parse_math()
    assert all(label.get_parse_math() and '10^' in label.get_text() for label in axes.get_yticklabels())
