"""A sweep, built from its config."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from attnlab.config import build, check_keys, flatten, from_plain, plain, set_value, spec
from attnlab.errors import UserError, nearest
from attnlab.evals.measured import goal_of
from attnlab.random import SEEDS
from attnlab.signature import check_type
from attnlab.sweep.search import GridSearch, Pruner, Sampler
from attnlab.sweep.space import Dimension, Drawn, Grid, Space

KEYS = ('base', 'space', 'sampler', 'pruner', 'trials', 'seeds', 'metric', 'goal', 'confirm')
"""The top-level keys of every sweep config."""

OPTIONAL = frozenset({'reported'})
"""Top-level keys that a sweep config may have besides."""


PARTS = {
    'space': dict,
    'sampler': Sampler,
    'pruner': Pruner | None,
    'trials': int | None,
    'seeds': tuple,
    'metric': str,
}
"""What the parts of a sweep config build."""


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Runs of one config that differ in points of a search space and in seeds.

    Attributes:
      base: the run config that every trial starts from.
      space: what is varied, by name.
      sampler: chooses the points.
      pruner: stops trials early; `None`: none is stopped.
      trials: the number of runs.
      seeds: seeds of the runs.
      metric: of an evaluator, such as `valid/loss`; a trial's value is that after its last step.
      goal: 'min' or 'max'.
      confirm: the number of new seeds with which the best point is run in the end; 0 for none.
      reported: the metric that these runs are judged by, where it is another than that by which the point was chosen,
        such as `test/loss`; empty: `metric`.
    """

    base: ConfigDict
    space: Space
    sampler: Sampler
    pruner: Pruner | None
    trials: int
    seeds: tuple[int, ...]
    metric: str
    goal: str
    confirm: int
    reported: str = ''

    @property
    def score(self) -> str:
        """The metric of the runs that confirm the best point."""
        return self.reported or self.metric

    @property
    def steps(self) -> int:
        """The most steps that a trial takes: those of the base, unless the space sets them."""
        rows = [settings for kind in self.space.values() for settings in values_of(kind)]
        return max((settings['steps'] for settings in rows if 'steps' in settings), default=self.base.steps)

    def check_values(self) -> None:
        """Raises `UserError` for a value of the space that does not fit; `read` looks at the first and the last."""
        for kind in self.space.values():
            for settings in values_of(kind):
                with_settings(self.base, settings)

    def seed(self, number: int) -> int:
        """The seed of trial `number`."""
        return self.seeds[self.sampler.seed_index(number, len(self.seeds))]

    def fixed(self, number: int) -> dict[str, Drawn]:
        """The dimensions of trial `number` that do not depend on results, those of a single value among them."""
        only = {name: kind.at_quantile(0.0) for name, kind in self.space.items() if kind.distribution.single()}
        return only | self.sampler.fixed(self.space, number, len(self.seeds))

    def settings(self, drawn: Mapping[str, Drawn]) -> dict[str, Any]:
        """The keys and values of a point of the space."""
        return {
            key: value for name in sorted(self.space) for key, value in self.space[name].settings(drawn[name]).items()
        }

    def config(self, number: int, drawn: Mapping[str, Drawn]) -> ConfigDict:
        """The run config of trial `number` at a point of the space."""
        return with_settings(self.base, {**self.settings(drawn), 'seed': self.seed(number)})

    def better(self, value: float, other: float) -> bool:
        """Whether a value of the metric is better than another."""
        return value < other if self.goal == 'min' else value > other

    def confirmation(self, drawn: Mapping[str, Drawn]) -> ConfigDict:
        """The config of the sweep that runs a point with new seeds."""
        first = max(self.seeds) + 1
        return sweep_config(
            with_settings(self.base, self.settings(drawn)),
            {},
            sampler=spec(GridSearch),
            seeds=tuple(range(first, first + self.confirm)),
            metric=self.score,
            goal=self.goal,
            confirm=0,
        )


def sweep_config(
    base: ConfigDict,
    space: Mapping[str, ConfigDict],
    *,
    sampler: ConfigDict,
    metric: str,
    pruner: ConfigDict | None = None,
    trials: int | None = None,
    seeds: tuple[int, ...] = (0,),
    goal: str = 'min',
    confirm: int = 3,
    reported: str = '',
) -> ConfigDict:
    """A sweep's config, as `get_config` of a file in `configs/sweeps` returns it; `Sweep` documents the keys."""
    config = ConfigDict(
        {
            'base': base,
            'space': ConfigDict(dict(space), convert_dict=False),
            'sampler': sampler,
            'pruner': pruner,
            'trials': placeholder(int) if trials is None else trials,
            'seeds': seeds,
            'metric': metric,
            'goal': goal,
            'confirm': confirm,
        },
        convert_dict=False,
    )
    if reported:
        config.reported = reported
    return config.lock()


