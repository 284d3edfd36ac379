"""Prompts of a user's own, and the commands that take them."""

import json
import shutil

import numpy as np
import pytest

from attnlab.cli import main
from tests.bad_inputs.conftest import LANGUAGE, SMALL, originals

__all__ = ['originals']

TEXT = ('--prompt=one an', '--answer=d')


@pytest.fixture(scope='module')
def runs(originals, tmp_path_factory):
    """Runs of attention and of Mamba-2 on text, and one of tokens that are no text."""
    folder = tmp_path_factory.mktemp('asked')
    text = originals / 'text.txt'
    for name, more in (('nope', ''), ('mamba2', ',size=tiny')):
        config = f'--config={LANGUAGE}:zoo={name}{more},data={text}'
        sizes = [one for one in SMALL if 'depth' not in one and 'dim' not in one]
        sizes += ['--config.model.stack.depth=2', '--config.model.dim=32']
        assert main(['train', config, *sizes, f'--workdir={folder / name}']) == 0
    short = ('--config.steps=2', '--config.batch_size=2', '--config.model.stack.depth=1', '--config.model.dim=16')
    evals = ('--config.evals[0].examples=2', '--config.evals[0].multiples=(1,)', '--config.report.tensorboard=False')
    config = '--config=recall:zoo=mingru,task=facts'
    assert main(['train', config, *short, *evals, '--compilation_cache=', f'--workdir={folder / "facts"}']) == 0
    return folder


def asked(runs, name, *flags):
    return main(['analyse', f'--workdir={runs / name}', *flags, '--compilation_cache='])


def results(runs, name, kind):
    """What was written last: results of other requests stay beside it."""
    written = [path for end in ('', '-[0-9]') for path in (runs / name / 'analysis').glob(f'*-{kind}{end}.json')]
    return json.loads(max(written, key=lambda path: path.stat().st_mtime_ns).read_text())


def test_knockout_of_scores_and_of_inputs(runs, capsys):
    assert asked(runs, 'nope', '--knockout=scores', *TEXT) == 0
    printed = capsys.readouterr().out
    assert (
        "a prompt, asked for 'd': answers with" in printed
        and 'with scores cut from one token to the asking token' in printed
    )
    scores = results(runs, 'nope', 'knockout-scores')
    assert np.shape(scores['by_layer']) == (2, 6) and scores['layers'] == [0, 1] and scores['labels'][0] == "'o'"
    assert asked(runs, 'nope', '--knockout=inputs', *TEXT, '--sources=0,2', '--layers=1', '--targets=4,5') == 0
    assert 'with inputs cut from tokens 0, 2 to tokens 4, 5' in capsys.readouterr().out
    inputs = results(runs, 'nope', 'knockout-inputs')
    assert np.shape(inputs['by_layer']) == (1, 1) and inputs['by_layer'][0] == inputs['everywhere']
    assert inputs['clean'] == pytest.approx(scores['clean'], rel=1e-5)


@pytest.mark.parametrize('part', ['B', 'C', 'conv', 'state'])
def test_knockout_of_parts_of_mamba(runs, part):
    assert asked(runs, 'mamba2', f'--knockout={part}', '--rows=2') == 0
    found = results(runs, 'mamba2', f'knockout-{part}')
    assert np.shape(found['by_layer']) == (2, 16)
    assert np.abs(np.asarray(found['everywhere']) - found['clean']).max() > 0


def test_patching_between_two_prompts(runs, capsys):
    assert asked(runs, 'nope', '--trace', *TEXT, '--other=two an', '--places=residual,mixer.input', '--window=2') == 0
    assert 'mixer.input' in capsys.readouterr().out
    found = results(runs, 'nope', 'trace')
    assert set(found['maps']) == {'residual', 'mixer.input'} and found['window'] == 2
    assert found['prompts'] == ['one an'] and found['others'] == ['two an'] and found['asked'] == [5]


def test_files_of_prompts(runs, tmp_path, capsys):
    files = {'prompts': 'one an\ntwo an\n', 'others': 'two an\none an\n', 'answers': 'd\nd\n'}
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    flags = [f'--{name}={tmp_path / name}' for name in files]
    assert asked(runs, 'nope', '--trace', *flags) == 0
    assert '2 prompts: answers with' in capsys.readouterr().out
    assert asked(runs, 'nope', '--knockout=scores', flags[0], '--answer=d') == 0
    found = results(runs, 'nope', 'knockout-scores')
    assert found['answers'] == ['d', 'd'] and found['answer_tokens'] == [ord('d')] * 2


