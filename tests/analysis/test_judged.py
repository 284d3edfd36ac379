"""A classifier's judgement of images that a diffusion model draws."""

import json

import numpy as np
import pytest

from attnlab.analysis.judged import Judgement
from attnlab.cli import main

SMALL = (
    *('--config.model.dim=8', '--config.model.stack.depth=1', '--config.batch_size=4', '--config.steps=2'),
    *('--config.evals[0].examples=4', '--config.report.tensorboard=False', '--compilation_cache='),
)


def test_a_judge_that_is_sure_and_sees_every_class_alike_scores_as_many_as_there_are():
    logits = 40.0 * np.eye(4)[np.tile(np.arange(4), 5)]
    found = Judgement.of(logits, np.tile([0, 1, 2, 0], 5))
    assert found.confidence == pytest.approx(1) and found.score == pytest.approx(4) and found.accuracy == 0.75
    assert found.numbers(np.full(4, 0.25))['classes_error'] == pytest.approx(0)
    one = Judgement.of(logits[:1].repeat(6, axis=0), None)
    assert one.score == pytest.approx(1) and 'accuracy' not in one.numbers(np.full(4, 0.25))
    assert one.numbers(np.full(4, 0.25))['classes_error'] == pytest.approx(0.75)
    unsure = Judgement.of(np.zeros((3, 4)), None)
    assert unsure.confidence == 0.25 and unsure.score == pytest.approx(1)


def test_what_the_score_is_between_is_its_definition():
    logits = np.random.default_rng(0).normal(size=(50, 3))
    likely = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    mean = likely.mean(axis=0)
    expected = np.exp(np.mean(np.sum(likely * np.log(likely / mean), axis=1)))
    assert Judgement.of(logits, None).score == pytest.approx(expected)


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
    pytest.importorskip('sklearn')
    folder = tmp_path_factory.mktemp('judged')
    drawing = ('predict=v,given=label', '--config.optimizer.ema=0.9', '--config.evals[1].steps=2')
    for name, (arguments, *flags) in {'drawing': drawing, 'judge': ('',)}.items():
        config = f'--config=configs/images.py:{arguments}'
        assert main(['train', config, *SMALL, *flags, f'--workdir={folder / name}']) == 0
    return folder


def test_a_run_judges_what_another_draws(runs, capsys):
    command = ['eval', f'--workdir={runs / "drawing"}', f'--judge={runs / "judge"}', '--examples=10', '--ema']
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert 'accuracy' in shown and 'classes error' in shown and 'mean error' in shown
    found = json.loads((runs / 'drawing' / 'evals' / '2-ema-judged.json').read_text())
    assert (found['ema'], found['examples'], found['judge_step'], found['split']) == (True, 10, 2, 'test')
    for name in ('accuracy', 'confidence', 'score', 'classes_error', 'mean_error', 'deviation_error'):
        assert 0 <= found[name] <= 10 and 0 <= found[f'{name}_of_data'] <= 10
    assert (runs / 'drawing' / 'evals' / '2-ema-judged' / 'drawn.png').exists()
    assert main([*command, '--reuse=0.2']) == 0
    few = json.loads((runs / 'drawing' / 'evals' / '2-ema-judged-reuse0.2.json').read_text())
    assert few['reuse']['share'] == 0.2 and 'reuse' not in found
    # Both of two steps are among the first, which read all keys.
    assert few['mean_error'] == pytest.approx(found['mean_error'], rel=1e-4)
    # Of another number of images it does not take the place of these.
    assert main([word.replace('examples=10', 'examples=5') for word in command]) == 0
    fewer = json.loads((runs / 'drawing' / 'evals' / '2-ema-judged-1.json').read_text())
    assert fewer['examples'] == 5 and (runs / 'drawing' / 'evals' / '2-ema-judged-1' / 'drawn.png').exists()
    assert json.loads((runs / 'drawing' / 'evals' / '2-ema-judged.json').read_text()) == found


def test_mistakes_are_named(runs, capsys):
    drawing, judging = f'--workdir={runs / "drawing"}', f'--judge={runs / "judge"}'
    for arguments, message in (
        ((f'--workdir={runs / "judge"}', judging), '--judge is for runs that draw images; '),
        (
            (drawing, f'--judge={runs / "drawing"}'),
            f'--judge must name a classifier, with one label a row; {runs / "drawing"} was trained for Diffusion',
        ),
        (
            (drawing, '--reuse=0.2'),
            '--reuse is for a run that draws images, which --judge=RUN has another run classify',
        ),
        ((drawing, judging, '--reuse=3'), 'share of Reuse is 3.0; it must be above 0 and at most 2, which is all'),
        ((drawing, judging, '--tokens=5'), '--tokens is for what a task asks; with --judge a run draws images'),
    ):
        assert main(['eval', *arguments]) == 2
        assert message in capsys.readouterr().err