def rates_config(
    base: ConfigDict,
    rates: tuple[float, ...],
    *,
    metric: str,
    goal: str = 'min',
    seeds: int = 1,
    confirm: int = 3,
    reported: str = '',
) -> ConfigDict:
    """Returns the config of a sweep that runs every learning rate of `rates` with `seeds` seeds, none given up early.

    The best is then run with `confirm` fresh seeds; `Sweep` documents the other keys.
    """
    return sweep_config(
        base,
        {'rate': spec(Grid, key='optimizer.peak_lr', values=rates)},
        sampler=spec(GridSearch),
        metric=metric,
        seeds=tuple(range(seeds)),
        goal=goal,
        confirm=confirm,
        reported=reported,
    )


def read(config: ConfigDict) -> Sweep:
    """Builds a sweep's config. Raises `UserError` naming the key that is missing, unknown or wrong."""
    check_keys(config, KEYS, OPTIONAL, 'a sweep config')
    built = {name: build(config[name], f'config.{name}') for name in config if name != 'base'}
    space, seeds, sampler = built['space'], built['seeds'], built['sampler']
    for name, kind in PARTS.items():
        check_type(f'config.{name}', built[name], kind)
    for name, dimension in space.items():
        check_type(f'config.space.{name}', dimension, Dimension)
    if not seeds or len(set(seeds)) != len(seeds) or not all(type(one) is int and 0 <= one < SEEDS for one in seeds):
        raise UserError(f'config.seeds is {seeds}; it must hold whole numbers from 0 to 2^32 - 1, each once')
    if type(built['confirm']) is not int or built['confirm'] < 0:
        raise UserError(f'config.confirm is {built["confirm"]!r}; it must be a whole number of at least 0')
    if max(seeds) + built['confirm'] >= SEEDS:
        raise UserError(
            f'config.confirm is {built["confirm"]}, for seeds up to {max(seeds) + built["confirm"]}, after those of '
            'config.seeds; seeds are at most 2^32 - 1'
        )
    if type(built.get('reported', '')) is not str:
        raise UserError(f'config.reported is {built["reported"]!r}; it must be the name of a metric, such as test/loss')
    if built['goal'] not in ('min', 'max'):
        raise UserError(f"config.goal is {built['goal']!r}; it must be 'min' or 'max'")
    for name in ('metric', 'reported'):
        if name in built and (goal := goal_of(built[name])) not in (None, built['goal']):
            better = 'higher' if goal == 'max' else 'lower'
            raise UserError(
                f'config.{name} is {built[name]}, for which {better} is better, but config.goal is {built["goal"]!r}; '
                f'set it to {goal!r}, which decides both which trial is best and how the reported metric is ranked'
            )
    keys = [key for dimension in space.values() for key in dimension.keys]
    if 'seed' in keys or len(set(keys)) != len(keys):
        raise UserError(f'the space sets {", ".join(sorted(keys))}; each may be set once, and seed by config.seeds')
    base = from_plain(plain(config.base))
    trials = sampler.trials(space, built['trials'], len(seeds))
    sweep = Sweep(**built | {'base': base, 'trials': trials})
    for dimension in space.values():
        every = values_of(dimension)
        for settings in (every[0], every[-1]):
            with_settings(base, settings)
    if sweep.pruner is not None:
        sweep.pruner.optuna(sweep.steps)
    return sweep


def values_of(dimension: Dimension) -> list[dict[str, Any]]:
    """What a dimension sets: all of its values, or the ends of a range."""
    every = range(dimension.count) if dimension.count is not None else map(dimension.at_quantile, (0.0, 0.999999))
    return [dimension.settings(drawn) for drawn in every]


def with_settings(base: ConfigDict, settings: Mapping[str, Any]) -> ConfigDict:
    """A copy of a config with keys set. Raises `UserError` for an unknown key, or a value that does not fit."""
    config = from_plain(plain(base))
    for key, value in settings.items():
        try:
            set_value(config, key, value)
        except LookupError as error:
            raise UserError(f'the base config has no key {key}{nearest(key, flatten(base))}') from error
        except TypeError as error:
            raise UserError(f'the space sets {key} to {value!r}: {error}') from error
    return config.lock()
