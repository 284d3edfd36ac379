"""Whose a work directory is."""

import subprocess

import jax
import pytest

from attnlab.config import load
from attnlab.configuration import config_of
from attnlab.errors import UserError
from attnlab.files import temporary_name
from attnlab.train import run
from attnlab.train.run import claim
from tests.sweep import tiny


def test_a_folder_is_claimed_whatever_another_process_has_written_of_the_config(tmp_path, monkeypatch):
    """What is there of it, for a process that comes second: nothing, the beginning of the file, or all of it."""
    config = config_of(tiny.LANGUAGE, 'zoo=mha')
    begun = temporary_name(tmp_path / 'config.json')
    begun.write_text('{"steps"')
    with monkeypatch.context() as other:
        other.setattr(jax, 'process_index', lambda: 1)
        claim(tmp_path, config)
        assert list(tmp_path.iterdir()) == [begun]
    claim(tmp_path, config)
    claim(tmp_path, config)
    assert set(tmp_path.iterdir()) == {begun, tmp_path / 'config.json'}
    assert load(tmp_path / 'config.json').steps == config.steps


def test_what_is_no_run_is_left_alone(tmp_path):
    temporary_name(tmp_path / 'config.json').touch()
    (tmp_path / 'thesis.tex').touch()
    with pytest.raises(UserError, match='is not empty and holds no config'):
        claim(tmp_path, config_of(tiny.LANGUAGE, 'zoo=mha'))


def test_the_commit_is_changed_by_code_and_not_by_pages(tmp_path, monkeypatch):
    def git(*arguments):
        named = ('-c', 'user.name=a', '-c', 'user.email=a@b')
        subprocess.run(['git', '-C', tmp_path, *named, *arguments], check=True, capture_output=True)

    package = tmp_path / 'package'
    package.mkdir()
    for name in ('run.py', 'page.md', '../README.md', '../sweep.py'):
        (package / name).write_text('first')
    monkeypatch.setattr(run, '__file__', str(package / 'run.py'))
    assert run.git_state() == {'commit': None, 'changed': None}
    git('init')
    git('add', '.')
    git('commit', '-m', 'first')
    for name, changed in (('page.md', False), ('../README.md', False), ('new.py', False), ('../sweep.py', True)):
        (package / name).write_text('second')
        assert run.git_state()['changed'] == changed, name


@pytest.mark.parametrize('failure', ['slow', 'failing', 'missing'])
def test_a_git_that_does_not_answer_leaves_unknown_what_it_would_say(monkeypatch, failure):
    def answered(command, **settings):
        if command[3] == 'rev-parse':
            return subprocess.CompletedProcess(command, 0, 'abc\n', '')
        if failure == 'slow':
            raise subprocess.TimeoutExpired(command, settings['timeout'])
        return subprocess.CompletedProcess(command, 128, '', 'fatal: index file corrupt')

    def absent(command, **settings):
        raise FileNotFoundError('git')

    monkeypatch.setattr(run.subprocess, 'run', absent if failure == 'missing' else answered)
    assert run.git_state() == {'commit': None if failure == 'missing' else 'abc', 'changed': None}
