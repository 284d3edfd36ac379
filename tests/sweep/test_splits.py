"""Sweeps on data without examples for validation alone say so; others say nothing."""

import pathlib

import numpy as np
import pytest
from rich.console import Console

from attnlab.cli import main
from attnlab.compare.report.comparison import compare, print_comparison
from attnlab.configuration import config_of
from attnlab.data.long_range.drawn import Drawn
from attnlab.errors import UserError
from attnlab.sweep import launch
from attnlab.sweep.splits import without_own_split
from attnlab.sweep.sweep import rates_config, read
from attnlab.tables import Printer

CONFIGS = pathlib.Path(__file__).parents[2] / 'configs'
SERIES = CONFIGS / 'sweeps' / 'series.py'
SAID = 'chooses and reports on the same examples: {} has none for validation alone'


@pytest.mark.parametrize('own', [False, True])
def test_a_sweep_and_a_comparison_say_what_chooses_and_is_reported(tmp_path, capsys, monkeypatch, own):
    x, label = np.random.default_rng(0).normal(size=(30, 8)), np.arange(30) % 2
    ends = {'train': 20, 'test': 5} | ({'valid': 5} if own else {})
    arrays = {f'{name}_{end}': of[:n] for name, of in (('x', x), ('label', label)) for end, n in ends.items()}
    np.savez(tmp_path / 'windows.npz', **arrays)
    monkeypatch.setattr(launch, 'run_processes', lambda *_: True)
    config = f'--config=sweeps/series:task=classification,zoo=mingru,data={tmp_path / "windows.npz"}'
    assert main(['sweep', config, f'--study={tmp_path / "study"}']) == 0
    assert (SAID.format('its data set') in capsys.readouterr().out) != own
    found = compare([tmp_path / 'study'], 'params', 0.01)
    print_comparison(found, Printer(Console(width=200)))
    printed = capsys.readouterr().out
    assert (f'study {SAID.format("LabelledWindows")}' in printed) != own
    assert own or printed.index('same examples') < printed.index('trials')


def test_text_of_the_arena_validates_on_its_test_split():
    def sweep(task):
        base = config_of(CONFIGS / 'long_range.py', f'task={task},size=full')
        test, valid = (base.evals[0].copy_and_resolve_references() for _ in range(2))
        test.split, test.name, valid.split, valid.name = 'test', 'test', 'valid', 'valid'
        with base.unlocked():
            base.evals = (test, valid)
        return read(rates_config(base, (1e-3,), metric='valid/all/loss', reported='test/all/loss'))

    assert without_own_split(sweep('imdb')) and not without_own_split(sweep('aan'))


def test_of_data_that_are_not_here_nothing_is_said(monkeypatch):
    def gone(*_):
        raise UserError('there is no such file')

    sweep = read(config_of(SERIES, 'task=classification,zoo=mingru'))
    monkeypatch.setattr(Drawn, 'same_rows', lambda *_: True)
    assert without_own_split(sweep)
    monkeypatch.setattr(Drawn, 'same_rows', gone)
    assert not without_own_split(sweep)
