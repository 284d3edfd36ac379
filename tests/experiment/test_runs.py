"""An experiment of three runs of four steps, one of which cannot go on."""

import io
import json
import os
import pathlib
import platform
import shutil
import signal

import pytest
from rich.console import Console

from attnlab import cli
from attnlab.errors import UserError
from attnlab.experiment import runs as experiment_runs
from attnlab.experiment.experiment import Experiment
from attnlab.experiment.published import measured_of
from attnlab.experiment.results import markdown, plus_minus, with_results, write_readme
from attnlab.experiment.runs import _read_measured, report_experiment, run_experiment
from attnlab.train import launch, loop
from attnlab.train.run import data_hashes

CONFIG = pathlib.Path(__file__).parents[2] / 'configs' / 'grokking.py'
SWEEP = f"""
import pathlib
from attnlab.experiment.experiment import Run
from attnlab.configuration import config_of

def runs(size):
    return [Run(label, config(rate)) for label, rate in (('slow', 1e-3), ('broken', 1e38), ('fast', 1e-2))]

def config(rate):
    found = config_of(pathlib.Path({str(CONFIG)!r}))
    with found.unlocked():
        found.steps, found.batch_size = 4, 10
        found.task.table.modulus = 5
        found.model.hidden = (8,)
        found.optimizer.peak_lr = rate
        found.report.every = 2
        found.evals[0].cadence.n = 4
    return found

def measure(finished):
    return {{'accuracy': finished.curve('test/all/accuracy')}}
"""
OTHER_TASK = """from attnlab.config import spec
from attnlab.data.synthetic.arithmetic import Parity
from attnlab.tasks.synthetic import LabelPrediction
"""
PLOT = """'Accuracy over steps.'
from attnlab.experiment.results import panels

def figure(rows):
    figure, axes = panels(2)
    for row in rows:
        axes[0].plot(*zip(*row['accuracy']))
    return figure

def table(rows):
    return [['run', 'accuracy'], *([row['label'], str(row['accuracy'][-1][1])] for row in rows)]
"""
README = """# A question

<!-- results of size cpu -->
Not run yet.
<!-- end of size cpu -->
<!-- results of size full -->
Not run yet.
<!-- end of size full -->
"""


@pytest.fixture(scope='module')
def done(tmp_path_factory):
    """The experiment after its runs."""
    root = tmp_path_factory.mktemp('root')
    folder = root / 'experiments' / 'toy'
    folder.mkdir(parents=True)
    for name, text in (('sweep.py', SWEEP), ('plot.py', PLOT), ('README.md', README)):
        (folder / name).write_text(text)
    assert run(root) == loop.FINISHED
    return root


def run(root):
    return run_experiment(
        Experiment(root / 'experiments' / 'toy', 'cpu'), root / 'runs', 'command', Console(quiet=True)
    )


def results(root):
    folder = root / 'experiments' / 'toy'
    return {
        path.name: path.read_bytes() for path in (folder / 'README.md', *folder.glob('results/*')) if path.is_file()
    }


def test_what_is_written(done):
    found = results(done)
    assert found.keys() == {'README.md', 'cpu.json', 'cpu.png'}
    rows = json.loads(found['cpu.json'])['runs']
    assert [row['label'] for row in rows] == ['slow', 'broken', 'fast']
    assert rows[0]['accuracy'][-1][0] == 4 and rows[0]['tokens_per_second'] > 0
    measured = measured_of(done / 'runs' / 'toy' / 'cpu' / 'fast', 'test/all/accuracy')
    assert measured['value'] == pytest.approx(rows[2]['accuracy'][-1][1], rel=1e-5) and measured['noise'] is None
    assert [row['task'] for row in rows] == ['Addition'] * 3
    recorded = json.loads((done / 'runs' / 'toy' / 'cpu' / 'fast' / 'run.json').read_text())['starts'][-1]['data']
    assert all(row['data'] == data_hashes(recorded) for row in rows)
    assert rows[1]['failed'].startswith('step ') and 'accuracy' not in rows[1]
    readme = found['README.md'].decode()
    before, _, after = README.partition('Not run yet.')
    assert readme.startswith(before) and readme.endswith(after)
    assert f'| slow | {rows[0]["accuracy"][-1][1]} |' in readme
    assert readme.count('![Accuracy over steps](results/cpu.png)') == 1 and 'full.png' not in readme
    assert 'broken did not come to its end: step ' in readme
    assert '3 of 3 runs' in readme and 'by `command`; device: ' in readme and 'jax ' in readme and 'commit ' in readme


