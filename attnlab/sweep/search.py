"""Samplers, which choose the points of a search space, and pruners, which stop trials early.

What a sampler draws for trial `n` depends on the space, on its seed, on `n`, and, for `Tpe` only, on the trials so far;
not on the worker that runs it or on restarts. Two studies with the same space, seed and sampler visit the same points,
but for `Tpe`, where those alone are the same that are drawn at random first.

A point is drawn whole and written to the study at once, so that a worker that dies leaves all of it or none of it. The
next worker draws a point that was not written again: the same one, but for `Tpe`, whose estimate is then made from the
trials that there are by then. Whatever the sampler, all dimensions of a point are drawn from the same trials.
"""

import abc
import bisect
import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState, create_trial

from attnlab.errors import UserError
from attnlab.sweep.space import Drawn, Space


@dataclasses.dataclass(frozen=True)
class Sampler:
    """How points of a search space are drawn.

    Attributes:
      seed: of the draws; independent of the seeds of the runs.
    """

    seed: int = 0

    def optuna(self, number: int) -> optuna.samplers.BaseSampler:
        """Optuna's sampler of the dimensions of trial `number` that are not `fixed`."""
        return optuna.samplers.RandomSampler(seed=self._stream(number))

    def fixed(self, space: Space, number: int, seeds: int) -> dict[str, Drawn]:
        """The dimensions of trial `number` that do not depend on the results so far."""
        return {}

    def trials(self, space: Space, requested: int | None, seeds: int) -> int:
        """The number of trials. Raises `UserError` where `requested` or the space does not suit the sampler."""
        if requested is None or requested < 1:
            raise UserError(f'config.trials is {requested}; {type(self).__name__} needs a whole number of at least 1')
        return requested

    def seed_index(self, number: int, seeds: int) -> int:
        """The index of the seed of trial `number`: seeds are used in rotation."""
        return number % seeds

    def _stream(self, number: int) -> int:
        return int(np.random.SeedSequence((self.seed, number)).generate_state(1)[0])


@dataclasses.dataclass(frozen=True)
class RandomSearch(Sampler):
    """Independent draws. Bergstra and Bengio 2012, https://jmlr.org/papers/v13/bergstra12a.html."""


@dataclasses.dataclass(frozen=True)
class Tpe(Sampler):
    """Tree-structured Parzen estimators; running trials count as bad ones, so that workers explore different points.

    A failed trial counts as the worst of all.

    Bergstra et al. 2011, https://proceedings.neurips.cc/paper/2011/hash/86e8f7ab32cfd12577bc2619bc635690-Abstract.html.

    Attributes:
      startup: trials drawn at random before the first estimate.
    """

    startup: int = 10

    def optuna(self, number: int) -> optuna.samplers.BaseSampler:
        return optuna.samplers.TPESampler(seed=self._stream(number), n_startup_trials=self.startup, constant_liar=True)


