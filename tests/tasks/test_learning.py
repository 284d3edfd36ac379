"""Families of tasks, learned through the command line."""

import json

import pytest

from attnlab.cli import main


def trained(tmp_path, argument, *overrides):
    """The last evaluation of a run, by `slice/metric`."""
    workdir = tmp_path / 'run'
    assert main(['train', f'--config=configs/recall.py:{argument}', f'--workdir={workdir}', *overrides]) == 0
    lines = [json.loads(line) for line in (workdir / 'metrics.jsonl').read_text().splitlines()]
    (last,) = [line for line in lines if 'test/1x/loss' in line]
    return {name.removeprefix('test/'): value for name, value in last.items()}


def short(steps):
    return (f'--config.steps={steps}', f'--config.evals[0].cadence.n={steps}', '--config.evals[0].examples=128')


@pytest.mark.slow
def test_attention_learns_to_recall(tmp_path, capsys):
    found = trained(
        tmp_path,
        'task=mqar,zoo=mha',
        *short(200),
        '--config.task.problem.vocab=32',
        '--config.task.problem.pairs=(3,)',
        '--config.length=16',
        '--config.optimizer.peak_lr=5e-3',
        '--config.evals[0].multiples=(1,2)',
    )
    assert found['1x/accuracy'] > 0.9 and found['2x/accuracy'] > 0.8
    workdir = f'--workdir={tmp_path / "run"}'
    capsys.readouterr()
    assert main(['eval', workdir, '--multiples=1,2', '--examples=128']) == 0
    said = capsys.readouterr().out
    assert 'pairs=3' in said and 'exact match' in said and 'position_accuracy.png' in said
    written = json.loads((tmp_path / 'run' / 'evals' / '200.json').read_text())
    for name in ('1x/loss', '2x/accuracy'):
        assert written[name] == pytest.approx(found[name], rel=1e-5)
    assert main(['eval', workdir, '--tokens=5']) == 2
    assert '--tokens does not apply to LabelPrediction, which takes --examples' in capsys.readouterr().err
    assert main(['generate', workdir, '--prompt=a']) == 2
    assert 'was trained for LabelPrediction, not on text' in capsys.readouterr().err
    assert 'train/accuracy' in (tmp_path / 'run' / 'metrics.jsonl').read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ('argument', 'steps', 'least'),
    [
        ('task=mqar', 1000, 0.95),
        ('task=overwritten', 1000, 0.9),
        ('task=selective_copying', 1000, 0.95),
        ('task=induction', 1000, 0.95),
        ('task=copying', 1000, 0.95),
        ('task=max_retrieval', 400, 0.9),
        ('task=z2,zoo=rg_lru', 500, 0.95),
    ],
)
def test_every_family_is_learned(tmp_path, argument, steps, least):
    assert trained(tmp_path, argument, *short(steps))['1x/accuracy'] > least


@pytest.mark.slow
def test_regression_is_learned_better_than_a_gradient_step(tmp_path):
    found = trained(tmp_path, 'task=regression', *short(3000))
    assert found['1x/ridge'] < found['1x/loss'] < found['1x/gradient_step'] < found['1x/zero']
