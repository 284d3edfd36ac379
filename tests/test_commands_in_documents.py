"""Every command line that a document or a docstring shows is one: its flags, config, overrides and names are read.

A line is read by the command itself, up to where it would begin to work, and in a folder where the runs and studies
that it names are stand-ins.
"""

import argparse
import ast
import contextlib
import functools
import io
import json
import os
import pathlib
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

from attnlab import cli
from attnlab.configuration import config_of
from attnlab.data.long_range import progress
from attnlab.errors import UserError
from attnlab.experiment import experiment
from attnlab.runs import show
from pallas_kernels.bench.__main__ import main as bench_kernels

ROOT = pathlib.Path(__file__).parents[1]
PAGES = ('README.md', 'CONTRIBUTING.md', 'docs/*.md', 'experiments/*/README.md')
MODULES = ('attnlab/**/*.py', 'pallas_kernels/**/*.py', 'configs/**/*.py', 'scripts/**/*.py', 'experiments/**/*.py')

ELSEWHERE = {
    'git': 'takes another clone',
    'pip': 'takes a network; its extras are checked by test_packaging.py',
    'pytest': 'runs the tests that this one is of',
    'kubectl': 'takes a Kubernetes cluster',
    'gcloud': 'takes a TPU VM and an account',
    'ruff': 'looks at the code, with no flag of attnlab',
    'mypy': 'looks at the code, with no flag of attnlab',
}
"""Programs whose lines are not read, and why."""

PROGRAMS = ('attnlab', 'make', 'python', 'python3', 'scripts', *ELSEWHERE)
PLACEHOLDERS = {'--config=...': '--config=sweeps/language', '--study=...': '--study=studies/gla'}
"""What stands in the place of words that a document leaves open."""


class Read(BaseException):
    """A command has read its line and would begin to work."""


def texts() -> Iterator[tuple[str, str]]:
    """Every page and docstring, by the name of its file."""
    for pattern in PAGES:
        yield from ((str(path.relative_to(ROOT)), path.read_text()) for path in ROOT.glob(pattern))
    for pattern in MODULES:
        for path in ROOT.glob(pattern):
            text = path.read_text()
            if not re.search(rf'^ *({"|".join(PROGRAMS)})\b', text, re.MULTILINE):
                continue  # Most modules show no command, and parsing all takes seconds.
            tree = ast.parse(text)
            kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
            found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds))
            yield from ((str(path.relative_to(ROOT)), text) for text in found if text)


def program(line: str) -> str:
    """The program that a line starts, without the folder that it lies in."""
    first = line.split(maxsplit=1)[0].removeprefix('.venv/bin/')
    return 'scripts' if first.startswith('scripts/') else first


@functools.cache
def lines() -> list[tuple[str, str]]:
    """Every command line that stands by itself, with its file: indented, or in a fenced block."""
    found = {}
    for file, text in texts():
        fenced = False
        for line in text.replace('\\\n', ' ').splitlines():
            if line.startswith('```'):
                fenced = not fenced
            elif (fenced or line.startswith('    ')) and line.strip() and program(line) in PROGRAMS:
                found.setdefault(line.strip(), file)
    return sorted((file, line) for line, file in found.items())


def then(function):
    """The function, after which the command has read what there is to read."""

    @functools.wraps(function)
    def wrapped(*arguments, **named):
        function(*arguments, **named)
        raise Read

    return wrapped


def nothing(*arguments, **named):
    """Does nothing."""


@pytest.fixture
def folder(own_process, tmp_path, monkeypatch):
    """A folder with the clone's data, in which commands stop where they would begin to work."""
    for name in ('configs', 'experiments', 'scripts'):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    for name in ('compare', 'eval', 'analyse', 'generate', 'quantize', 'edit', 'uncertainty', 'sweep', 'report'):
        module = sys.modules[f'attnlab.commands.{name}']
        lasts = [last for last in ('required', 'directory') if hasattr(module, last)]
        assert lasts, f'attnlab {name} takes no folder'
        for last in lasts:
            monkeypatch.setattr(module, last, then(getattr(module, last)))
    for name in ('train', 'match', 'compare'):
        module = sys.modules[f'attnlab.commands.{name}']
        starts = [start for start in ('start_devices', 'start_platform') if hasattr(module, start)]
        assert starts
        for start in starts:
            monkeypatch.setattr(module, start, then(nothing))
    monkeypatch.setattr(sys.modules['attnlab.commands.train'], '_plan_for', then(nothing))
    monkeypatch.setattr(show, 'show_run', then(nothing))
    monkeypatch.setattr(progress, 'prepare_with_progress', then(nothing))
    monkeypatch.setattr(experiment.Experiment, 'has_studies', then(nothing))
    monkeypatch.setattr(argparse.ArgumentParser, 'parse_args', then(argparse.ArgumentParser.parse_args))
    return tmp_path


def check(line: str, folder: pathlib.Path) -> None:
    """Reads a line. Raises what its program says of it."""
    if program(line) in ELSEWHERE:
        return
    words = [PLACEHOLDERS.get(word, word) for word in shlex.split(line, comments=True)]
    while '&&' in words:
        check(shlex.join(words[: words.index('&&')]), folder)
        words = words[words.index('&&') + 1 :]
    name, rest = program(words[0]), words[1:]
    if name == 'attnlab':
        check_attnlab(rest, folder)
    elif name == 'make':
        check_make(rest, folder)
    elif name in ('python', 'python3'):
        check_python(rest)
    elif name == 'scripts':
        assert (ROOT / words[0]).is_file(), f'there is no {words[0]}'
        check_attnlab(['sweep', *(word for word in rest if word.startswith('--'))], folder)
    else:
        assert name in ELSEWHERE, f'{name} is no program that documents name'


