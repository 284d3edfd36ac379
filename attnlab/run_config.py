"""The structure shared by all run configs, and the components that their arguments choose by name."""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from ml_collections import ConfigDict

from attnlab.config import choose, spec, spec_of
from attnlab.quantize.training import rounding_called
from attnlab.train.optimizer import AdamW, Lion, Muon, Optimizer
from attnlab.train.partition import Axes
from attnlab.train.report import Reporting
from attnlab.train.schedule import Constant, Cosine, LinearDecay, Schedule, Staircase, WarmupStableDecay
from attnlab.train.setup import Saving
from attnlab.train.step import Precision


@dataclasses.dataclass(frozen=True)
class OptimizerChoice:
    """An optimiser, with the factors by which its learning rate and weight decay differ from AdamW's.

    `shares` are the fields, besides those of all optimisers, that mean what they mean for AdamW.
    """

    kind: type[Optimizer]
    peak_lr: float = 1.0
    weight_decay: float = 1.0
    shares: tuple[str, ...] = ()


OPTIMIZERS = MappingProxyType(
    {
        'adamw': OptimizerChoice(AdamW),
        # A rate 3 to 10 times lower and a decay 3 to 10 times higher: Chen et al. 2023, https://arxiv.org/abs/2302.06675.
        'lion': OptimizerChoice(Lion, peak_lr=0.2, weight_decay=5.0),
        # It has AdamW for parameters that are no matrices.
        'muon': OptimizerChoice(Muon, shares=('b1', 'b2', 'eps')),
    }
)
"""The values of the argument `optimizer=`."""

SCHEDULES: Mapping[str, Callable[..., Schedule]] = MappingProxyType(
    {
        'cosine': Cosine,
        'wsd': WarmupStableDecay,
        'linear': LinearDecay,
        'constant': Constant,
        'staircase': Staircase,
    }
)
"""The values of the argument `schedule=`."""

CHOICES = MappingProxyType({'optimizer': '', 'schedule': '', 'rounding': ''})
"""The arguments that every config takes, for `attnlab.config.arguments`; an empty one keeps the config's default, which
of `rounding` (`attnlab.quantize.training.rounding_called`) is full precision."""


def run_config(
    choices: Mapping[str, str],
    *,
    steps: int,
    batch_size: int,
    length: int,
    task: ConfigDict,
    model: ConfigDict,
    optimizer: AdamW,
    evals: tuple[ConfigDict, ...],
    save_every: int,
    accumulate: int = 1,
    rows_at_once: int | None = None,
    precision: Precision | None = None,
    report: Reporting | None = None,
    start: ConfigDict | None = None,
) -> ConfigDict:
    """Returns the locked config of a run, with the same top-level keys for every task.

    Args:
      choices: the arguments of the config, those of `CHOICES` among them.
      steps: number of training steps.
      batch_size: rows per step.
      length: tokens per row.
      task: the spec of the task.
      model: the spec of the model.
      optimizer: the default, whose values carry over to an optimiser or schedule chosen in `choices`.
      evals: the specs of the evaluators.
      save_every: steps between two checkpoints.
      accumulate: parts that a step takes its rows in, one after the other (`attnlab.train.step.make_step` says what
        sees a part at a time).
      rows_at_once: the most rows of a part on one device, for which there are more parts; `None`: as many as there are.
      precision: types of activations and products; `None`: the defaults.
      report: what is logged; `None`: the defaults.
      start: parameters to start from; `None`: initialised from the seed. What rounding adds to a model, such as steps
        that are learned, always is.

    Raises `UserError` for an unknown optimiser or schedule, naming the nearest, and for an unknown rounding.
    """
    config = ConfigDict(
        {
            'seed': 0,
            'steps': steps,
            'batch_size': batch_size,
            'accumulate': accumulate,
            'length': length,
            'task': task,
            'model': model,
            'optimizer': spec_of(chosen(optimizer, choices['optimizer'], choices['schedule'])),
            'precision': spec_of(precision or Precision()),
            'mesh': spec(Axes),
            'evals': evals,
            'checkpoint': spec(Saving, every=save_every),
            'report': spec_of(report or Reporting()),
        },
        convert_dict=False,
    )
    if rows_at_once is not None:
        config.rows_at_once = rows_at_once
    if start is not None:
        config.start = start
    if choices['rounding']:
        rounding = rounding_called(choices['rounding'])
        config.rounding = spec_of(rounding)
        if start is not None:
            config.start.leave = (*start.leave, *rounding.added)
    return config.lock()


def choice_of(optimizer: ConfigDict) -> OptimizerChoice:
    """Returns the entry of `OPTIMIZERS` that a config's optimiser is of, by whose factors the ranges of a sweep move.

    Of an optimiser that is none of them that is AdamW's, whose factors are one.
    """
    found = (choice for choice in OPTIMIZERS.values() if spec(choice.kind).target == optimizer.target)
    return next(found, OPTIMIZERS['adamw'])


def moved(rates: tuple[float, ...], optimizer: ConfigDict) -> tuple[float, ...]:
    """Returns learning rates of AdamW times the factor of a config's optimiser."""
    return tuple(rate * choice_of(optimizer).peak_lr for rate in rates)


def chosen(default: AdamW, optimizer: str, schedule: str) -> Optimizer:
    """Returns the optimiser and the schedule of these names, with the values of `default` in the fields they share.

    An empty name, or the name of `default`'s own, changes nothing. A schedule keeps the warm-up; an optimiser keeps the
    fields that all optimisers have, such as clipping and groups, Muon AdamW's own besides, and multiplies the learning
    rate, with the limits of groups, and the weight decay by its factors in `OPTIMIZERS`. Raises `UserError` for another
    name.
    """
    make = choose(SCHEDULES, 'schedule', schedule) if schedule else type(default.schedule)
    if make is not type(default.schedule):
        default = dataclasses.replace(default, schedule=SCHEDULES[schedule](warmup=default.schedule.warmup))
    choice = choose(OPTIMIZERS, 'optimizer', optimizer) if optimizer else OptimizerChoice(AdamW)
    if choice.kind is type(default):
        return default
    names = (*(field.name for field in dataclasses.fields(Optimizer)), *choice.shares)
    shared: dict[str, Any] = {name: getattr(default, name) for name in names}
    shared['peak_lr'] *= choice.peak_lr
    shared['weight_decay'] *= choice.weight_decay
    shared['groups'] = default.groups.scaled(choice.peak_lr)
    return choice.kind(**shared)
