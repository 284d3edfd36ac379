"""An experiment of two studies of four trials each, which a worker of this process runs."""

import io
import json
import pathlib
import platform
from types import SimpleNamespace

import optuna
import pytest
from rich.console import Console

from attnlab import cli
from attnlab.compare.report.comparison import Comparison, Point, StudyResult
from attnlab.compare.report.contents import Costs, StudyContents
from attnlab.config import spec
from attnlab.errors import UserError
from attnlab.experiment import results as results_module
from attnlab.experiment import studies as study_experiment
from attnlab.experiment.experiment import Experiment
from attnlab.experiment.results import provenance, seconds_of
from attnlab.experiment.studies import report_studies, run_studies, with_baselines
from attnlab.sweep.space import Grid
from attnlab.sweep.study import confirmation, create_study
from attnlab.sweep.worker import work
from attnlab.train import launch

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


@pytest.mark.parametrize(('finished', 'status'), [(False, launch.STOPPED), (True, 0)])
def test_studies_that_were_stopped_are_not_taken_for_finished_ones(experiment, finished, status, tmp_path, monkeypatch):
    monkeypatch.setattr(study_experiment, 'run_studies', lambda *_: finished)
    assert cli.main(['experiment', str(experiment.folder), f'--workdirs={tmp_path / "runs"}']) == status


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
    # What a search found is among what its trials set: nothing else keeps it.
    for study in kept:
        assert [each['optimizer.peak_lr'] for each in study['settings']] == [each['rate'] for each in study['trials']]
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


def test_what_was_stopped_goes_on_with_the_studies_that_are_left(experiment, tmp_path, monkeypatch):
    ran, done, reported = [], {'one': False, 'two': False}, []

    def run(study, arguments, places, console):
        ran.append(study.folder.name)
        done[study.folder.name] = len(ran) != 2

    monkeypatch.setattr(study_experiment.launch, 'run_processes', run)
    monkeypatch.setattr(study_experiment, '_finished', lambda study: done[study.folder.name])
    monkeypatch.setattr(study_experiment, 'report_studies', lambda *arguments: reported.append(arguments))
    assert not run_studies(experiment, tmp_path / 'runs', 'command', 1, QUIET) and not reported
    assert run_studies(experiment, tmp_path / 'runs', 'command', 1, QUIET) and len(reported) == 1
    assert ran == ['one', 'two', 'two'], 'a study that was stopped goes on, and one that ended is not begun again'


def test_a_study_has_ended_when_its_confirmation_has(experiment, tmp_path):
    config = experiment.studies()['text']['one']
    with config.unlocked():
        config.confirm = 1
    study = create_study(tmp_path / 'one', config)
    for number in range(study.sweep.trials):
        assert not study_experiment._finished(study)
        add_trial_of(study, value=float(number))
    assert study.finished() and not study_experiment._finished(study)
    add_trial_of(confirmation(study, None), value=1.0)
    assert study_experiment._finished(study)


def test_results_keep_that_confirming_runs_failed():
    row = StudyResult('one', 1.0, 0.0, (Point(1e-3, 0, 'done', 0.5),), 'min', (0.6, 0.61, 0.62), failed=2)
    comparison = Comparison('valid/loss', 'params', 0.01, (row,), ())
    costs = Costs(1.0, 1.0, 1.0, 1.0, None, None, None)
    study = StudyContents(row, None, costs, (), (), {}, {}, {})
    again = study_experiment.study_result(study_experiment.measurements('text', comparison, study))
    assert again.failed == 2 and again.statistics['confirmed'] == row.statistics['confirmed']
    assert again.statistics['confirmed'].kind == 'survivors'


def add_trial_of(study, value):
    """Adds a trial that has ended with a value, at the point that the sweep has for it."""
    number = len(study.trials())
    space = study.sweep.space
    params = study.sweep.sampler.fixed(space, number, len(study.sweep.seeds))
    optuna.load_study(study_name=study.name, storage=study.storage).add_trial(
        optuna.trial.create_trial(
            value=value, params=params, distributions={name: space[name].distribution for name in params}
        )
    )


@pytest.mark.parametrize(
    ('wrong', 'said'),
    [
        ({'metric': 'test/loss'}, 'text/two: config.metric is test/loss, and there is no evaluator test'),
        ({'base.length': 0}, 'text/two: its base: config.length is 0'),
        ({'goal': 'lowest'}, "text/two: config.goal is 'lowest'"),
    ],
)
def test_a_study_that_does_not_fit_is_one_line_before_any_runs(experiment, tmp_path, monkeypatch, wrong, said):
    studies = experiment.studies()
    with studies['text']['two'].unlocked():
        studies['text']['two'].update_from_flattened_dict(wrong)
    monkeypatch.setattr(Experiment, 'studies', lambda self: studies)
    with pytest.raises(UserError, match=said):
        run_studies(experiment, tmp_path / 'runs', 'command', 1, QUIET)
    assert not (tmp_path / 'runs').exists()


