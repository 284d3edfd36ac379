"""An experiment of two studies of four trials each, which a worker of this process runs."""

import json
import pathlib

import pytest
from rich.console import Console

from attnlab.errors import UserError
from attnlab.experiment import studies as study_experiment
from attnlab.experiment.experiment import Experiment
from attnlab.experiment.studies import report_studies, run_studies
from attnlab.sweep.worker import work

TINY = pathlib.Path(__file__).parents[1] / 'sweep' / 'tiny.py'
SWEEP = f"""
import pathlib
from attnlab.configuration import config_of

def studies(size):
    tiny = pathlib.Path({str(TINY)!r})
    return {{'text': {{name: config_of(tiny, 'sampler=grid') for name in ('one', 'two')}}}}
"""
PLOT = """
from attnlab.experiment.results import panels

def figure(studies):
    figure, (axes,) = panels(1)
    for study in studies:
        axes.plot([one['rate'] for one in study['trials']], [one['value'] for one in study['trials']])
    return figure
"""
README = """# A question

<!-- results of size cpu -->
Not run yet.
<!-- end of size cpu -->
"""
QUIET = Console(quiet=True)


@pytest.fixture
def experiment(tmp_path):
    folder = tmp_path / 'experiments' / 'toy'
    folder.mkdir(parents=True)
    (folder / 'sweep.py').write_text(SWEEP)
    (folder / 'plot.py').write_text(PLOT)
    (folder / 'README.md').write_text(README)
    return Experiment(folder, 'cpu')


@pytest.mark.slow
def test_studies_are_run_once_and_reported(experiment, tmp_path, monkeypatch):
    ran = []

    def run(study, arguments, places, console):
        ran.append(study.folder.name)
        assert f'--study={study.folder}' in arguments and len(places) == 2
        work(study.folder, None, QUIET)

    monkeypatch.setattr(study_experiment.launch, 'run_processes', run)
    assert experiment.has_studies()
    with pytest.raises(UserError, match='nothing of toy has been measured at size cpu'):
        report_studies(experiment, tmp_path / 'runs', 'command', QUIET)
    assert run_studies(experiment, tmp_path / 'runs', 'command', 2, QUIET) and ran == ['one', 'two']
    readme = (experiment.folder / 'README.md').read_text()
    assert '**text**: valid/loss; matched by params within ±1.0%' in readme and '| two |' in readme
    assert '2 of 2 studies' in readme and 'by `command`' in readme
    assert {path.name for path in (experiment.folder / 'results').iterdir()} == {'cpu.json', 'cpu.png'}
    numbers = (experiment.folder / 'results' / 'cpu.json').read_bytes()
    kept = json.loads(numbers)['studies']
    assert [study['study'] for study in kept] == ['one', 'two']
    assert all(len(study['trials']) > 1 and study['statistics']['best'] for study in kept)
    page = tmp_path / 'runs' / 'toy' / 'cpu' / 'pages' / 'text' / 'index.html'
    written = page.read_bytes()
    (experiment.folder / 'README.md').write_text(README)
    report_studies(experiment, tmp_path / 'elsewhere', 'another command', QUIET)
    assert (experiment.folder / 'README.md').read_text() == readme
    seconds = json.loads((tmp_path / 'runs' / 'toy' / 'cpu' / 'text' / 'one' / 'seconds.json').read_text())
    assert seconds > 0
    assert run_studies(experiment, tmp_path / 'runs', 'command', 2, QUIET) and ran == ['one', 'two']
    assert page.read_bytes() == written
    assert (experiment.folder / 'results' / 'cpu.json').read_bytes() == numbers


def test_a_sweep_that_was_stopped_is_not_reported(experiment, tmp_path, monkeypatch):
    monkeypatch.setattr(study_experiment.launch, 'run_processes', lambda *arguments: None)
    assert not run_studies(experiment, tmp_path / 'runs', 'command', 1, QUIET)
    assert (experiment.folder / 'README.md').read_text() == README
