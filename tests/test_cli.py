"""What the command line says to obvious mistakes: one line, what it was, what would be right."""

import json
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

from attnlab.cli import COMMANDS, main

CONFIG = '--config=configs/language.py:zoo=mingru'
SMALL = (
    '--config.model.dim=8',
    '--config.model.stack.depth=1',
    '--config.length=16',
    '--config.batch_size=4',
    '--config.steps=8',
    '--config.evals[0].tokens=64',
    '--compilation_cache=',
)


def said(capsys, *argv):
    """The one line on standard error of a command that must fail."""
    assert main(list(argv)) == 2
    error = capsys.readouterr().err
    assert error.startswith('attnlab: ') and error.count('\n') == 1, error
    return error


@pytest.fixture
def run(tmp_path):
    """Arguments of a small run in a work directory of its own."""
    return ('train', CONFIG, *SMALL, f'--workdir={tmp_path / "run"}')


def corpus(path, content=None):
    """Arguments that train on a file, written first if it has content."""
    if content is not None:
        path.write_bytes(content)
    return ('train', f'{CONFIG},data={path}', *SMALL, f'--workdir={path.parent / "run"}')


def test_help_and_unknown_commands(capsys):
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith('usage: attnlab COMMAND') and max(map(len, shown.splitlines())) <= 80
    assert all(f'\n  {command} ' in shown for command in COMMANDS)
    assert "there is no command 'trian'; did you mean 'train'?" in said(capsys, 'trian')


@pytest.mark.parametrize('command', sorted(COMMANDS))
def test_every_command_has_help_of_its_own_flags_alone(capsys, command):
    assert main([command, '--help']) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f'usage: attnlab {command}') and '--flagfile' not in shown
    assert max(map(len, shown.splitlines())) <= 80


@pytest.mark.parametrize('command', ['config', 'sweep', 'train'])
def test_help_says_that_configs_have_names_and_keys(capsys, command):
    assert main([command, '--help']) == 0
    usage = ' '.join(capsys.readouterr().out.partition('\n\n')[0].split())
    assert ' --config=NAME[:ARG] ' in usage and ' [--config.KEY=VALUE ...] ' in usage


@pytest.mark.parametrize('command', ['data list', 'data prepare', 'zoo gla'])
def test_a_part_of_a_command_has_help_too(capsys, command):
    assert main([*command.split(), '--help']) == 0
    assert capsys.readouterr().out.startswith(f'usage: attnlab {command.partition(" ")[0]}')


LIGHT = """
import sys
from attnlab.cli import COMMANDS, main
for command in COMMANDS.keys() - {'data'}:
    main([command, '--help'])
    main([command, '--no_such_flag=1'])
print('heavy:', sorted({'grain', 'matplotlib', 'optuna', 'orbax', 'scipy', 'tensorboardX'} & sys.modules.keys()))
"""


def test_help_and_wrong_flags_need_no_heavy_imports():
    done = subprocess.run([sys.executable, '-c', LIGHT], capture_output=True, text=True, check=True)
    assert done.stdout.endswith('heavy: []\n')


def test_compare_has_help_for_runs_and_for_studies(capsys):
    assert main(['compare', '--help']) == 0
    shown = capsys.readouterr().out
    assert all(text in shown for text in ('compare RUN...', '--metric', 'compare STUDY...', '--by'))
    assert 'usage: attnlab compare RUN... ' in said(capsys, 'compare')


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (('--cofig=x.py',), "Unknown command line flag 'cofig'. Did you mean: config"),
        (
            ('--config=configs/languages.py',),
            "there is no config file configs/languages.py; did you mean 'configs/language.py'?",
        ),
        (('--config=configs/language.py:zoo=glaa',), "there is no zoo=glaa; did you mean 'gla'?"),
        (('--config=configs/language.py:zo=gla',), "did you mean 'zoo'?"),
        (('--config=configs/language.py:size=small',), 'there is no size=small'),
        (('--config=configs/language.py:data=stdlb',), "did you mean 'stdlib'?"),
        ((CONFIG, '--config.step=3'), 'the config has no key step; did you mean steps?'),
        ((CONFIG, '--config.model.stack.blocks[0].mixr.x=3'), 'did you mean model.stack.blocks[0].mixer'),
        ((CONFIG, '--config.steps=many'), "config.steps is 'many', of type str; it must be int"),
        ((CONFIG, '--config.steps=2.5'), "config.steps is '2.5', of type str; it must be int"),
        (
            (CONFIG, '--config.optimizer.peak_lr=fast'),
            "config.optimizer.peak_lr is 'fast', of type str; it must be float",
        ),
        (
            (CONFIG, '--workdir=/nowhere', '--config.steps=0'),
            'config.steps is 0; it must be a whole number of at least 1',
        ),
        ((CONFIG, '--config.model=3'), "config.model is '3'; it is a part"),
        (
            (CONFIG, '--config.model.stack.blocks[0].mlp=3'),
            'or override its keys (activation, hidden, target), or leave it out with None',
        ),
        ((CONFIG, '--workdir=/nowhere', '--config.mesh.data=3'), 'needs 3 devices; there are 2'),
        ((CONFIG, '--workdir=/nowhere', '--config.batch_size=3'), 'config.batch_size, 3, does not divide'),
        ((CONFIG,), '--workdir is missing'),
        ((), '--config is missing'),
    ],
)
def test_mistakes_in_the_command(capsys, arguments, message):
    assert message in said(capsys, 'train', *arguments, '--compilation_cache=')