def test_a_study_of_which_no_trial_could_be_built_says_why(experiment, tmp_path, monkeypatch):
    studies = experiment.studies()
    with studies['text']['two'].unlocked():
        studies['text']['two'].space.rate = spec(Grid, key='batch_size', values=(0, -1))
    monkeypatch.setattr(Experiment, 'studies', lambda self: studies)
    monkeypatch.setattr(study_experiment, '_begun', lambda folder: [folder] if folder.name == 'one' else [])
    folders = [tmp_path / 'runs' / 'toy' / 'cpu' / 'text' / name for name in ('one', 'two')]
    create_study(folders[0], studies['text']['one'])
    with pytest.raises(UserError, match='two is no study with a trial yet: run the experiment first'):
        report_studies(experiment, tmp_path / 'runs', 'command', QUIET)
    create_study(folders[1], studies['text']['two'])
    work(folders[1], None, QUIET)
    with pytest.raises(UserError, match=r'two could be built, the first for this: config\.batch_size is 0; it'):
        report_studies(experiment, tmp_path / 'runs', 'command', QUIET)


def test_a_start_that_ended_in_an_error_leaves_its_time(experiment, tmp_path, monkeypatch):
    """And where none was left, as after a kill, the report says so."""
    study = create_study(tmp_path / 'one', experiment.studies()['text']['one'])

    def fails(*_):
        raise UserError('one worker met an error after the other had run every trial')

    monkeypatch.setattr(study_experiment.launch, 'run_processes', fails)
    for _ in range(2):
        with pytest.raises(UserError, match='one worker met an error'):
            study_experiment._run(study, 1, QUIET)
    seconds = study.folder / 'seconds.json'
    assert json.loads(seconds.read_text()) > 0
    study.workdir(0).mkdir(parents=True)
    (study.workdir(0) / 'run.json').touch()
    made = {'device_count': 1, 'device_kind': 'cpu', 'python': '3.13', 'packages': {'jax': '1', 'flax': '1'}}
    facts = SimpleNamespace(facts=made | {'git': {'commit': None}})
    monkeypatch.setattr(study_experiment, 'read_record', lambda workdir: facts)
    known = study_experiment._made(study.folder)
    seconds.unlink()
    rows = [known, study_experiment._made(study.folder)]
    assert provenance(rows[:1], 2, 'command', 'studies').startswith('1 of 2 studies, 0.0 minutes, by `command`')
    assert provenance(rows, 2, 'command', 'studies').startswith('2 of 2 studies, time unknown, by `command`')


@pytest.mark.parametrize('text', ['', '{}', 'null', 'true', '-1.0', 'NaN', 'Infinity'])
def test_a_time_that_was_damaged_is_named(tmp_path, text):
    (tmp_path / 'seconds.json').write_text(text)
    with pytest.raises(UserError, match=r'seconds.json is damaged: .*; remove it, and the time is said to be unknown'):
        seconds_of(tmp_path / 'seconds.json')


def test_a_sweep_that_was_stopped_is_not_reported(experiment, tmp_path, monkeypatch):
    monkeypatch.setattr(study_experiment.launch, 'run_processes', lambda *arguments: None)
    assert not run_studies(experiment, tmp_path / 'runs', 'command', 1, QUIET)
    assert (experiment.folder / 'README.md').read_text() == README
    # Begun, they have no trial that says what they were made with.
    for name, config in experiment.studies()['text'].items():
        create_study(tmp_path / 'runs' / 'toy' / 'cpu' / 'text' / name, config)
    with pytest.raises(UserError, match='text/one is no study with a trial yet: run the experiment first'):
        report_studies(experiment, tmp_path / 'runs', 'command', QUIET)


def test_reports_without_baselines_are_given_those_of_their_config(experiment, monkeypatch):
    asked = []
    monkeypatch.setattr(study_experiment, 'trivial_scores', lambda base, metric: asked.append(metric) or {'a': 1 / 3})
    kept = {'confirmed': [1.0], 'metric': 'valid/loss', 'goal': 'min', 'tokens': 0, 'counted': True, 'noise': None}
    kept |= {'report': 'text', 'study': 'one', 'flops_of_all': 0.0, 'costs': {'parameters': 1.0}}
    kept |= {'trials': [{'rate': 1.0, 'seed': 0, 'state': 'done', 'value': 1.0}], 'reported': 'test/loss'}
    empty, whole = kept | {'baselines': {}}, kept | {'baselines': {'b': 2.0}}
    made = {'made': f'8 of 8 studies; device: 1 cpu; Python {platform.python_version()}, jax 0.12.0, flax 0.12; ...'}
    found = with_baselines(experiment, made | {'studies': [empty, whole]}, QUIET)
    assert found == made | {'studies': [empty | {'baselines': {'a': 0.333333}}, whole]} and asked == ['test/loss']
    for results in ({'studies': [whole]}, {'studies': [empty], 'baselines': None}):
        assert with_baselines(experiment, made | results, QUIET) == made | results and len(asked) == 1
    with pytest.raises(UserError, match=r"has a report 'txt', and sweep\.py does not; did you mean 'text'"):
        with_baselines(experiment, made | {'studies': [empty | {'report': 'txt'}]}, QUIET)
    # The text of `tiny.py` is not Python's own; that of another version would be another.
    older = {'made': made['made'].replace(platform.python_version(), '3.9.1, 3.10.2'), 'studies': [empty]}
    assert with_baselines(experiment, older, QUIET) != older and len(asked) == 2
    monkeypatch.setattr(results_module, 'is_of_this_python', lambda base: True)
    out = io.StringIO()
    assert with_baselines(experiment, older, Console(file=out, width=1000)) == older and len(asked) == 2
    assert 'they were made by Python 3.10.2, 3.9.1, whose own text they are of, and this is 3.' in out.getvalue()