def check_attnlab(words: list[str], folder: pathlib.Path) -> None:
    """Reads the arguments of `attnlab`, stand-ins being made of the runs, studies and files that they name."""
    command = words[0]
    holds = 'sweep.json' if 'report' in words or any('studies/' in word for word in words[1:]) else 'config.json'
    for word in words[1:] if command in ('compare', 'report', 'show') else ():
        if not word.startswith('--'):
            (folder / word).mkdir(parents=True)
            (folder / word / holds).write_text(json.dumps({}))
    for base in re.findall(r'base=([\w/.]+)', ' '.join(words)):
        (folder / base).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / 'configs' / 'language.py', folder / base)
    for word in words:
        if word.startswith('--allow='):
            (folder / word.removeprefix('--allow=')).write_text(own_mixer())
    said = io.StringIO()
    with contextlib.suppress(Read), contextlib.redirect_stderr(said):
        assert cli.main(words) == 0, said.getvalue()
    if command == 'train':
        assert '--dry_run' in words or any(word.startswith('--workdir=') for word in words), '--workdir is missing'
    if command == 'match':
        (config,) = (word.removeprefix('--config=') for word in words if word.startswith('--config='))
        path, _, arg = config.partition(':')
        config_of(pathlib.Path(path), arg)


def own_mixer() -> str:
    """The file that the README has its reader write."""
    return re.findall(r'```python\n(.*?)```', (ROOT / 'README.md').read_text(), flags=re.DOTALL)[0]


def check_make(words: list[str], folder: pathlib.Path) -> None:
    """Has make say what it would do, and reads that."""
    targets = [word for word in words if '=' not in word]
    made = (ROOT / 'Makefile').read_text()
    for target in targets:
        assert re.search(rf'^{target}:', made, flags=re.MULTILINE), f'there is no target {target}'
    for word in words:
        if '=' in word:
            name = word.partition('=')[0]
            assert f'$({name})' in made or f'$(or $({name})' in made or name == 'PYTHON', f'no rule reads {name}'
    done = subprocess.run(['make', '-n', *words], cwd=ROOT, capture_output=True, text=True, check=True)
    for line in done.stdout.splitlines():
        if line.strip() and program(line) in PROGRAMS:
            check(line, folder)


def check_python(words: list[str]) -> None:
    """Reads a module's or a script's arguments."""
    if words[0] == '-m':
        if words[1] not in ELSEWHERE:
            assert words[1] in ('pallas_kernels.bench', 'venv'), f'python -m {words[1]} is not known here'
            with contextlib.suppress(Read):
                bench_kernels(words[2:])
        return
    script = ROOT / words[0]
    assert script.is_file(), f'there is no {words[0]}'
    if 'absl' in script.read_text():
        run_to_its_flags(script, *words[1:])
    elif 'argparse' in script.read_text() and script.parent == ROOT / 'scripts':
        with contextlib.suppress(Read), pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, 'path', [*sys.path])
            patch.setattr(sys, 'argv', [str(script), *words[1:]])
            runpy.run_path(str(script), run_name='__main__')
    else:
        assert len(words) == 1 or 'sys' in script.read_text(), f'{words[0]} takes no arguments'


@functools.cache
def run_to_its_flags(script: pathlib.Path, *flags: str) -> None:
    """Starts a script that stops when it has imported everything and read its flags."""
    env = {**os.environ, 'PYTHONPATH': str(ROOT)}
    command = [sys.executable, script, *flags, '--only_check_args']
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(('file', 'line'), lines(), ids=str)
def test_a_command_in_a_document_is_one(file, line, folder):
    check(line, folder)


def test_commands_within_sentences_have_names_that_are_there():
    targets = set(re.findall(r'^([a-z-]+):', (ROOT / 'Makefile').read_text(), flags=re.MULTILINE))
    known = {'attnlab': cli.COMMANDS.keys(), 'make': targets}
    named = {
        (file, program, word)
        for file, text in texts()
        for program, word in re.findall(r'`(?:\.venv/bin/)?(attnlab|make) ([a-z][\w-]*)[^`]*`', text)
    }
    assert len(named) > 20
    assert [one for one in sorted(named) if one[2] not in known[one[1]]] == []


def test_scripts_stand_by_themselves():
    """They are run by their path, which puts their own folder on Python's path and not the clone's root."""
    for path in ROOT.glob('scripts/*.py'):
        text = path.read_text()
        if 'sys.path.insert(0, str(ROOT))' in text:
            continue
        imported = re.findall(r'^\s*(?:from|import) (\w+)', text, flags=re.MULTILINE)
        assert not {'configs', 'experiments', 'scripts', 'tests'} & set(imported), path


@pytest.mark.parametrize(
    ('line', 'message'),
    [
        ('attnlab train --config=languag --workdir=a', 'there is no config file'),
        ('attnlab train --config=language:zoo=glaa --workdir=a', 'there is no zoo=glaa'),
        ('attnlab train --config=language --workdir=a --config.stepz=3', 'has no key stepz'),
        ('attnlab train --config=language', '--workdir is missing'),
        ('attnlab eval --workdir=a --multiple=2', 'multiple'),
        ('attnlab evaluate --workdir=a', 'there is no command'),
        ('make bnch', 'there is no target bnch'),
        ('make experiment NAME=groking', 'there is no experiment'),
        ('python scripts/bench.py', 'there is no scripts/bench.py'),
        ('cargo test', 'cargo is no program'),
    ],
)
def test_a_wrong_line_is_found(line, message, folder):
    with pytest.raises((UserError, AssertionError), match=re.escape(message)):
        check(line, folder)