def test_what_is_done_is_not_done_again(done, monkeypatch):
    before = results(done)
    monkeypatch.setattr(launch, 'train', lambda *_, **__: pytest.fail('trained again'))
    assert run(done) == loop.FINISHED
    assert results(done) == before


def test_tables_and_figure_are_made_again_from_the_numbers_alone(done, tmp_path):
    shutil.copytree(done, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / 'runs')
    found, before = Experiment(tmp_path / 'experiments' / 'toy', 'cpu'), results(tmp_path)
    readme = found.folder / 'README.md'
    readme.write_text(README)
    report_experiment(found, tmp_path / 'runs', 'another command', Console(quiet=True))
    assert results(tmp_path) == before
    (readme.parent / 'results' / 'cpu.json').unlink()
    with pytest.raises(UserError, match='nothing of toy has been measured at size cpu'):
        report_experiment(found, tmp_path / 'runs', 'command', Console(quiet=True))


def test_a_number_that_one_run_lacks_is_read_as_no_number(tmp_path):
    """It is null in the file, as JSON has nothing else, and what draws and tabulates would stop at that."""
    (tmp_path / 'toy' / 'results').mkdir(parents=True)
    for name, text in (('sweep.py', SWEEP), ('plot.py', PLOT), ('README.md', README)):
        (tmp_path / 'toy' / name).write_text(text)
    made = {'device_count': 1, 'device_kind': 'cpu', 'cores': 2, 'python': platform.python_version()}
    made |= {'packages': {'jax': '1', 'flax': '1'}, 'git': {'commit': None, 'changed': None}}
    runs = [
        {'label': label, 'task': 'Addition', 'made': made, 'seconds': 1.0, 'accuracy': [[4, value]]}
        for label, value in (('slow', 0.5), ('fast', None))
    ]
    stored = tmp_path / 'toy' / 'results' / 'cpu.json'
    stored.write_text(json.dumps({'planned': 2, 'command': 'command', 'runs': runs}))
    report_experiment(Experiment(tmp_path / 'toy', 'cpu'), tmp_path / 'runs', 'command', Console(quiet=True))
    assert '| fast | nan |' in (tmp_path / 'toy' / 'README.md').read_text()
    assert json.loads(stored.read_text())['runs'][1]['accuracy'] == [[4, None]]


def test_pictures_of_runs_are_kept_beside_the_figure(done, tmp_path):
    """Of runs that left one; and shown again when the runs are gone."""
    shutil.copytree(done, tmp_path, dirs_exist_ok=True)
    folder, left = tmp_path / 'experiments' / 'toy', tmp_path / 'runs' / 'toy' / 'cpu'
    named = """
def pictures(rows):
    return {row['label']: f'{row["label"]}/figures/seen.png' for row in rows}
"""
    (folder / 'plot.py').write_text(PLOT + named)
    (left / 'fast' / 'figures').mkdir(exist_ok=True)
    (left / 'fast' / 'figures' / 'seen.png').write_bytes(b'picture')
    assert run(tmp_path) == loop.FINISHED
    kept, readme = folder / 'results' / 'cpu' / 'fast.png', folder / 'README.md'
    assert [path.name for path in kept.parent.iterdir()] == ['fast.png'] and kept.read_bytes() == b'picture'
    shown = '| fast |\n| --- |\n| ![fast](results/cpu/fast.png) |'
    assert shown in readme.read_text()
    shutil.rmtree(tmp_path / 'runs')
    readme.write_text(README)
    report_experiment(Experiment(folder, 'cpu'), tmp_path / 'runs', 'another command', Console(quiet=True))
    assert shown in readme.read_text() and kept.read_bytes() == b'picture'


def test_what_is_not_measured_is_and_a_stopped_run_leaves_the_rest(done, tmp_path, monkeypatch):
    shutil.copytree(done, tmp_path, dirs_exist_ok=True)
    fast = tmp_path / 'runs' / 'toy' / 'cpu' / 'fast'
    (fast / 'measured.json').unlink()
    (fast / 'seconds.json').write_text('6000.0')
    trained = launch.train
    monkeypatch.setattr(launch, 'train', lambda *_, **__: loop.STOPPED)
    assert run(tmp_path) == loop.STOPPED
    stopped = json.loads((fast / 'seconds.json').read_text())
    assert stopped > 6000 and '2 of 3 runs' in results(tmp_path)['README.md'].decode()
    monkeypatch.setattr(launch, 'train', trained)
    steps = (fast / 'metrics.jsonl').read_bytes()
    assert run(tmp_path) == loop.FINISHED
    measured = json.loads((fast / 'measured.json').read_text())
    assert measured['accuracy'] and (fast / 'metrics.jsonl').read_bytes() == steps
    # All starts of a run count, those that were stopped too.
    assert measured['seconds'] >= round(stopped, 1)
    assert '3 of 3 runs' in results(tmp_path)['README.md'].decode()