def test_prompts_of_a_run_without_text_are_numbers(runs, capsys):
    assert asked(runs, 'facts', '--trace', '--prompt=1 2 3 4', '--other=5 6 3 4') == 0
    assert 'a prompt, asked for ' in capsys.readouterr().out
    assert results(runs, 'facts', 'trace')['tokens'] == [[1, 2, 3, 4]]


def test_what_branches_add_to_an_observable(runs, capsys):
    assert asked(runs, 'nope', '--propagate', *TEXT, '--against=x') == 0
    assert 'the logit of the answer less that of the other' in capsys.readouterr().out
    found = results(runs, 'nope', 'propagate')
    names = [
        'embedding',
        *(f'layers[{layer}].{branch}.output' for layer in (0, 1) for branch in ('mixer', 'mlp')),
        'head',
    ]
    assert list(found['adds']) == names and sum(found['adds'].values()) == pytest.approx(found['value'])
    alone = []
    for letter in 'dx':
        assert asked(runs, 'nope', '--propagate', '--prompt=one an', f'--answer={letter}') == 0
        alone.append(results(runs, 'nope', 'propagate')['value'])
    assert alone[0] - alone[1] == pytest.approx(found['value'], rel=1e-4, abs=1e-5)


WRONG = [
    ('mamba2', ('--knockout=scores', *TEXT), 'no layer has a part scores to cut: the mixers are StateSpaceDual'),
    ('nope', ('--knockout=conv', *TEXT), 'no layer has a part conv to cut: the mixers are Attention'),
    ('nope', ('--knockout=scores', *TEXT, '--layers=7'), 'layer 7 is no block with a mixer'),
    ('nope', ('--knockout=scores', *TEXT, '--sources=6'), 'sources holds 6; the prompts have tokens 0 to 5'),
    ('nope', ('--trace', *TEXT, '--other=two'), 'prompt 0 has 6 tokens and other prompt 0 3; give prompts of as many'),
    ('nope', ('--trace', *TEXT, '--other=two an', '--places=mixer.outptu'), "did you mean 'mixer.output'?"),
    ('nope', ('--trace', *TEXT), 'prompts are traced against others: give --other too'),
    ('nope', ('--trace', *TEXT, '--other=one an'), 'prompt 0 and the one it is traced against are the same'),
    ('nope', ('--knockout=scores', '--prompt='), 'the prompt is empty'),
    ('nope', ('--knockout=scores', '--prompt=x', '--answer='), "what is to follow 'x' is empty"),
    ('facts', ('--trace', '--prompt=1 2 x', '--other=1 2 3'), "'1 2 x' is no prompt of this run, which reads no text"),
    ('nope', TEXT[:1], '--prompt is for --trace, --knockout or --propagate, which is not given'),
    ('nope', ('--massive', *TEXT), '--prompt is for --trace, --knockout or --propagate, which is not given'),
    ('nope', ('--knockout=scores', '--answer=d'), '--answer is for prompts of your own; give --prompt, or --prompts'),
    ('nope', ('--knockout=scores', *TEXT, '--rows=3'), '--rows is of the data; leave it out with prompts of your own'),
    ('nope', ('--trace', *TEXT, '--others=missing'), '--others is for --prompts, which is not given'),
    ('nope', ('--knockout=scores', '--prompts=missing'), '--prompts is missing, which cannot be read'),
    ('nope', ('--knockout=scores', *TEXT, '--prompts=missing'), '--prompt is one text and --prompts a file of them'),
    ('nope', ('--inside', '--window=2'), '--window is for --trace or --knockout, which is not given'),
]


@pytest.mark.parametrize(('name', 'flags', 'said'), WRONG)
def test_what_cannot_be_asked_is_said_in_one_line(runs, capsys, name, flags, said):
    assert asked(runs, name, *flags) == 2
    error = capsys.readouterr().err
    assert said in error and error.count('\n') == 1


def test_as_many_others_as_prompts(runs, tmp_path, capsys):
    (tmp_path / 'one').write_text('one an\n')
    (tmp_path / 'two').write_text('one an\ntwo an\n')
    assert asked(runs, 'nope', '--trace', f'--prompts={tmp_path / "two"}', f'--others={tmp_path / "one"}') == 2
    assert 'there are 2 prompts and 1 others; give one of these for each' in capsys.readouterr().err
    shutil.rmtree(tmp_path)
