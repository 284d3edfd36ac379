"""Files from a stranger: nothing in them runs, is written elsewhere, or speaks to the terminal; and what is lacking.

Work directories and studies are data that people hand on. Classes that a config may name are in `tests/test_trust.py`.
"""

import ast
import io
import json
import os
import pathlib
import pickle
import re
import shutil
import subprocess
import sys
import tarfile

import jax
import numpy as np
import pytest

from attnlab.cli import main
from attnlab.data.archives import readable, tar_members
from attnlab.data.long_range.blocks import Blocks
from attnlab.data.long_range.listops import ListOps
from attnlab.data.text.text import TextFiles
from attnlab.data.text.tokenizers import Bytes
from attnlab.errors import UserError
from attnlab.train import devices
from tests.bad_inputs.conftest import LANGUAGE, ROOT, SMALL

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
    record['starts'][-1]['command'] = ['attnlab', 'train', '\x1b]0;yours\x07\x1b[2J']
    path.write_text(json.dumps(record))
    assert main(['show', str(place['run'])]) == 0
    shown = capsys.readouterr().out
    assert 'yours' in shown and '\x1b]0;' not in shown and '\x1b[2J' not in shown


@pytest.mark.parametrize('command', [None, 'attnlab train', [7]])
def test_a_record_without_its_command(place, capsys, command):
    path = place['run'] / 'run.json'
    record = json.loads(path.read_text())
    record['starts'][-1]['command'] = command
    path.write_text(json.dumps(record))
    assert main(['show', str(place['run'])]) == 2
    assert 'run.json is damaged: its last start names no command' in capsys.readouterr().err


@pytest.mark.parametrize(('terminal', 'expected'), [(True, r'a\x1b[2J'), (False, 'a\x1b[2J')])
def test_a_model_does_not_speak_to_the_terminal(place, capsys, monkeypatch, terminal, expected):
    monkeypatch.setattr('attnlab.runs.generation.Writer.sampled', lambda *_: ['a', '\x1b[2J'])
    monkeypatch.setattr(sys.stdout, 'isatty', lambda: terminal)
    assert main(['generate', f'--workdir={place["run"]}', '--prompt=']) == 0
    assert capsys.readouterr().out == expected + '\n'


def test_neither_a_config_nor_a_mistake_speaks_to_the_terminal(place, capsys):
    path = place['run'] / 'config.json'
    config = json.loads(path.read_text())
    config['task']['text']['name\x1b]0;yours\x07'] = 'any\x1b[2J\x9b2J'
    path.write_text(json.dumps(config))
    for command, status in (('show', 0), ('compare', 0), ('eval', 2)):
        where = [f'--workdir={place["run"]}'] if command == 'eval' else [str(place['run'])]
        where += [f'--out={place["tmp"] / "out"}'] if command == 'compare' else []
        assert main([command, *where]) == status
        said = ''.join(capsys.readouterr())
        assert not set(said) & {'\x1b', '\x07', '\x9b'}
        assert command == 'compare' or r'name\x1b]0;yours\x07' in said


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


