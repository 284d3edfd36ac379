"""Modular addition by four methods, seen step by step."""

import pathlib

from attnlab.config import spec
from attnlab.configuration import config_of
from attnlab.evals.cadence import EveryNSteps
from attnlab.experiment.experiment import Finished, Run

CONFIG = pathlib.Path(__file__).parents[2] / 'configs' / 'grokking.py'
METHODS = ('softmax', 'stablemax', 'perpendicular', 'weight_decay')
METRICS = ('loss', 'accuracy', 'collapsed', 'vanished')


def runs(size):
    """One run a method: numbers modulo 59 for 3000 steps, or modulo 113 for 80000."""
    return [Run(method, config(method, size)) for method in METHODS]


def config(method, size):
    """The run of a method."""
    found = config_of(CONFIG, f'method={method},size={"tiny" if size == "cpu" else "paper"}')
    with found.unlocked():
        found.evals[0].cadence = spec(EveryNSteps, n=found.steps // 50)
        found.report.every = found.steps // 100
        found.checkpoint.every = found.steps // 2
    return found


def measure(finished: Finished):
    """Losses, accuracies, and shares of collapsed and vanished sums, by step; `test/...` of the sums not shown."""
    names = {f'train/{name}': f'train/{name}' for name in METRICS} | {
        f'test/{name}': f'test/all/{name}' for name in METRICS
    }
    return {'curves': {name: finished.curve(metric) for name, metric in names.items()}}