def test_one_that_is_stopped_in_its_first_run_reports_nothing(done, tmp_path, monkeypatch):
    folder = shutil.copytree(done / 'experiments' / 'toy', tmp_path / 'experiments' / 'toy')
    before = results(tmp_path)
    monkeypatch.setattr(launch, 'train', lambda *_, **__: loop.STOPPED)
    assert run(tmp_path) == loop.STOPPED and results(tmp_path) == before
    shutil.rmtree(folder / 'results')
    assert run(tmp_path) == loop.STOPPED


def test_results_that_were_damaged_are_named(done, tmp_path):
    folder = shutil.copytree(done / 'experiments' / 'toy', tmp_path / 'experiments' / 'toy')
    with (folder / 'results' / 'cpu.json').open('a') as file:
        file.write('<<<<<<< HEAD')
    with pytest.raises(UserError, match=r'results/cpu.json is not what was written there: Extra data'):
        report_experiment(Experiment(folder, 'cpu'), tmp_path / 'runs', 'command', Console(quiet=True))


@pytest.mark.parametrize('text', ['', '{', '[]', 'null', '{"label": "slow"}', '\udcff'])
def test_what_was_measured_of_a_run_and_was_damaged_is_named(tmp_path, text):
    path = tmp_path / 'measured.json'
    path.write_bytes(text.encode(errors='surrogateescape'))
    with pytest.raises(UserError, match=r'measured.json is damaged: .*; remove it, and run the experiment again'):
        _read_measured(path)


def test_a_signal_in_the_last_evaluation_of_a_run_stops_the_experiment(done, tmp_path, monkeypatch):
    """The run is at its end, and is measured; no other is begun."""
    shutil.copytree(done, tmp_path, dirs_exist_ok=True)
    slow, fast = (tmp_path / 'runs' / 'toy' / 'cpu' / label for label in ('slow', 'fast'))
    shutil.rmtree(slow), shutil.rmtree(fast)
    trained = launch.train

    def signals(step, numbers):
        os.kill(os.getpid(), signal.SIGTERM)
        return False

    monkeypatch.setattr(launch, 'train', lambda *given, **named: trained(*given, **named, watch=signals))
    assert run(tmp_path) == loop.STOPPED
    assert (slow / 'measured.json').exists() and not fast.exists()
    assert run(tmp_path) == loop.FINISHED


def test_a_run_of_another_config_is_refused(done, tmp_path):
    shutil.copytree(done, tmp_path, dirs_exist_ok=True)
    sweep = tmp_path / 'experiments' / 'toy' / 'sweep.py'
    sweep.write_text(SWEEP.replace('1e-3', '2e-3'))
    with pytest.raises(UserError, match=r'slow holds a run with another config \(optimizer.peak_lr: 0.001 there'):
        run(tmp_path)


@pytest.mark.parametrize(
    ('right', 'wrong', 'said'),
    [
        ('CONFIG))', "CONFIG), 'method=stabelmax')", 'sweep.py, line 12: there is no method=stabelmax'),
        (
            'found.model.hidden',
            'found.model.hiden',
            "slow: config.model takes no argument 'hiden'; did you mean 'hidden'",
        ),
        ('found.batch_size = 4, 10', 'found.batch_size = 0, 10', 'slow: config.steps is 0'),
        ('def measure', 'def mesure', 'sweep.py has no function measure'),
        ('def runs', 'def run', 'sweep.py has no function runs'),
    ],
)
def test_what_does_not_fit_is_one_line_before_anything_runs(tmp_path, right, wrong, said):
    folder = tmp_path / 'experiments' / 'toy'
    folder.mkdir(parents=True)
    text = SWEEP.replace(repr(str(CONFIG)), 'CONFIG').replace('def runs', f'CONFIG = {str(CONFIG)!r}\n\ndef runs', 1)
    assert right in text
    for name, content in (('sweep.py', text.replace(right, wrong)), ('plot.py', PLOT), ('README.md', README)):
        (folder / name).write_text(content)
    with pytest.raises(UserError, match=said) as raised:
        run(tmp_path)
    assert '\n' not in str(raised.value) and not (tmp_path / 'runs').exists()