@pytest.mark.parametrize(
    ('command', 'remedy'),
    [('train', 'config.accumulate'), ('eval', '--multiples=1'), ('generate', '--prompts'), ('quantize', 'or shorter')],
)
def test_a_device_with_too_little_memory_is_one_line(capsys, monkeypatch, command, remedy):
    def full(argv):
        raise jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes.\nLargest program:\n...')

    monkeypatch.setitem(COMMANDS, command, full)
    line = said(capsys, command)
    assert 'too little memory: RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes.; ' in line and remedy in line


def test_a_model_that_no_memory_holds_is_one_line_to_the_end_of_the_process(run):
    argv = [item for item in run if not item.startswith('--config.model.dim=')]
    words = [*argv, '--config.model.dim=2000000', '--platform=cpu']
    done = subprocess.run([sys.executable, '-m', 'attnlab', *words], capture_output=True, text=True)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith('attnlab: the device has too little memory: ') and 'Out of memory allocating' in line


def test_a_kernel_that_cannot_serve_is_one_line(capsys, tmp_path):
    argv = ('--config=configs/language.py:size=tiny,zoo=gla', f'--workdir={tmp_path}/run', '--compilation_cache=')
    line = said(capsys, 'train', *argv, '--config.model.stack.blocks[0].mixer.implementation=mosaic_gpu')
    assert "linear_attention: implementation 'mosaic_gpu' cannot serve: the platform is cpu; None takes" in line


def test_any_other_error_of_jax_keeps_its_traceback(monkeypatch):
    def broken(argv):
        raise jax.errors.JaxRuntimeError('INTERNAL: a bug')

    monkeypatch.setitem(COMMANDS, 'train', broken)
    with pytest.raises(jax.errors.JaxRuntimeError, match='a bug'):
        main(['train'])


def test_a_part_can_be_overridden_or_taken_out(capsys):
    assert (
        main(
            [
                'train',
                CONFIG,
                *SMALL,
                '--config.model.stack.blocks[0].mlp=None',
                '--config.optimizer.clip=None',
                '--dry_run',
            ]
        )
        == 0
    )
    assert 'mlp' not in capsys.readouterr().out.replace('mlp_', '')


def test_a_work_directory_of_another_config_is_refused_with_the_keys(capsys, run, tmp_path):
    assert main(list(run)) == 0
    before = {path: path.read_bytes() for path in (tmp_path / 'run').rglob('*') if path.is_file()}
    other = [item.replace('steps=8', 'steps=9') for item in run]
    message = said(capsys, *other, '--config.seed=1')
    assert 'steps: 8 there, 9 here' in message and 'seed: 0 there, 1 here' in message
    assert {path: path.read_bytes() for path in (tmp_path / 'run').rglob('*') if path.is_file()} == before


def test_a_directory_that_is_no_run_is_left_alone(capsys, run, tmp_path):
    (tmp_path / 'run').mkdir()
    (tmp_path / 'run' / 'thesis.tex').write_text('precious')
    assert 'is not empty and holds no config.json' in said(capsys, *run)
    assert [path.name for path in (tmp_path / 'run').iterdir()] == ['thesis.tex']


def test_corpora_that_cannot_be_used(capsys, tmp_path):
    assert str(tmp_path / 'none.txt') in said(capsys, *corpus(tmp_path / 'none.txt'))
    assert 'empty.txt' in said(capsys, *corpus(tmp_path / 'empty.txt', b''))
    assert 'a window of length 16 needs 17' in said(capsys, *corpus(tmp_path / 'short.txt', b'short'))
    message = said(capsys, *corpus(tmp_path / 'odd.txt', b'plain text \xff\xfe and so on ' * 1000))
    assert 'odd.txt' in message and 'UTF-8' in message and 'byte 11' in message
    assert not (tmp_path / 'run').exists()


