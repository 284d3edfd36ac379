"""Language models that differ in what heads can do when they have nothing to do."""

import pathlib

from rich.console import Console

from attnlab.analysis.examination import analyse_run
from attnlab.analysis.question import Question
from attnlab.config import spec
from attnlab.configuration import config_of
from attnlab.evals.cadence import AtEnd
from attnlab.evals.held_out import HeldOut
from attnlab.experiment.experiment import Finished, Run
from attnlab.experiment.settings import for_length, small_text
from attnlab.tables import Printer

CONFIG = pathlib.Path(__file__).parents[2] / 'configs' / 'language.py'
MAPS = ('mha', 'softpick', 'clipped_softmax', 'gated_attention', 'learned_sink', 'sigmoid_attention')


def runs(size):
    """A run a map: two layers of 64 channels for 500 steps, or the 125m size of `configs/language.py`."""
    return [Run(name, config(name, size)) for name in MAPS]


def config(name, size):
    """The run of a map, whose constants are those of its training length."""
    found = config_of(CONFIG, f'zoo={name},size={"tiny" if size == "cpu" else "125m"}')
    with found.unlocked():
        if size == 'cpu':
            small_text(found, steps=500, batch=8, length=256)
        else:
            found.update(steps=5000, accumulate=16)
        for_length(found, name)
        found.evals = (spec(HeldOut, cadence=spec(AtEnd), tokens=65_536),)
        found.checkpoint.every = found.steps // 2 if size == 'cpu' else 1000
        found.report.update(every=found.steps // 40, tensorboard=False)
    return found


def measure(finished: Finished):
    """What `attnlab analyse` finds on 64 windows of the validation text, and the loss."""
    with (finished.workdir / 'log.txt').open('a') as log:
        printer = Printer(Console(file=log))
        found = analyse_run(Question.of(finished.workdir, None, 'valid', rows=64), printer, bits=(8, 6, 4))
    return {'loss': finished.last('valid/loss'), **found.numbers()}