@pytest.mark.parametrize(
    ('text', 'said'),
    [
        (
            'import json\n\ndef runs(size):\n    return json.loads("{")',
            r'toy/sweep.py raised JSONDecodeError:\n  File ".*sweep.py", line 4, in runs.*json.decoder.JSONDecodeError',
        ),
        ('import pathlip', r'toy/sweep.py raised ModuleNotFoundError:\n  File ".*sweep.py", line 1.*pathlip'),
        ('def runs(:', r'toy/sweep.py raised SyntaxError:\n  File ".*sweep.py", line 1'),
    ],
)
def test_a_bug_of_an_experiment_shows_its_traceback_from_its_file_on(tmp_path, monkeypatch, text, said):
    monkeypatch.chdir(tmp_path)
    folder = pathlib.Path('experiments') / 'toy'
    folder.mkdir(parents=True)
    (folder / 'sweep.py').write_text(text)
    with pytest.raises(UserError, match=f'(?s)^experiments/{said}') as raised:
        Experiment(folder, 'cpu').runs()
    assert 'attnlab/experiment' not in str(raised.value) and 'importlib' not in str(raised.value)


@pytest.mark.parametrize(
    ('raises', 'said'),
    [
        ('OSError(28, "No space left on device", "results")', 'attnlab: results: No space left on device; what was'),
        ('ModuleNotFoundError(name="optuna")', 'attnlab: experiment needs optuna, which is not installed: pip install'),
        ('type("JaxRuntimeError", (RuntimeError,), {})("Out of memory")', 'attnlab: the device has too little memory:'),
    ],
)
def test_what_the_machine_lacks_is_no_bug_of_an_experiment(tmp_path, monkeypatch, capsys, raises, said):
    monkeypatch.chdir(tmp_path)
    folder = pathlib.Path('experiments') / 'toy'
    folder.mkdir(parents=True)
    (folder / 'sweep.py').write_text(f'def runs(size):\n    raise {raises}\n\ndef measure(finished):\n    pass\n')
    assert cli.main(['experiment', 'toy', '--dry_run']) == 2
    error = capsys.readouterr().err
    assert error.startswith(said) and error.count('\n') == 1


def test_an_experiment_may_have_dataclasses_whose_annotations_are_put_off(tmp_path):
    folder = tmp_path / 'toy'
    folder.mkdir()
    (folder / 'sweep.py').write_text(
        'from __future__ import annotations\nimport dataclasses\n\n@dataclasses.dataclass\nclass Setting:\n'
        '    rate: float = 1.0\n\ndef runs(size):\n    return []\n'
    )
    assert Experiment(folder, 'cpu').runs() == []


def test_a_run_that_cannot_be_measured_is_kept(done, tmp_path):
    shutil.copytree(done, tmp_path, dirs_exist_ok=True)
    workdir, sweep = tmp_path / 'runs' / 'toy' / 'cpu' / 'fast', tmp_path / 'experiments' / 'toy' / 'sweep.py'
    (workdir / 'measured.json').unlink()
    sweep.write_text(SWEEP.replace("finished.curve('test/all/accuracy')", "dict(finished.curve('loss'))[4]"))
    said = r'(?s)fast has run and cannot be measured: .*sweep.py raised KeyError:\n.*sweep.py", line \d+.*KeyError: 4$'
    with pytest.raises(UserError, match=said):
        run(tmp_path)
    sweep.write_text(SWEEP)
    assert run(tmp_path) == loop.FINISHED and (workdir / 'measured.json').exists()