def test_a_loss_that_is_not_finite_stops_and_names_step_and_module(capsys, run, tmp_path):
    message = said(capsys, *run, '--config.optimizer.peak_lr=1e30', '--config.optimizer.weight_decay=0.0')
    assert 'step 2: loss nan' in message or 'step 2: loss inf' in message
    assert 'the first that is not finite: output of stack.layers[0]' in message
    assert message.endswith('. No checkpoint was saved before it\n')
    assert not (tmp_path / 'run' / 'metrics.jsonl').exists()


def test_eval_generate_and_show(capsys, run, tmp_path):
    workdir = f'--workdir={tmp_path / "run"}'
    assert 'is not a run' in said(capsys, 'eval', workdir)
    assert main(list(run)) == 0
    capsys.readouterr()
    assert main(['eval', workdir, '--tokens=64']) == 0
    shown = capsys.readouterr().out
    assert '8x' in shown and f'{tmp_path / "run"}, step 8, valid: a sample, 64 tokens of ' in shown.replace('\n', ' ')
    texts = []
    for seed in (0, 0, 1):
        assert main(['generate', workdir, '--prompt=def ', '--tokens=20', f'--seed={seed}']) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2] and texts[0].startswith('def ')
    assert main(['show', str(tmp_path / 'run')]) == 0
    assert 'checkpoints: 8 of 8 steps' in capsys.readouterr().out
    assert 'no checkpoint of step 5; it has: 8' in said(capsys, 'eval', workdir, '--step=5')
    assert '--top_p is 2.0' in said(capsys, 'generate', workdir, '--top_p=2')


def test_analyse(capsys, run, tmp_path):
    workdir = f'--workdir={tmp_path / "run"}'
    argv = [one.replace('mingru', 'mha').replace('depth=1', 'depth=2') for one in run]
    assert main(argv) == 0
    capsys.readouterr()
    assert main(['analyse', workdir, '--rows=2', '--bits=8,2']) == 0
    printed = capsys.readouterr().out
    assert 'sink_rate' in printed and 'weights and activations rounded' in printed
    found = json.loads((tmp_path / 'run' / 'analysis' / '8.json').read_text())
    assert len(found['layers']) == 2 and found['loss_by_bits'].keys() == {'32', '8', '2'}
    # Nearly untrained, attention is nearly uniform: the mean of the logarithms of 1 to 16, documents apart.
    assert all(0 < layer['entropy'] <= 1.92 and layer['sparsity'] == 0 for layer in found['layers'])
    assert abs(found['loss_by_bits']['8'] - found['loss_by_bits']['32']) < 0.02
    assert found['loss_by_bits']['2'] > found['loss_by_bits']['32']
    assert (tmp_path / 'run' / 'analysis' / '8.png').exists()
    assert 'bits is 1; it must be at least 2' in said(capsys, 'analyse', workdir, '--rows=2', '--bits=1')
    assert 'the valid split has' in said(capsys, 'analyse', workdir, '--rows=1000000')
    assert "has no split 'vaild'" in said(capsys, 'analyse', workdir, '--split=vaild')
    assert main(['analyse', workdir, '--head', '--rows=2', '--ranks=1,4']) == 0
    printed = capsys.readouterr().out
    assert 'anisotropy_centred' in printed and 'softmax heads refitted' in printed
    found = json.loads((tmp_path / 'run' / 'analysis' / '8-head.json').read_text())
    assert [each['rank'] for each in found['refits']] == [1, 4] and found['refits'][1]['fitted'] < found['loss']
    assert 0 < found['singular_entropy'] < 1 < found['rank_head'] and found['contexts'] > 1
    assert 'ranks is [4000]; ranks must be from 1 to' in said(capsys, 'analyse', workdir, '--head', '--ranks=4000')
    assert '--ranks is for --head' in said(capsys, 'analyse', workdir, '--ranks=2')
    assert 'rows is 1; a head is refitted' in said(capsys, 'analyse', workdir, '--head', '--rows=1')
    assert 'two analyses' in said(capsys, 'analyse', workdir, '--head', '--neighbours=2')
    assert '--stored_rows is for --neighbours' in said(capsys, 'analyse', workdir, '--stored_rows=8')
    assert '--bits is for the analysis of layers' in said(capsys, 'analyse', workdir, '--head', '--bits=4')


