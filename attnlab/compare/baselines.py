"""What trivial predictors reach by the metric that things are compared by: the lines that a score has to be above."""

import functools
import json
from collections.abc import Mapping

from ml_collections import ConfigDict

from attnlab.config import build, flatten, from_plain, plain
from attnlab.errors import UserError
from attnlab.tasks.task import Guessable, Slice, Sliced, Textual
from attnlab.train.average import SUFFIX

Baselines = Mapping[str, float]
"""Scores by the name of the predictor."""


def trivial_scores(config: ConfigDict, metric: str) -> Baselines:
    """What trivial predictors reach by a metric of a run's config, such as `test/1x/accuracy`; nothing where the task
    knows of none, or its data are not here.

    They are computed from the task's own data when they are asked for, once a process, and kept nowhere: a pure
    function of the config.
    """
    asked = {key: plain(config[key]) for key in ('task', 'evals', 'length')}
    return _scores(json.dumps(asked, sort_keys=True), metric)


TEXT = frozenset({'split', 'multiples', 'tokens'})
"""What an evaluator of text has."""


def text_scores(config: ConfigDict) -> dict[str, Baselines]:
    """What trivial predictors reach on the text that a run's config evaluates, by metric, such as `valid/loss`: loss
    and bits a byte. Nothing where it evaluates none, or its data are not here."""
    names = [evaluator.name for evaluator in config.evals if set(evaluator.keys()) >= TEXT]
    metrics = [f'{name}/{quantity}' for name in names for quantity in ('loss', 'bits_per_byte')]
    found = {metric: trivial_scores(config, metric) for metric in metrics}
    return {metric: scores for metric, scores in found.items() if scores}


def is_of_this_python(config: ConfigDict) -> bool:
    """Whether the data of a run's config are of the Python that runs, such as the text of its standard library, so that
    another version has others."""
    try:
        described = build(config.task).describe()
    except UserError:
        return False
    return any(name.rpartition('.')[2] == 'python' for name in flatten(described))


@functools.cache
def _scores(asked: str, metric: str) -> Baselines:
    config = from_plain(json.loads(asked))
    evaluator, _, name = metric.partition('/')
    evaluator = evaluator.removesuffix(SUFFIX)
    settings = next((one for one in config.evals if 'name' in one and one.name == evaluator), None)
    try:
        task = build(config.task)
        if settings is None or not isinstance(task, Guessable):
            return {}
        part, quantity = _asked(task, settings, config.length, name)
        return {} if part is None else task.trivial(part).get(quantity, {})
    except UserError:
        return {}


def _asked(task: Guessable, settings: ConfigDict, length: int, name: str) -> tuple[Slice | None, str]:
    """What an evaluator's number is of, and which it is: `1x/accuracy` of slices, `loss@2x` of text, whose targets are
    the same in windows of every length."""
    keys = set(settings.keys())
    if isinstance(task, Sliced) and {'split', 'multiples', 'examples'} <= keys:
        part, _, quantity = name.rpartition('/')
        slices = task.slices(settings.split, length, tuple(settings.multiples), settings.examples)
        return slices.get(part), quantity
    if isinstance(task, Textual) and keys >= TEXT:
        block = length * max(settings.multiples)
        return Slice(task.sample(settings.split, length, settings.tokens, block=block), length), name.partition('@')[0]
    return None, ''
