"""One small run, one small study, and what damages a copy of them."""

import pathlib
import shutil

import pytest

from attnlab import cli
from attnlab.configuration import config_of
from attnlab.sweep.study import create_study

ROOT = pathlib.Path(__file__).parents[2]
LANGUAGE = ROOT / 'configs' / 'language.py'
SMALL = (
    *('--config.steps=4', '--config.batch_size=2', '--config.length=16', '--config.model.dim=8'),
    *('--config.model.stack.depth=1', '--config.evals[0].tokens=64', '--config.report.every=1'),
    *('--config.checkpoint.every=2', '--config.report.tensorboard=False', '--compilation_cache='),
)


class Place:
    """A folder of a test, with copies of a run and a study; as a mapping, what `{tmp}` and the like stand for."""

    def __init__(self, folder: pathlib.Path, originals: pathlib.Path):
        self._folder = folder
        self._originals = originals

    def __getitem__(self, name: str) -> pathlib.Path:
        """`tmp`, `text`, or the copy of `run` or `study`, made when it is first asked for."""
        if name == 'tmp':
            return self._folder
        if name == 'text':
            return self._originals / 'text.txt'
        if not (self._folder / name).exists():
            shutil.copytree(self._originals / name, self._folder / name)
        return self._folder / name


@pytest.fixture(scope='session')
def originals(tmp_path_factory):
    """A trained run and a study of which no trial has run."""
    folder = tmp_path_factory.mktemp('originals')
    text = folder / 'text.txt'
    text.write_text('one and two and three and four and five\n' * 200)
    config = f'--config={LANGUAGE}:zoo=mingru,data={text}'
    assert cli.main(['train', config, *SMALL, f'--workdir={folder / "run"}']) == 0
    create_study(folder / 'study', config_of(ROOT / 'configs' / 'sweeps' / 'language.py', 'zoo=mingru'))
    return folder


@pytest.fixture
def place(originals, tmp_path):
    return Place(tmp_path, originals)
