"""What a sweep would run is printed, and nothing is started."""

import json

import pytest
from rich.console import Console

from attnlab.cli import main
from attnlab.config import spec
from attnlab.errors import UserError
from attnlab.sweep.plan import print_sweep
from attnlab.sweep.space import Zip
from attnlab.sweep.sweep import read
from attnlab.tables import Printer
from tests.sweep import tiny


def test_a_dry_run_says_what_would_run_and_starts_nothing(tmp_path, capsys):
    words = ('sampler=quasi,trials=8,steps=40,confirm=2', f'--study={tmp_path / "study"}', '--compilation_cache=')
    assert main(['sweep', f'--config={tiny.__file__}:{words[0]}', *words[1:], '--dry_run', '--format=json']) == 0
    found = json.loads(capsys.readouterr().out)
    assert not (tmp_path / 'study').exists()
    assert [(row['dimension'], row['sets'], row['values']) for row in found['space']] == [
        ('decay', 'optimizer.weight_decay', '0, 0.1'),
        ('rate', 'optimizer.peak_lr', '0.001 to 0.01'),
    ]
    facts = {row['name']: row['value'] for row in found['sweep']}
    assert (facts['trials'], facts['steps of a trial, at most'], facts['steps of all, at most']) == (8, 40, 400)
    assert facts['sampler'] == 'QuasiRandom' and facts['chosen by'] == 'valid/loss, min'
    assert {'model FLOPs a token', 'model FLOPs a step'} <= {row['what'] for row in found['cost']}
    assert {row['what'] for row in found['memory']} >= {'train state', 'in all'}


def test_of_other_programs_than_that_of_the_base_it_says_so(capsys):
    config = tiny.get_config('sampler=grid')
    with config.unlocked():
        config.space.width = spec(Zip, together=('model.dim', 'batch_size'), rows=((8, 4), (16, 2)))
    print_sweep(read(config), Printer(Console(soft_wrap=True), 'plain'))
    shown = capsys.readouterr().out
    assert 'width\tmodel.dim, batch_size\tZip\t8 and 4, 16 and 2' in shown and 'trials\t16' in shown
    assert 'of the base; the space sets batch_size, model.dim, and a trial has its own' in shown


def test_mistakes_are_named_before_anything_is_printed(capsys):
    config = tiny.get_config()
    with config.unlocked():
        config.metric = 'test/loss'
    with pytest.raises(UserError, match=r'config\.metric is test/loss, and there is no evaluator test'):
        print_sweep(read(config), Printer(Console(), 'plain'))
    assert main(['sweep', f'--config={tiny.__file__}', '--study=nowhere', '--format=json']) == 2
    said = capsys.readouterr()
    assert not said.out and '--format is for tables, which a sweep does not print' in said.err
