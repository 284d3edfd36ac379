"""Recordings that come along with matplotlib."""

import hashlib

import matplotlib
import numpy as np
import pytest

from attnlab.data.series.baselines import baselines
from attnlab.data.series.shipped import SHIPPED, ShippedSeries
from attnlab.data.series.windows import Windows, scaled
from attnlab.errors import UserError


def test_a_membrane_is_at_rest_spikes_and_is_at_rest_again():
    """In millivolts: within what nerve cells have, and still at both ends alone."""
    series = ShippedSeries('membrane')
    values = series.values()
    assert values.shape == (12000, 1) and series.names == ('potential',) and series.dates() is None
    assert -70 < values.min() < -60 and 0 < values.max() < 10
    spread = values.reshape(12, 1000).std(axis=1)
    assert spread[0] < 1 and np.all(spread[1:11] > 5) and spread[11] < 5
    assert {split: len(Windows(scaled(series), split, 96, 96)) for split in ('train', 'valid', 'test')} == {
        'train': 8400 - 192 + 1,
        'valid': 1200 - 96 + 1,
        'test': 2400 - 96 + 1,
    }


def test_columns_of_electrodes():
    every = ShippedSeries('eeg')
    values = every.values()
    assert values.shape == (800, every.variates) == (800, 4)
    np.testing.assert_array_equal(ShippedSeries('eeg', columns=('PG9', 'PG3')).values(), values[:, [3, 0]])
    assert every.describe()['content'] == hashlib.sha256(every.path().read_bytes()).hexdigest()
    with pytest.raises(UserError, match='the valid split has 80 rows, and 96 before it are read; look-back 96 and'):
        Windows(scaled(every), 'valid', 96, 96)


def test_a_linear_map_forecasts_a_recording_better_than_its_last_value():
    """The mean squared errors on test that docs and experiments name, at a look-back and horizon of 96."""
    series = ShippedSeries('membrane')
    windows = Windows(scaled(series), 'test', 96, 96)
    past, targets = (np.stack([windows[i][name] for i in range(len(windows))]) for name in ('tokens', 'targets'))
    found = {
        name: np.mean((baseline.forecast(past, 96, past[:, :, :0]) - targets) ** 2)
        for name, baseline in baselines(series, 96, 96).items()
    }
    assert found.keys() == {'repeat_last', 'ridge', 'ridge_last_value', 'ridge_instance_norm'}
    for name, value in (('repeat_last', 0.567), ('ridge', 0.523), ('ridge_last_value', 0.494)):
        assert found[name] == pytest.approx(value, abs=0.001)


def test_mistakes_are_named(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="there is no recorded series 'membran'; did you mean 'membrane'"):
        ShippedSeries('membran')
    with pytest.raises(UserError, match="eeg has no column 'PG4'; did you mean 'PG"):
        ShippedSeries('eeg', columns=('PG4',))
    monkeypatch.setattr(matplotlib, 'get_data_path', lambda: str(tmp_path))
    with pytest.raises(UserError, match=r'membrane comes with matplotlib, and .*membrane\.dat is not there'):
        ShippedSeries('membrane').values()
    (tmp_path / 'sample_data').mkdir()
    (tmp_path / 'sample_data' / SHIPPED['membrane'].file).write_bytes(b'\0' * 48)
    with pytest.raises(UserError, match='is not the recording that membrane was'):
        ShippedSeries('membrane').values()
