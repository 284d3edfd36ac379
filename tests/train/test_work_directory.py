"""What a work directory keeps out: other data, other processes, configs that cannot run."""

import json
import pathlib
import subprocess
import sys

import pytest

from attnlab import cli
from attnlab.data.text.tokenizers import load_tokenizer
from attnlab.errors import UserError
from attnlab.train import run

LANGUAGE = pathlib.Path(__file__).parents[2] / 'configs' / 'language.py'


@pytest.fixture
def trained(tmp_path, capsys):
    """Trains two steps on a text in byte pairs; returns what gives the same command again, and the text."""
    text = tmp_path / 'text.txt'
    text.write_text('one and two and three and four and five\n' * 400)
    argv = [
        'train',
        f'--config={LANGUAGE}:zoo=mingru,data={text},tokens=bpe',
        f'--workdir={tmp_path / "run"}',
        *('--config.steps=2', '--config.batch_size=2', '--config.length=16', '--config.model.dim=16'),
        *('--config.model.stack.depth=1', '--config.evals=()', '--config.task.tokenizer.vocab=264'),
        *(f'--config.task.text.cache={tmp_path / "cache"}', '--compilation_cache='),
    ]
    assert cli.main(argv) == 0
    capsys.readouterr()
    return argv, text, tmp_path / 'run'


def test_another_text_is_refused_and_the_tokenizer_stays(trained, capsys):
    argv, text, workdir = trained
    tokenizer = load_tokenizer(workdir / 'tokenizer.json')
    before = json.loads((workdir / 'run.json').read_text())['starts'][-1]['data']['content_hash']
    text.write_text('six or seven or eight or nine\n' * 400)
    for command in (
        argv,
        ['eval', f'--workdir={workdir}', '--compilation_cache='],
        ['analyse', f'--workdir={workdir}'],
    ):
        assert cli.main(command) == 2
        message = capsys.readouterr().err
        assert before in message and '--other_data' in message
    assert not (workdir / 'evals').exists()
    evaluate = ['eval', f'--workdir={workdir}', '--multiples=1', '--tokens=64', '--compilation_cache=']
    assert cli.main([*evaluate, '--other_data']) == 0
    assert json.loads((workdir / 'evals' / '2-64-tokens.json').read_text())['other_data']
    assert cli.main([*argv, '--other_data']) == 0
    starts = json.loads((workdir / 'run.json').read_text())['starts']
    assert [start['other_data'] for start in starts] == [False, True]
    assert starts[1]['data']['content_hash'] != before
    assert load_tokenizer(workdir / 'tokenizer.json').hash == tokenizer.hash == starts[1]['data']['tokenizer']['hash']


def test_one_process_at_a_time(tmp_path):
    holder = (
        'import pathlib, sys; from attnlab.train import run\n'
        f'with run.held(pathlib.Path({str(tmp_path)!r})):\n    print("held", flush=True); sys.stdin.read()'
    )
    with subprocess.Popen(
        [sys.executable, '-c', holder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == 'held\n'
        with pytest.raises(UserError, match=f'is being trained in by process {other.pid} on '), run.held(tmp_path):
            pass
        other.kill()
    with run.held(tmp_path):
        assert (tmp_path / 'lock').exists()


@pytest.mark.parametrize(
    ('override', 'message'),
    [
        ('model.stack.blocks[0].mixer.heads=5', 'heads'),
        ('checkpoint.every=-1', 'config.checkpoint.every is -1; it must be a whole number of at least 1'),
    ],
)
def test_a_config_that_cannot_run_leaves_no_trace(tmp_path, capsys, override, message):
    text = tmp_path / 'text.txt'
    text.write_text('one and two and three\n' * 400)
    argv = ['train', f'--config={LANGUAGE}:data={text}', f'--workdir={tmp_path / "run"}', '--compilation_cache=']
    assert cli.main([*argv, f'--config.{override}']) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / 'run').exists()