def test_what_counts_reach_on_the_text_evaluated_stands_below_the_table_and_is_kept(done, tmp_path, monkeypatch):
    shutil.copytree(done / 'experiments', tmp_path / 'experiments')
    found = Experiment(tmp_path / 'experiments' / 'toy', 'cpu')
    readme, stored = found.folder / 'README.md', found.folder / 'results' / 'cpu.json'

    def report():
        report_experiment(found, tmp_path / 'runs', 'command', Console(quiet=True))
        return readme.read_text(), json.loads(stored.read_text())

    # Of a table of sums nothing is said.
    assert 'baselines' not in report()[1]
    scores = {'valid/loss': {'unigram': 3.0000001, 'bigram': 2.0}}
    monkeypatch.setattr(experiment_runs, 'text_scores', lambda config: scores)
    text, results = report()
    assert 'counts of training tokens and of pairs reach valid/loss 3 (unigram), 2 (bigram).' in text
    assert results['baselines'] == [{'valid/loss': {'unigram': 3.0, 'bigram': 2.0}}], 'once, as all runs have it'
    monkeypatch.setattr(experiment_runs, 'text_scores', lambda config: pytest.fail('computed again'))
    assert report() == (text, results)
    stored.write_text(json.dumps(results | {'baselines': None}))
    text, results = report()
    assert results['baselines'] is None and 'No counts of bytes and pairs' in text and 'unigram' not in text


def test_no_counts_are_taken_of_the_text_of_another_python(done, tmp_path, monkeypatch):
    shutil.copytree(done / 'experiments', tmp_path / 'experiments')
    found, out = Experiment(tmp_path / 'experiments' / 'toy', 'cpu'), io.StringIO()
    stored = found.folder / 'results' / 'cpu.json'
    stored.write_text(stored.read_text().replace(f'"python": "{platform.python_version()}"', '"python": "3.9.1"'))
    monkeypatch.setattr(experiment_runs, 'text_scores', lambda config: pytest.fail('computed'))
    monkeypatch.setattr('attnlab.experiment.results.is_of_this_python', lambda config: True)
    report_experiment(found, tmp_path / 'runs', 'command', Console(file=out, width=1000))
    assert 'left out: they were made by Python 3.9.1, whose own text they are of, and this is 3.' in out.getvalue()
    assert 'baselines' not in json.loads(stored.read_text())


@pytest.mark.parametrize(
    ('right', 'wrong', 'said'),
    [
        ("('fast'", "('rapid'", "results/cpu.json of toy has a run 'fast', and sweep.py does not"),
        ('found.task.table', 'found.task', 'says that slow is of Addition; in sweep.py it is of Parity'),
    ],
)
def test_results_of_other_runs_or_tasks_are_not_reported(done, tmp_path, right, wrong, said):
    shutil.copytree(done / 'experiments', tmp_path / 'experiments')
    found, text = Experiment(tmp_path / 'experiments' / 'toy', 'cpu'), SWEEP.replace(right, wrong)
    if wrong == 'found.task':
        text = text.replace('found.task.modulus = 5', 'found.task = spec(LabelPrediction, problem=Parity())')
        text = text.replace('\nimport pathlib', '\nimport pathlib\n' + OTHER_TASK)
    (found.folder / 'sweep.py').write_text(text)
    before = (found.folder / 'README.md').read_text()
    with pytest.raises(UserError, match=said):
        report_experiment(found, tmp_path / 'runs', 'command', Console(quiet=True))
    assert (found.folder / 'README.md').read_text() == before


def test_a_dry_run_says_what_is_left(done, tmp_path, capsys):
    folder = done / 'experiments' / 'toy'
    for workdirs, left in ((done / 'runs', 0), (tmp_path / 'nothing', 3)):
        assert cli.main(['experiment', str(folder), f'--workdirs={workdirs}', '--dry_run']) == 0
        assert f'{left} runs are left' in capsys.readouterr().out
    assert not (tmp_path / 'nothing').exists()


def test_what_a_finished_run_is_asked(done, tmp_path):
    shutil.copytree(done, tmp_path, dirs_exist_ok=True)
    workdir, sweep = tmp_path / 'runs' / 'toy' / 'cpu' / 'fast', tmp_path / 'experiments' / 'toy' / 'sweep.py'
    (workdir / 'measured.json').unlink()
    more = ", 'last': finished.last('test/all/accuracy'), 'size': finished.size, 'none': float('nan')}"
    asked = SWEEP.replace("curve('test/all/accuracy')}", "curve('test/all/accuracy')" + more)
    sweep.write_text(asked.replace("last('test/all/accuracy')", "last('test/all/acuracy')"))
    with pytest.raises(UserError, match=r"no test/all/acuracy in metrics.jsonl; did you mean 'test/all/accuracy'"):
        run(tmp_path)
    sweep.write_text(asked)
    run(tmp_path)
    found = json.loads((workdir / 'measured.json').read_text())
    assert found['last'] == found['accuracy'][-1][1] and found['size'] == 'cpu' and found['none'] is None


