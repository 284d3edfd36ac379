"""Embedding-free attention with fewer keys than in training."""

import json

import pytest

from attnlab.analysis.reductions import reduced
from attnlab.cli import main
from attnlab.runs.loading import load_run

SMALL = (
    *('--config.model.dim=8', '--config.model.stack.depth=1', '--config.batch_size=4', '--config.steps=2'),
    *('--config.evals[0].examples=8', '--config.report.tensorboard=False', '--compilation_cache='),
)


@pytest.fixture(scope='module')
def run(tmp_path_factory):
    pytest.importorskip('sklearn')
    folder = tmp_path_factory.mktemp('reduced')
    for name in ('embedding_free', 'pvt'):
        config = f'--config=configs/images.py:zoo={name}'
        assert main(['train', config, *SMALL, f'--workdir={folder / name}']) == 0
    return folder


def test_metrics_over_operations(run, capsys):
    workdir = run / 'embedding_free'
    assert main(['eval', f'--workdir={workdir}', '--factors=1,2,4', '--compilation_cache=']) == 0
    assert 'operations a token' in capsys.readouterr().out
    found = json.loads((workdir / 'evals' / '2-reduced.json').read_text())
    assert set(found['factors']) == {'1', '2', '4'} and 0 <= found['factors']['4']['all/accuracy'] <= 1
    # At the ratio of training nothing is changed; with fewer keys the loss is another.
    assert main(['eval', f'--workdir={workdir}', '--compilation_cache=']) == 0
    plain = json.loads((workdir / 'evals' / '2.json').read_text())
    assert found['factors']['1'] == pytest.approx({name: plain[name] for name in found['factors']['1']}, rel=1e-6)
    assert found['factors']['4']['all/loss'] != pytest.approx(plain['all/loss'], rel=1e-6)
    costs = found['operations_a_token']
    # Of 64 tokens and 8 channels: keys are mapped once each, then scored and added up.
    keys = {'1': 16, '2': 4, '4': 1}
    saved = {factor: costs['1'] - cost for factor, cost in costs.items()}
    for factor, count in keys.items():
        assert saved[factor] == pytest.approx((16 - count) * (2 * 8 * 8 / 64 + 4 * 8))
    lines = (workdir / 'evals' / '2-reduced' / 'reductions.csv').read_text().splitlines()
    assert lines[0] == 'metric,way,operations,value' and len(lines) == 1 + 3 * len(found['factors']['1'])
    assert main(['eval', f'--workdir={workdir}', '--factors=2', '--compilation_cache=']) == 0
    assert set(json.loads((workdir / 'evals' / '2-reduced-1.json').read_text())['factors']) == {'2'}
    assert (workdir / 'evals' / '2-reduced-1' / 'reductions.png').exists()
    assert json.loads((workdir / 'evals' / '2-reduced.json').read_text()) == found
    whole = load_run(workdir).model()
    assert reduced(whole, 2).stack.blocks[0].mixer.ratio == 4


def test_mistakes_are_named(run, capsys):
    for flags, sentence in (
        (['--factors=2', f'--workdir={run / "pvt"}'], 'whose keys are reduced without parameters'),
        (['--factors=8', f'--workdir={run / "embedding_free"}'], 'the ratio of reduction is 16; the grid is (8, 8)'),
        (['--factors=2', '--multiples=2', f'--workdir={run / "embedding_free"}'], '--multiples does not go with'),
        (['--factors=0', f'--workdir={run / "embedding_free"}'], "--factors holds '0'"),
    ):
        assert main(['eval', '--compilation_cache=', *flags]) != 0
        assert sentence in capsys.readouterr().err