def test_analyse_inside(capsys, run, tmp_path):
    workdir = f'--workdir={tmp_path / "run"}'
    argv = [one.replace('mingru', 'retnet+mha').replace('depth=1', 'depth=2').replace('dim=8', 'dim=16') for one in run]
    assert main(argv) == 0
    capsys.readouterr()
    assert main(['analyse', workdir, '--inside', '--tuned', '--rows=2']) == 0
    printed = capsys.readouterr().out
    assert 'agreement' in printed and 'half-life' in printed and 'induction' in printed
    found = json.loads((tmp_path / 'run' / 'analysis' / '8-inside.json').read_text())
    first, second = found['layers']
    assert second['lens']['agreement'] == 1 and second['lens']['divergence'] == 0
    assert second['tuned']['divergence'] == second['tuned']['divergence_of_logit_lens'] == 0
    assert found['tuned_embedding']['divergence'] > 0 and first['tuned'].keys() == second['tuned'].keys()
    kinds = {'entropy', 'distance', 'sink', 'previous', 'induction', 'retrieval'}
    assert first['heads'] == {} and second['heads'].keys() == kinds
    (state,) = [one for one in first['states'].values() if len(one['kept']) > 1]
    np.testing.assert_allclose(state['kept'], [1 - 2.0 ** (-5 - head) for head in range(len(state['kept']))], rtol=1e-4)
    assert len(found['memory']['influence']) == 8 and found['memory']['influence'][0] > 0
    assert 0 <= first['geometry']['linearity'] <= 1 and first['memory']['reach'] < 8
    assert (tmp_path / 'run' / 'analysis' / '8-inside.png').stat().st_size > 10_000
    assert '--tuned is for --inside' in said(capsys, 'analyse', workdir, '--tuned')
    assert '--inside and --head are two analyses' in said(capsys, 'analyse', workdir, '--inside', '--head')


def test_analyse_with_neighbours(capsys, run, tmp_path):
    pytest.importorskip('sklearn')
    workdir = f'--workdir={tmp_path / "run"}'
    assert main(list(run)) == 0
    asked = ('analyse', workdir, '--rows=1', '--stored_rows=2')
    assert main([*asked, '--neighbours=4']) == 0
    assert 'more than alone' in capsys.readouterr().out
    found = json.loads((tmp_path / 'run' / 'analysis' / '8-neighbours.json').read_text())
    assert len(found['mixtures']) == 9 and found['stored'] > 4
    assert 'every query would find itself' in said(capsys, *asked, '--neighbours=4', '--split=train')
    assert 'hidden states are stored' in said(capsys, *asked, '--neighbours=100000')


INTERRUPTED = """
import os, runpy, signal, sys, time
from attnlab import cli

def interrupted(argv):
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)

cli.COMMANDS['zoo'] = interrupted
sys.argv = ['attnlab', 'zoo']
runpy.run_module('attnlab', run_name='__main__')
"""


def test_ctrl_c_ends_a_command_without_a_traceback():
    """By the signal: status 130 of a shell, and what those who start workers expect."""
    done = subprocess.run([sys.executable, '-P', '-c', INTERRUPTED], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, '', '')


def test_zoo_lists_every_recipe(capsys):
    from attnlab.zoo import ZOO

    assert main(['zoo', '--format=markdown']) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith('| ')]
    assert len(rows) == len(ZOO) + 2


def test_zoo_shows_a_head_whole(capsys):
    from attnlab.models.heads.registry import HEADS

    assert main(['zoo', 'sampled_softmax', '--heads']) == 0
    shown = ' '.join(capsys.readouterr().out.split())
    assert HEADS['sampled_softmax'].cite in shown and 'negatives 64' in shown
    assert "there is no head 'softmx'; did you mean 'softmax'" in said(capsys, 'zoo', '--heads', 'softmx')
    assert "there is no head=softmx; did you mean 'softmax'" in said(capsys, 'config', '--config=language:head=softmx')


def test_zoo_shows_a_recipe_whole(capsys):
    from attnlab.zoo import ZOO

    assert main(['zoo', 'gla']) == 0
    shown = ' '.join(capsys.readouterr().out.split())
    assert ZOO['gla'].cite in shown and ZOO['gla'].notes in shown and 'key_ratio 0.5' in shown
    assert "there is no recipe 'glaa'; did you mean 'gla'" in said(capsys, 'zoo', 'glaa')