@pytest.mark.parametrize(
    ('link', 'command'),
    [
        ('run/lock', 'train'),
        ('run/speed.jsonl', 'train'),
        ('study/lock', 'sweep worker --study={study} --idle=0'),
        ('study/journal.lock', 'sweep worker --study={study} --idle=0'),
        ('study/locks/0000', 'sweep worker --study={study} --idle=0'),
        ('study/locks/0000', 'sweep status --study={study}'),
        ('study/logs/0000.txt', 'sweep worker --study={study} --idle=0'),
    ],
)
def test_nothing_is_written_through_a_link_to_a_file(place, capsys, link, command):
    from attnlab.sweep.study import open_study

    open_study(place['study']).claim().release()
    victim = place['tmp'] / 'thesis.tex'
    victim.write_text('precious\n')
    name, _, inside = link.partition('/')
    path = place[name] / inside
    path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    path.symlink_to(victim)
    train = ['train', f'--config={LANGUAGE}:zoo=mingru,data={place["text"]}', *SMALL, f'--workdir={place["run"]}']
    if link == 'run/speed.jsonl':
        shutil.rmtree(place['run'] / 'checkpoints')
    assert main(train if command == 'train' else [word.format_map(place) for word in command.split()]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith('attnlab: ') and f'{path} is a link to {str(victim)!r}' in error
    assert victim.read_text() == 'precious\n'


@pytest.mark.parametrize(
    ('link', 'command'),
    [
        *((f'run/{name}', 'train') for name in ('checkpoints', 'figures', 'plugins', 'plugins/profile')),
        ('run/evals', 'eval --workdir={run} --tokens=32 --multiples=1'),
        ('run/evals/4-32-tokens', 'eval --workdir={run} --tokens=32 --multiples=1'),
        *((f'study/{name}', 'sweep worker --study={study} --idle=0') for name in ('trials', 'trials/0000', 'locks')),
        *(
            (f'study/{name}', 'sweep worker --study={study} --idle=0')
            for name in ('logs', 'confirm', 'jobs', 'journal.log')
        ),
    ],
)
def test_nothing_is_written_into_a_folder_elsewhere(place, capsys, link, command):
    elsewhere = place['tmp'] / 'elsewhere'
    name, _, inside = link.partition('/')
    path = place[name] / inside
    path.parent.mkdir(exist_ok=True)
    if path.exists():
        path.rename(elsewhere)
    elif inside != 'journal.log':
        elsewhere.mkdir()
    path.symlink_to(elsewhere)
    before = [(each, each.stat().st_mtime_ns) for each in (elsewhere, *elsewhere.rglob('*'))]
    train = ['train', f'--config={LANGUAGE}:zoo=mingru,data={place["text"]}', *SMALL, f'--workdir={place["run"]}']
    assert main(train if command == 'train' else [word.format_map(place) for word in command.split()]) == 2
    assert f'{path} is a link to {str(elsewhere)!r}' in capsys.readouterr().err.splitlines()[-1]
    assert [(each, each.stat().st_mtime_ns) for each in (elsewhere, *elsewhere.rglob('*'))] == before


def test_files_whose_names_are_not_utf8(place, capsys):
    folder = place['tmp'] / 'texts'
    folder.mkdir()
    (folder / os.fsdecode(b'h\xe4llo.txt')).write_text('one and two and three\n' * 200)
    command = ['train', f'--config={LANGUAGE}:zoo=mingru,data={folder}', *SMALL, f'--workdir={place["tmp"]}/new']
    assert main(command) == 0
    capsys.readouterr()


UNPICKLING = {'pickle', '_pickle', 'cPickle', 'dill', 'cloudpickle', 'joblib', 'shelve', 'marshal', 'yaml', 'torch'}
"""Modules that read what may be a program."""

UNPACKING = {'extractall', 'extract', 'unpack_archive', 'eval', 'exec', 'loadtxt', 'genfromtxt', 'fromregex'}
"""Calls that write members of archives where these say, or run text."""


def dangerous(source):
    """What a module imports or calls that could run, or write outside of its folder, what a file holds."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.partition('.')[0] in UNPICKLING)
        elif isinstance(node, ast.ImportFrom) and (node.module or '').partition('.')[0] in UNPICKLING:
            yield node.module
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, 'id', '')
            pickles = [
                word for word in node.keywords if word.arg == 'allow_pickle' and ast.unparse(word.value) != 'False'
            ]
            # Of an open file, or of its lines, it reads numbers; of a name it decides by itself how to open what.
            names = {part.id for part in ast.walk(node.args[0]) if isinstance(part, ast.Name)} if node.args else set()
            is_open = name == 'loadtxt' and 'file' in names
            if (name in UNPACKING and not is_open) or pickles:
                yield ast.unparse(node)


def test_nothing_unpickles_unpacks_or_runs_text():
    found = {
        str(path.relative_to(ROOT)): list(dangerous(path.read_text()))
        for room in ('attnlab', 'pallas_kernels', 'configs', 'experiments')
        for path in ROOT.glob(f'{room}/**/*.py')
    }
    assert len(found) > 200 and {path: names for path, names in found.items() if names} == {}
    for line in (
        'import pickle',
        'from torch import load',
        'np.load(a, allow_pickle=True)',
        'tar.extractall(a)',
        'exec(a)',
        'np.loadtxt(name)',
        'np.loadtxt(lines(name))',
    ):
        assert list(dangerous(line)), line


class Hostile:
    """Makes a file when it is unpickled."""

    def __init__(self, mark):
        self._mark = mark

    def __reduce__(self):
        return pathlib.Path.touch, (self._mark,)


def test_arrays_that_are_pickles_are_refused(tmp_path):
    """Caches of texts and blocks of drawn examples are folders that a config names, and may come from anyone."""
    mark = tmp_path / 'mark'
    hostile = np.empty(1, object)
    hostile[0] = Hostile(mark)
    pickle.loads(pickle.dumps(hostile))
    assert mark.exists(), 'it is hostile'
    mark.unlink()

    (tmp_path / 'text.txt').write_text('one and two and three\n' * 200)
    corpus = TextFiles(str(tmp_path / 'text.txt'), cache=str(tmp_path / 'cache'))
    corpus.load('train', Bytes())
    for name in ('tokens.npy', 'ends.npy'):
        (written,) = tmp_path.glob(f'cache/*/{name}')
        kept = written.read_bytes()
        written.chmod(0o600)
        np.save(written, hostile, allow_pickle=True)
        with pytest.raises(UserError, match=r'the cache entry .* is damaged; delete it'):
            corpus.load('train', Bytes())
        written.write_bytes(kept)

    blocks = Blocks(ListOps(), 0, 'test', 1, tmp_path / 'blocks')
    blocks.folder.mkdir()
    np.savez(blocks.path(range(1)), x=hostile)
    with pytest.raises(UserError, match='is damaged; delete it'):
        list(blocks.read())
    assert not mark.exists()


@pytest.mark.parametrize('name', ['../outside', '/outside', 'a/../../outside'])
def test_members_of_archives_stay_in_their_folder(tmp_path, name):
    archive = tmp_path / 'inside' / 'archive.tar'
    archive.parent.mkdir()
    with tarfile.open(archive, 'w') as file:
        member = tarfile.TarInfo(name)
        member.size = 4
        file.addfile(member, io.BytesIO(b'text'))
    with pytest.raises(UserError, match=r'has a member outside its own folder, .*; do not trust it'):
        list(readable(archive, tar_members(archive, re.compile('.*'))))
    assert [path.name for path in tmp_path.rglob('*')] == ['inside', 'archive.tar']


def test_members_of_archives_that_are_links_and_devices_are_passed_over(tmp_path):
    archive = tmp_path / 'archive.tar'
    with tarfile.open(archive, 'w') as file:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE):
            member = tarfile.TarInfo('member')
            member.type, member.linkname = kind, '/etc/passwd'
            file.addfile(member)
    assert list(readable(archive, tar_members(archive, re.compile('.*')))) == []


def test_a_terminal_that_knows_ascii_alone(tmp_path):
    env = {**os.environ, 'LC_ALL': 'C', 'PYTHONUTF8': '0', 'PYTHONCOERCECLOCALE': '0'}
    for command in (['eval', '--workdir=r\xfcn'], ['generate', '--workdir=run', '--prompt=\u4f60'], ['zoo', 'gl\xe4']):
        argv = [sys.executable, '-m', 'attnlab', *command]
        done = subprocess.run(argv, cwd=tmp_path, env=env, capture_output=True, check=False)
        assert done.returncode == 2 and done.stderr.startswith(b'attnlab: '), done.stderr
        assert done.stderr.count(b'\n') == 1 and done.stderr.isascii()


@pytest.mark.parametrize('error', [ValueError('coordinator_address should be defined.'), RuntimeError('too late\nnow')])
def test_processes_where_there_is_no_cluster(monkeypatch, error):
    def refused(*arguments, **named):
        raise error

    monkeypatch.setattr(jax.distributed, 'initialize', refused)
    with pytest.raises(UserError) as caught:
        devices.start(distributed=True)
    said = str(caught.value)
    assert said.startswith(f'the processes cannot connect: {str(error).splitlines()[0]}; --distributed needs a cluster')
    assert '--coordinator=HOST:PORT --processes=N --process=I' in said and '\n' not in said


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
