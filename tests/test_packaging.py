"""The search for an interpreter, against interpreters made up for the test; and metadata against the locks."""

import configparser
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from attnlab.errors import EXTRAS

ROOT = pathlib.Path(__file__).parents[1]
VERSION = f'{sys.version_info.major}.{sys.version_info.minor}'
BASE = os.path.realpath(getattr(sys, '_base_executable', sys.executable))

OLD = 'echo "Python 3.9.2"; echo'
SHIM = 'echo "pyenv: command not found" >&2; exit 127'
WITHOUT_VENV = 'echo "Python 3.12.4"; exit 1'
GOOD = f'exec {BASE} "$@"'


class Machine:
    """A PATH and a home with nothing on them but what is put there."""

    def __init__(self, folder: pathlib.Path):
        self.path = folder / 'bin'
        self.home = folder / 'home'
        self.path.mkdir()
        self.home.mkdir()
        (self.path / 'sed').symlink_to(shutil.which('sed'))

    def put(self, script: str, name: str | pathlib.Path) -> None:
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f'#!/bin/sh\n{script}\n')
        file.chmod(0o755)

    def find(self, *arguments: str, **variables: str) -> tuple[str, str]:
        done = subprocess.run(
            ['/bin/sh', ROOT / 'scripts' / 'find_python.sh', *arguments],
            env={'PATH': str(self.path), 'HOME': str(self.home), **variables},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode == 0) == bool(done.stdout), done
        assert done.stderr.count('\n') <= 1
        return done.stdout.strip(), done.stderr.strip()


@pytest.fixture
def machine(tmp_path: pathlib.Path) -> Machine:
    return Machine(tmp_path)


def found(path: str) -> bool:
    return os.path.realpath(path) == BASE


def test_shims_old_ones_and_those_without_venv_are_passed_over(machine: Machine):
    machine.put(SHIM, 'python3.14')
    machine.put(WITHOUT_VENV, 'python3.13')
    machine.put(GOOD, 'python3.12')
    path, complaint = machine.find()
    assert found(path) and not complaint


def test_pyenv_versions_come_after_the_path_and_before_uv(machine: Machine):
    machine.put(OLD, 'python3')
    machine.put('exit 1', 'uv')
    for root in (machine.home / '.pyenv', machine.home / 'elsewhere'):
        machine.put(GOOD, root / 'versions' / '3.13.9' / 'bin' / 'python')
        path, complaint = machine.find(PYENV_ROOT=str(root))
        assert found(path) and not complaint
        shutil.rmtree(root)


def test_uv_is_the_last_resort(machine: Machine):
    machine.put(OLD, 'python3')
    machine.put(f'[ "$2" = install ] || echo {BASE}', 'uv')
    path, complaint = machine.find()
    assert found(path) and not complaint


def test_the_variable_is_the_only_candidate(machine: Machine):
    machine.put(GOOD, 'python3')
    machine.put(OLD, 'mine')
    assert found(machine.find(PYTHON='python3')[0])
    path, complaint = machine.find(PYTHON='mine')
    assert not path
    assert complaint.startswith('attnlab needs Python 3.12 or later; found mine (Python 3.9.2). ')
    assert 'PYTHON=gone, which does not run' in machine.find(PYTHON='gone')[1]


def test_an_exact_version_can_be_asked_for(machine: Machine):
    machine.put(GOOD, 'python3')
    assert found(machine.find(VERSION)[0])
    assert machine.find('3.99')[1].startswith('attnlab needs Python 3.99; found python3 (Python ')


def test_the_refusal_names_what_was_found(machine: Machine):
    machine.put(WITHOUT_VENV, 'python3.12')
    machine.put(OLD, 'python3')
    wanted = 'found python3.12 (Python 3.12.4 without the venv module), python3 (Python 3.9.2). Install one'
    assert wanted in machine.find()[1]
    (machine.path / 'python3').unlink()
    (machine.path / 'python3.12').unlink()
    assert 'found nothing that runs' in machine.find()[1]


def metadata() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / 'setup.cfg')
    return parser


def pins(name: str) -> dict[str, str]:
    lines = (line.split('#')[0].strip() for line in (ROOT / name).read_text().splitlines())
    requirements = [Requirement(line) for line in lines if line]
    assert all(str(r.specifier).startswith('==') for r in requirements)
    return {canonicalize_name(r.name): str(r.specifier).removeprefix('==') for r in requirements}


def required(text: str) -> list[Requirement]:
    return [Requirement(line) for line in text.splitlines() if line and not line.startswith('#')]


@pytest.mark.parametrize('lock', ['requirements.lock', 'requirements-oldest.lock'])
def test_the_locks_pin_everything_that_is_required_within_its_range(lock: str):
    pinned = pins(lock)
    config = metadata()
    wanted = required(config['options']['install_requires']) + required(config['options.extras_require']['test'])
    for requirement in wanted:
        assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)]), requirement
    assert not [name for name in pinned if 'libtpu' in name or 'cuda' in name]


def test_the_oldest_lock_is_at_the_lower_end_of_jax():
    (jax,) = (r for r in required(metadata()['options']['install_requires']) if r.name == 'jax')
    oldest = pins('requirements-oldest.lock')['jax']
    assert f'>={oldest}' in str(jax.specifier).split(',')


def test_pyproject_holds_the_build_system_only():
    assert list(tomllib.loads((ROOT / 'pyproject.toml').read_text())) == ['build-system']


def test_make_alone_lists_the_targets():
    done = subprocess.run(['make'], cwd=ROOT, capture_output=True, text=True, check=True)
    targets = {line.split()[0] for line in done.stdout.splitlines()}
    assert {'quickstart', 'test', 'test-all', 'test-oldest', 'lint', 'format', 'lock', 'bench', 'clean'} <= targets


def test_extras_that_texts_name_are_there():
    files = [ROOT / 'README.md', *ROOT.glob('docs/*.md'), *ROOT.glob('attnlab/**/*.py'), *ROOT.glob('configs/**/*.py')]
    named = {
        (extra, str(file.relative_to(ROOT)))
        for file in files
        for list_ in re.findall(r'(?:attnlab|\.)\[([\w,]+)\]["\']|\(extra `(\w+)`\)', file.read_text())
        for extra in ''.join(list_).split(',')
    }
    named |= {(extra, 'attnlab/errors.py') for extra in EXTRAS.values()}
    assert len({extra for extra, _ in named}) >= 6
    there = metadata()['options.extras_require']
    assert [f'{file} names {extra}' for extra, file in sorted(named) if extra not in there] == []


def test_one_version_everywhere():
    version = metadata()['metadata']['version']
    assert f"__version__ = '{version}'" in (ROOT / 'attnlab' / '__init__.py').read_text()
    assert f'\nversion: {version}\n' in (ROOT / 'CITATION.cff').read_text()
    assert f'\n## {version}' in (ROOT / 'CHANGELOG.md').read_text()
