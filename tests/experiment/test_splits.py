"""Every sweep there is chooses by other examples than those that it reports, or says why not."""

import ast
import functools
import pathlib

import pytest

from attnlab.config import build
from attnlab.configuration import config_of
from attnlab.experiment.experiment import SIZES, Experiment
from attnlab.experiment.splits import chosen_on_valid
from attnlab.sweep.splits import split_of
from attnlab.sweep.sweep import read
from attnlab.tasks.task import same_rows
from configs import recall

ROOT = pathlib.Path(__file__).parents[2]
SWEEPS = sorted(path.stem for path in (ROOT / 'configs' / 'sweeps').glob('*.py'))
ARGUMENTS = {'series': ('', 'task=classification'), 'recall': ('', 'task=mqar_mixed', 'task=s5,size=paper')}
"""Of a sweep config, where the default is not all."""

FOLDERS = sorted(path.parent for path in ROOT.glob('experiments/*/sweep.py'))
STUDIES = [folder for folder in FOLDERS if Experiment(folder, 'cpu').has_studies()]
PLOTS = [folder / 'plot.py' for folder in FOLDERS if (folder / 'plot.py').exists()]

TEXT = 'text of the standard library has two splits: what is fresh in the runs that are reported is the seeds'
STORED = 'its stored results were chosen on the examples that are reported, and its README says so'
SAME = {
    'language': TEXT,
    'activations': TEXT,
    'conv_for_all_or_none/text': TEXT,
    'lr_sensitivity/language': TEXT,
    'search_activations/text': TEXT,
    'conv_for_all_or_none/recall': STORED,
    'first_comparison/listops': STORED,
    'first_comparison/parity': STORED,
    'first_comparison/recall': STORED,
    'lr_sensitivity/recall': STORED,
    'memory_horizon/delayed-long': STORED,
    'memory_horizon/delayed-short': STORED,
    'memory_horizon/selective-long': STORED,
    'memory_horizon/selective-short': STORED,
}
"""The sweep configs, and the reports of experiments, that choose by the examples that they report, and why."""

SAID = 'on the examples that are reported'
"""What a README says where a rate was chosen so."""


LOSSES = {
    'facts': 'all facts are trained on and asked: there is nothing to generalise',
    'gating': TEXT,
}
"""The experiments of runs that choose by a number that is reported too, and why."""


@functools.cache
def studies_of(folder, size):
    return Experiment(folder, size).studies()


def apart(config):
    """Whether a sweep's metric is of other examples than those that its confirmed runs are judged by."""
    sweep = read(config)
    chosen, reported = (split_of(sweep.base, metric) for metric in (sweep.metric, sweep.score))
    assert None not in (chosen, reported)
    return not same_rows(build(sweep.base.task), chosen, reported)


@pytest.mark.parametrize(
    ('name', 'argument'), [(name, argument) for name in SWEEPS for argument in ARGUMENTS.get(name, ('',))]
)
def test_sweep_configs_choose_on_other_examples_than_they_report(name, argument):
    assert apart(config_of(ROOT / 'configs' / 'sweeps' / f'{name}.py', argument)) == (name not in SAME)


@pytest.mark.parametrize('size', SIZES)
@pytest.mark.parametrize('folder', STUDIES, ids=lambda folder: folder.name)
def test_experiments_choose_on_other_examples_than_they_report(folder, size):
    """One study a report: those of a report have one sweep, but for the model."""
    for report, studies in studies_of(folder, size).items():
        name = f'{folder.name}/{report}'
        assert apart(next(iter(studies.values()))) == (name not in SAME), name
        if SAME.get(name) == STORED:
            assert SAID in ' '.join((folder / 'README.md').read_text().split())


CHOOSING = ('preferred', 'at_best_rate')
"""The functions of `attnlab.experiment.results` that choose a rate, by their second argument."""


def chosen_by(path):
    """The numbers by which the plot of an experiment of runs prefers a rate."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    rules = [call.args[1] for call in calls if isinstance(call.func, ast.Name) and call.func.id in CHOOSING]
    return [node.slice.value for rule in rules for node in ast.walk(rule) if isinstance(node, ast.Subscript)]


def test_experiments_of_runs_choose_on_other_examples_than_they_report():
    """By what is called so; `measure` says of which split it is."""
    found = {path.parent.name: chosen_by(path) for path in PLOTS}
    preferring = {name: keys for name, keys in found.items() if keys}
    assert len(preferring) > 8 and LOSSES.keys() <= preferring.keys()
    for name, keys in preferring.items():
        assert all(key.startswith(('valid', 'chosen_by')) for key in keys) == (name not in LOSSES), (name, keys)


def test_exceptions_are_of_what_is_there():
    reports = {f'{folder.name}/{report}' for folder in STUDIES for report in studies_of(folder, 'cpu')}
    assert SAME.keys() <= reports | set(SWEEPS)


def test_validation_is_evaluated_in_place_of_test():
    config = recall.get_config()
    test, valid = map(build, chosen_on_valid(config.evals))
    (before,) = map(build, config.evals)
    assert (valid.split, valid.name, valid.cadence) == ('valid', 'valid', before.cadence)
    assert (test.split, test.name, type(test.cadence).__name__) == ('test', 'test', 'AtEnd')
    assert valid.multiples == test.multiples == before.multiples and before.split == 'test'
