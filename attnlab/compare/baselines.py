"""What trivial predictors reach by the metric that things are compared by: the lines that a score has to be above."""

import functools
import json
from collections.abc import Mapping

from ml_collections import ConfigDict

from attnlab.config import build, from_plain, plain
from attnlab.errors import UserError
from attnlab.tasks.task import Guessable, Sliced
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


@functools.cache
def _scores(asked: str, metric: str) -> Baselines:
    config = from_plain(json.loads(asked))
    evaluator, _, name = metric.partition('/')
    evaluator = evaluator.removesuffix(SUFFIX)
    part, _, quantity = name.rpartition('/')
    settings = next((one for one in config.evals if 'name' in one and one.name == evaluator), None)
    if settings is None or not {'split', 'multiples', 'examples'} <= set(settings.keys()):
        return {}
    try:
        task = build(config.task)
        if not isinstance(task, Guessable) or not isinstance(task, Sliced):
            return {}
        slices = task.slices(settings.split, config.length, tuple(settings.multiples), settings.examples)
        return task.trivial(slices[part]).get(quantity, {}) if part in slices else {}
    except UserError:
        return {}