def test_a_run_that_failed_is_in_the_verdict_on_a_published_number(done, tmp_path):
    folder = shutil.copytree(done / 'experiments' / 'toy', tmp_path / 'experiments' / 'toy')
    shutil.copytree(done / 'runs', tmp_path / 'runs')
    for label in ('slow', 'fast'):
        path = tmp_path / 'runs' / 'toy' / 'cpu' / label / 'measured.json'
        path.write_text(json.dumps(json.loads(path.read_text()) | {'value': 0.5}))
    claim = "\n\ndef published(size):\n    return Published(value=0.5, metric='accuracy', source='a paper')\n"
    imported = '\nfrom attnlab.experiment.published import Published\nimport pathlib'
    (folder / 'sweep.py').write_text(SWEEP.replace('\nimport pathlib', imported) + claim)
    report_experiment(Experiment(folder, 'cpu'), tmp_path / 'runs', 'command', Console(quiet=True))
    (line,) = [line for line in (folder / 'README.md').read_text().splitlines() if line.startswith('| accuracy')]
    assert '| 0.5000 |' in line and 'not comparable: 1 of 3 seeds did not come to their end' in line


def test_an_experiment_that_was_stopped_is_not_taken_for_a_finished_one(done, tmp_path, monkeypatch):
    folder = shutil.copytree(done / 'experiments' / 'toy', tmp_path / 'experiments' / 'toy')
    monkeypatch.setattr(launch, 'train', lambda *_, **__: loop.STOPPED)
    asked = ['experiment', str(folder), f'--workdirs={tmp_path / "runs"}']
    assert cli.main(asked) == launch.STOPPED != 0
    assert cli.main(['experiment', str(folder), f'--workdirs={done / "runs"}']) == 0


@pytest.mark.parametrize(
    ('options', 'sentence'),
    [
        (['--report', '--dry_run'], '--report and --dry_run do not go together'),
        (['--workers=2'], '--workers is for experiments of studies that are run'),
    ],
)
def test_options_that_would_change_nothing_are_refused(done, options, sentence, capsys):
    assert cli.main(['experiment', str(done / 'experiments' / 'toy'), *options]) != 0
    assert sentence in capsys.readouterr().err


def test_an_experiment_that_is_not_there(done, tmp_path):
    with pytest.raises(UserError, match='holds no experiments: run this in a clone'):
        Experiment(tmp_path / 'toys', 'cpu')
    with pytest.raises(UserError, match=r"there is no experiment 'toys' in .*experiments; did you mean 'toy'"):
        Experiment(done / 'experiments' / 'toys', 'cpu')
    with pytest.raises(UserError, match=r"there is no size 'ful'; did you mean 'full'"):
        Experiment(done / 'experiments' / 'toy', 'ful')


def test_two_runs_of_one_name(done, tmp_path):
    shutil.copytree(done, tmp_path, dirs_exist_ok=True)
    folder = tmp_path / 'experiments' / 'toy'
    (folder / 'sweep.py').write_text(SWEEP.replace("'slow'", "'fast'"))
    with pytest.raises(UserError, match='two runs of toy are called fast'):
        Experiment(folder, 'cpu').runs()


def test_a_readme_without_a_place_for_the_table():
    assert with_results(README, 'full', 'table').count('Not run yet.') == 1
    with pytest.raises(UserError, match=r'README\.md lacks the comments <!-- results of size cpu -->'):
        with_results('# A question\n', 'cpu', 'table')


def test_a_figure_that_the_readme_shows_is_not_shown_twice(done, tmp_path):
    shutil.copytree(done / 'experiments', tmp_path / 'experiments')
    found = Experiment(tmp_path / 'experiments' / 'toy', 'cpu')
    readme = found.folder / 'README.md'
    for before, shown in ((README, 1), (f'{README}\n![mine](results/cpu.png)\n', 0)):
        readme.write_text(before)
        write_readme(found, 'table')
        assert readme.read_text().count('![Accuracy over steps](results/cpu.png)\n\ntable') == shown
        assert readme.read_text().count('(results/cpu.png)') == 1


def test_a_table():
    assert markdown([['a', 'b'], ['1', '2']]) == '| a | b |\n| --- | ---: |\n| 1 | 2 |'


def test_errors_over_seeds():
    assert plus_minus([1.0, 2.0, 3.0], 3) == f'2.000 ± {4.3027 / 3**0.5:.3f}'
    assert plus_minus([1.0, 2.0], 1) == '1.5 (1.0 to 2.0)' and plus_minus([1.0], 1) == '1.0'
