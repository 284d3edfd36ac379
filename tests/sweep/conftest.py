import pathlib
import subprocess
import sys

import pytest

from attnlab.configuration import config_of
from attnlab.sweep.study import create_study
from attnlab.sweep.trial import run_trial
from attnlab.train.programs import Programs

ROOT = pathlib.Path(__file__).parents[2]
TINY = pathlib.Path(__file__).parent / 'tiny.py'


def pytest_collection_modifyitems(items):
    """Tests that share the compiled programs or the study of the session are run by one worker."""
    for item in items:
        if {'programs', 'unbroken'} & set(getattr(item, 'fixturenames', ())):
            item.add_marker(pytest.mark.xdist_group('sweep'))


@pytest.fixture(scope='session')
def programs():
    """Compiled once."""
    return Programs()


@pytest.fixture
def make(tmp_path):
    """Creates the study of `tiny.py` with an argument, or opens it again, as another worker would."""

    def made(arg='', folder='study', storage=None):
        return create_study(tmp_path / folder, config_of(TINY, arg), storage)

    return made


@pytest.fixture(scope='session')
def unbroken(programs, tmp_path_factory):
    """A finished study that nothing interrupted."""
    study = create_study(tmp_path_factory.mktemp('studies') / 'unbroken', config_of(TINY))
    outcomes = []
    while (claim := study.claim()) is not None:
        outcomes.append(run_trial(study, claim, programs))
        claim.release()
    assert len(outcomes) == 4
    return study


@pytest.fixture
def attnlab(compiled):
    """Starts `attnlab sweep ...`; whatever still runs in the end is killed."""
    started = []

    def start(*arguments):
        argv = [
            sys.executable,
            '-m',
            'attnlab',
            'sweep',
            *arguments,
            '--platform=cpu',
            '--cpu_devices=2',
            f'--compilation_cache={compiled}',
        ]
        process = subprocess.Popen(argv, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()
