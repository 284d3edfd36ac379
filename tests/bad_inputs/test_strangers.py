"""Files from a stranger: nothing in them runs, is written elsewhere, or speaks to the terminal; and what is lacking.

Work directories and studies are data that people hand on. Classes that a config may name are in `tests/test_trust.py`.
"""

import json
import os
import subprocess
import sys

import jax
import pytest

from attnlab.cli import main
from attnlab.errors import UserError
from attnlab.train import devices
from tests.bad_inputs.conftest import LANGUAGE, SMALL

HOSTILE = {
    'nested too deeply': ('run/config.json', '[' * 200_000),
    'objects nested too deeply': ('run/config.json', '{"a":' * 200_000),
    'a number of too many digits': ('run/config.json', '{"steps": ' + '9' * 5000 + '}'),
    'a record nested too deeply': ('run/run.json', '[' * 200_000),
    'a study nested too deeply': ('study/sweep.json', '[' * 200_000),
    'a journal nested too deeply': ('study/journal.log', '[' * 200_000 + '\n[]\n'),
    'a journal with a pickle': ('study/journal.log', '\x80\x04\x95K\n\x80\n'),
}


@pytest.mark.parametrize('case', HOSTILE)
def test_hostile_files(place, capsys, case):
    file, text = HOSTILE[case]
    name, _, inside = file.partition('/')
    (place[name] / inside).write_text(text, encoding='latin-1')
    command = ['show', str(place['run'])] if name == 'run' else ['sweep', 'status', f'--study={place["study"]}']
    assert main(command) == 2
    error = capsys.readouterr().err
    assert error.startswith('attnlab: ') and inside in error and 'Traceback' not in error and error.count('\n') < 4


@pytest.mark.parametrize(
    ('key', 'value', 'sentence'),
    [
        (('model', 'dim'), 2**40, 'model.dim'),
        (('model', 'dim'), 1e999, 'config.model.dim is inf'),
        (('model', 'dim'), [8], 'config.model.dim is'),
        (('steps',), float('nan'), 'config.steps is nan'),
        (('task', 'text', 'path'), '/etc', 'config.json'),
        (('task', 'text', 'path'), 7, 'config.task.text.path is 7'),
        (('evals',), 'everything', 'config.evals'),
        (('checkpoint',), None, 'checkpoint'),
    ],
)
def test_values_of_a_hostile_config(place, capsys, key, value, sentence):
    path = place['run'] / 'config.json'
    config = json.loads(path.read_text())
    inner = config
    for name in key[:-1]:
        inner = inner[name]
    inner[key[-1]] = value
    path.write_text(json.dumps(config))
    assert main(['eval', f'--workdir={place["run"]}', '--tokens=32', '--multiples=1']) == 2
    error = capsys.readouterr().err
    assert error.startswith('attnlab: ') and 'Traceback' not in error and error.count('\n') < 4, error


def test_a_record_does_not_speak_to_the_terminal(place, capsys):
    """Escape sequences of a terminal can rename its window, clear it, or answer in the place of the user."""
    path = place['run'] / 'run.json'
    record = json.loads(path.read_text())
    record['command'] = 'attnlab train \x1b]0;yours\x07\x1b[2J'
    path.write_text(json.dumps(record))
    assert main(['show', str(place['run'])]) == 0
    shown = capsys.readouterr().out
    assert '\x1b]0;' not in shown and '\x1b[2J' not in shown


def test_metrics_are_not_written_through_a_link(place, capsys):
    """What `train` would append to might lie anywhere."""
    victim = place['tmp'] / 'victim'
    metrics = place['run'] / 'metrics.jsonl'
    victim.write_bytes(metrics.read_bytes())
    metrics.unlink()
    metrics.symlink_to(victim)
    before = victim.read_bytes()
    config = f'--config={LANGUAGE}:zoo=mingru,data={place["text"]}'
    # What there was is read; what is written replaces the link.
    main(['train', config, *SMALL, f'--workdir={place["run"]}'])
    assert victim.read_bytes() == before


def test_files_whose_names_are_not_utf8(place, capsys):
    folder = place['tmp'] / 'texts'
    folder.mkdir()
    (folder / os.fsdecode(b'h\xe4llo.txt')).write_text('one and two and three\n' * 200)
    command = ['train', f'--config={LANGUAGE}:zoo=mingru,data={folder}', *SMALL, f'--workdir={place["tmp"]}/new']
    assert main(command) == 0
    capsys.readouterr()


@pytest.mark.parametrize('folder', ['/proc/nothing', '/dev/null/run', '/sys/nothing'])
def test_a_work_directory_that_cannot_be_made(place, capsys, folder):
    command = ['train', f'--config={LANGUAGE}:zoo=mingru,data={place["text"]}', *SMALL, f'--workdir={folder}']
    assert main(command) == 2
    error = capsys.readouterr().err
    assert error.startswith('attnlab: ') and folder.rpartition('/')[0] in error and error.count('\n') == 1


@pytest.mark.parametrize('command', ['sweep --config=sweeps/language --study=s', 'sweep status --study=s'])
def test_a_sweep_without_its_extra(tmp_path, command):
    code = (
        f"import sys\nsys.modules['optuna'] = None\nfrom attnlab.cli import main\nsys.exit(main({command.split()!r}))\n"
    )
    done = subprocess.run([sys.executable, '-c', code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.count('\n') == 1, done.stderr
    assert 'needs optuna, which is not installed: pip install "attnlab[sweep]"' in done.stderr


@pytest.mark.parametrize(('error', 'said'), [(AssertionError(), 'AssertionError'), (RuntimeError('no\nGPU'), 'no')])
def test_a_platform_that_is_not_there(monkeypatch, error, said):
    monkeypatch.setattr(jax.config, 'update', lambda *arguments: None)

    def missing():
        raise error

    monkeypatch.setattr(jax, 'devices', missing)
    with pytest.raises(UserError) as caught:
        devices.start(platform='cuda', cpu_devices=None, compilation_cache='')
    assert str(caught.value).startswith(f'JAX finds no device for --platform=cuda ({said}); ')
    assert 'pip install "attnlab[gpu]"' in str(caught.value) and '\n' not in str(caught.value)