@dataclasses.dataclass(frozen=True)
class QuasiRandom(Sampler):
    """A scrambled Sobol sequence, which covers the space evenly; best with a power of two as the number of trials.

    Owen 1998, https://doi.org/10.1006/jcom.1998.0487.

    Points `2k` and `2k + 1` of the sequence lie in opposite halves of every axis. Seeds in rotation would fall in with
    that: of an even number of seeds one might see low rates alone, and another high ones.

    Attributes:
      paired: whether both points of a pair have one seed, the order of the seeds drawn anew for every round of pairs;
        without, seeds are used in rotation, as in studies that were made before there was this choice.
    """

    paired: bool = True

    def seed_index(self, number: int, seeds: int) -> int:
        if not self.paired:
            return super().seed_index(number, seeds)
        turn, place = divmod(number // 2, seeds)
        # Studies store no seeds. These numbers stay the same in every version of numpy, which shuffles may not.
        keys = np.random.SeedSequence((self.seed, turn)).generate_state(seeds)
        return int(np.argsort(keys, kind='stable')[place])

    def fixed(self, space: Space, number: int, seeds: int) -> dict[str, Drawn]:
        from scipy.stats import qmc

        if not space:
            return {}
        sequence = qmc.Sobol(len(space), scramble=True, rng=np.random.default_rng(self.seed))
        if number:
            sequence.fast_forward(number)
        (point,) = sequence.random(1)
        return {
            name: space[name].at_quantile(float(quantile)) for name, quantile in zip(sorted(space), point, strict=True)
        }


@dataclasses.dataclass(frozen=True)
class GridSearch(Sampler):
    """Every combination of values with every seed."""

    def fixed(self, space: Space, number: int, seeds: int) -> dict[str, Drawn]:
        shape = tuple(self._count(space, name) for name in sorted(space))
        place = np.unravel_index(number // seeds, shape) if shape else ()
        return {name: int(index) for name, index in zip(sorted(space), place, strict=True)}

    def trials(self, space: Space, requested: int | None, seeds: int) -> int:
        every = seeds * math.prod(self._count(space, name) for name in space)
        if requested not in (None, every):
            raise UserError(f'config.trials is {requested}; the grid and its seeds have {every}, which None stands for')
        return every

    def _count(self, space: Space, name: str) -> int:
        count = space[name].count
        if count is None:
            raise UserError(
                f'{name} is a {type(space[name]).__name__}, which GridSearch cannot exhaust; make it a Grid'
            )
        return count


class Whole(optuna.samplers.BaseSampler):
    """Optuna's sampler of single dimensions or groups of them, as one that draws all of a trial's together.

    `dimensions` are drawn in the order of their names. Optuna asks for dimensions one by one, and a worker that takes
    over between two would go on from the start of the sampler's stream of random numbers.
    """

    def __init__(self, sampler: optuna.samplers.BaseSampler, dimensions: Mapping[str, BaseDistribution]):
        self._sampler = sampler
        self._dimensions = {name: dimensions[name] for name in sorted(dimensions)}

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, BaseDistribution]:
        return self._dimensions

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        study = _judged(study)
        together = self._sampler.infer_relative_search_space(study, trial)
        drawn = self._sampler.sample_relative(study, trial, together)
        return {
            name: drawn[name] if name in drawn else self._sampler.sample_independent(study, trial, name, kind)
            for name, kind in search_space.items()
        }

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        raise AssertionError(f'{param_name} is no dimension of the space')


def _judged(study: optuna.Study) -> optuna.Study:
    """The trials of a study as they are at this moment, in memory; failed ones count, as the worst."""
    judged = optuna.create_study(direction=study.direction)
    judged.add_trials(map(_as_worst, study.get_trials(deepcopy=False)))
    return judged


def _as_worst(trial: FrozenTrial) -> FrozenTrial:
    """A failed trial as one pruned before any evaluation: optuna's TPE ranks these last, and leaves failed ones out."""
    if trial.state != TrialState.FAIL or not trial.params:
        return trial
    return create_trial(state=TrialState.PRUNED, params=trial.params, distributions=trial.distributions)


class Pruner(abc.ABC):
    """Stops runs early at an evaluation, where other runs of the study were better at that step."""

    @abc.abstractmethod
    def optuna(self, steps: int) -> optuna.pruners.BasePruner:
        """Optuna's pruner for runs of `steps` steps."""


@dataclasses.dataclass(frozen=True)
class Asha(Pruner):
    """Asynchronous successive halving: of the runs at a rung, the best `1 / reduction` continue to the next.

    Rungs are at `first`, `first * reduction`, `first * reduction^2`, ... steps. Li et al. 2020,
    https://arxiv.org/abs/1810.05934.

    Attributes:
      first: the first rung, in steps; every rung should coincide with an evaluation.
      reduction: how many are compared for each that goes on.
    """

    first: int
    reduction: int = 3

    def optuna(self, steps: int) -> optuna.pruners.BasePruner:
        return Halving(rungs(self.first, self.reduction, steps), self.reduction)


@dataclasses.dataclass(frozen=True)
class Hyperband(Pruner):
    """Successive halving in several brackets, from one that prunes at `first` steps to one whose only rung is the last.

    Trials fill the brackets in turn, the most aggressive first, and begin again: which one a trial is in depends on its
    number alone. Li et al. 2018, https://arxiv.org/abs/1603.06560.

    Attributes:
      first: the first rung of the most aggressive bracket, in steps.
      reduction: how many are compared for each that goes on.
    """

    first: int
    reduction: int = 3

    def optuna(self, steps: int) -> optuna.pruners.BasePruner:
        found = rungs(self.first, self.reduction, steps)
        return Halving(found, self.reduction, shares(len(found), self.reduction))


def rungs(first: int, reduction: int, steps: int) -> tuple[int, ...]:
    """The rungs of runs of `steps` steps. Raises `UserError` where there are none."""
    if not 1 <= first <= steps or reduction < 2:
        raise UserError(
            f'first of a pruner must be from 1 to the {steps} steps of a run, and reduction at least 2; '
            f'got first={first}, reduction={reduction}: give --config.pruner.first, or pruner=none'
        )
    powers = (first * reduction**power for power in itertools.count())
    return tuple(itertools.takewhile(lambda rung: rung <= steps, powers))


def shares(brackets: int, reduction: int) -> tuple[int, ...]:
    """How many trials each bracket has in a round: `ceil(b r^s / (s + 1))` for `s = b - 1, ..., 0`, of Algorithm 1."""
    return tuple(math.ceil(brackets * reduction**s / (s + 1)) for s in reversed(range(brackets)))


class Halving(optuna.pruners.BasePruner):
    """Prunes a trial that is not among the best `1 / reduction` of its bracket at a rung that it has reached.

    Bracket `b` has the rungs from number `b` on. A trial is compared when it first reports at a rung or behind it, with
    the trials that have come there by then; of fewer than `reduction` the best goes on. Rungs without an evaluation
    between them are one.
    """

    def __init__(self, steps: Sequence[int], reduction: int, brackets: Sequence[int] = (1,)):
        self._steps = steps
        self._reduction = reduction
        self._bounds = list(itertools.accumulate(brackets))

    def bracket(self, number: int) -> int:
        """The bracket of a trial."""
        return bisect.bisect_right(self._bounds, number % self._bounds[-1])

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        bracket, last = self.bracket(trial.number), trial.last_step
        if last is None:
            return False
        sign = 1.0 if study.direction == StudyDirection.MINIMIZE else -1.0
        others = [one for one in study.get_trials(deepcopy=False) if self.bracket(one.number) == bracket]
        for rung in self._steps[bracket:]:
            if _reported(trial, rung) == last:
                reached = [(one, _reported(one, rung)) for one in others]
                values = sorted(sign * one.intermediate_values[at] for one, at in reached if at is not None)
                if sign * trial.intermediate_values[last] > values[max(len(values) // self._reduction, 1) - 1]:
                    return True
        return False


def _reported(trial: FrozenTrial, rung: int) -> int | None:
    """The first step at a rung or behind it at which a trial reported; `None` where it has not come there."""
    return min((step for step in trial.intermediate_values if step >= rung), default=None)
