"""Windows shown with what is forecast of them, and their spectra."""

import csv
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.cli import main
from attnlab.context import Context
from attnlab.data.series.windows import Windows, scaled
from attnlab.errors import UserError
from attnlab.evals.cadence import AtEnd
from attnlab.evals.forecasts import Forecasts, ShownForecasts, power, spread
from attnlab.train.setup import prepare
from attnlab.train.state import joined, split
from configs.series import get_config

SHOWS = Forecasts(AtEnd(), shown=2, measured=7)


def setup_of(argument):
    config = get_config(f'{argument},lookback=12,horizon=8')
    with config.unlocked():
        config.task.data.rows, config.batch_size = 400, 4
    return prepare(config)


def variables_of(setup):
    _, params, buffers = split(setup.make_model(nnx.Rngs(0)))
    return joined(params, buffers)


def read(path):
    with path.open() as file:
        return list(csv.DictReader(file))


def test_windows_of_the_split_with_what_a_model_and_baselines_forecast(tmp_path):
    """Of a linear model that forecasts zeros; seven windows at equal distances, of which the ends are shown."""
    setup = setup_of('system=linear,data=lorenz')
    found = SHOWS.evaluate(setup, jax.tree.map(jnp.zeros_like, variables_of(setup)))
    windows = Windows(scaled(setup.task.data), 'test', 12, 8)
    assert len(windows) == 73 and spread(73, 7) == [0, 12, 24, 36, 48, 60, 72]
    for number, place in enumerate((0, 72)):
        row = windows[place]
        np.testing.assert_array_equal(found.past[number], row['tokens'])
        np.testing.assert_array_equal(found.forecasts['truth'][number], row['targets'])
        np.testing.assert_array_equal(found.forecasts['repeat_last'][number], np.repeat(row['tokens'][-1:], 8, axis=0))
    assert not found.forecasts['model'].any() and found.interval is None
    truth = np.stack([windows[place]['targets'] for place in spread(73, 7)])
    np.testing.assert_allclose(found.spectra['truth'], power(truth))
    assert found.spectra['truth'].shape == (4,) and not found.spectra['repeat_last'].any()
    # What is constant has no spectrum that could be near or far.
    maps = ['ridge', 'ridge_last_value', 'ridge_instance_norm']
    assert list(found.numbers) == [f'{name}/spectral_distance' for name in maps]
    assert [row[0] for row in found.table('a run').rows] == [name.replace('_', ' ') for name in maps]
    found.draw(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        'forecasts.csv',
        'forecasts.png',
        'spectra.csv',
        'spectra.png',
    ]
    lines = read(tmp_path / 'forecasts.csv')
    assert len(lines) == 2 * (12 + 8)
    second = [line for line in lines if line['window'] == '2']
    assert {line['variate'] for line in second} == {'1'}
    np.testing.assert_allclose([float(line['truth']) for line in second[:12]], found.past[1, :, 1])
    assert [line['step'] for line in second[10:14]] == ['-1', '0', '1', '2'] and second[11]['ridge'] == ''
    ridge = [float(line['ridge']) for line in second[12:]]
    np.testing.assert_allclose(ridge, found.forecasts['ridge'][1, :, 1])
    spectra = read(tmp_path / 'spectra.csv')
    assert [float(line['cycles_per_step']) for line in spectra] == [0.125, 0.25, 0.375, 0.5]


def test_intervals_are_quantiles_of_the_model(tmp_path):
    setup = setup_of('system=nlinear,head=quantiles')
    variables = variables_of(setup)
    found = SHOWS.evaluate(setup, variables)
    low, high = found.interval
    model = nnx.merge(setup.graphdef, variables)
    hidden, _ = model.hidden(jnp.asarray(found.past), Context.full(*found.past.shape[:2]))
    wanted = model.quantiles(hidden, jnp.asarray([0.1, 0.9]))
    np.testing.assert_allclose(low, np.swapaxes(wanted[..., 0, :], 1, 2), atol=1e-5)
    np.testing.assert_allclose(high, np.swapaxes(wanted[..., 1, :], 1, 2), atol=1e-5)
    found.draw(tmp_path)
    last = read(tmp_path / 'forecasts.csv')[-1]
    assert float(last['high']) == pytest.approx(float(high[1, -1, 0]))


def test_a_wave_has_its_power_at_its_frequency():
    """Three cycles in 32 steps, with a quarter or so for their neighbours by the window, and none of the level."""
    wave = np.sin(2 * np.pi * 3 * np.arange(32) / 32).reshape(1, 32, 1)
    found = power(np.concatenate([wave, wave + 5.0]))
    assert found.argmax() == 2 and found[1] == pytest.approx(found[2] / 4, rel=0.1)
    assert found[6:].max() < 1e-3 * found[2]
    twice = {'truth': found, 'model': 4 * found}
    shown = ShownForecasts(wave, {'truth': wave}, None, twice, ('0',))
    assert shown.numbers == {'model/spectral_distance': pytest.approx(10 * np.log10(4), rel=1e-3)}
    alone = ShownForecasts(wave, {'truth': wave[:, :1]}, None, {'truth': power(wave[:, :1])}, ('0',))
    assert alone.numbers == {}


def test_the_config_of_forecasts_ends_with_it_and_mistakes_are_named():
    setup = prepare(get_config('system=linear'))
    assert [type(one).__name__ for one in setup.evals] == ['BySlice', 'BySlice', 'Forecasts']
    setup.evals[2].load_data(setup)
    with pytest.raises(UserError, match='the task is Imputation'):
        SHOWS.load_data(prepare(get_config('task=imputation,system=linear')))
    with pytest.raises(UserError, match='Forecasts has shown 5 and measured 4'):
        Forecasts(AtEnd(), shown=5, measured=4)


def test_forecasts_and_their_spectra_are_drawn_and_counted(tmp_path, capsys):
    """By `attnlab eval` too, of the split that is asked for, each with the numbers in it."""
    config = '--config=configs/series.py:system=nlinear,lookback=24,horizon=8'
    small = ('--config.task.data.rows=400', '--config.steps=2', '--config.batch_size=4', '--config.evals=()')
    flags = ('--config.report.tensorboard=False', '--compilation_cache=')
    assert main(['train', config, *small, *flags, f'--workdir={tmp_path}']) == 0
    assert main(['eval', f'--workdir={tmp_path}', '--split=valid', '--multiples=1', '--compilation_cache=']) == 0
    assert 'spectral distance' in capsys.readouterr().out
    found = json.loads((tmp_path / 'evals' / '2.json').read_text())
    assert found['split'] == 'valid' and found['forecasts/model/spectral_distance'] > 0
    names = {path.name for path in (tmp_path / 'evals' / '2').iterdir()}
    assert {'forecasts.png', 'forecasts.csv', 'spectra.png', 'spectra.csv', 'position_mse.csv'} <= names
