"""Forks: a longer run that starts from a checkpoint of an existing run, which stays unchanged."""

import contextlib
import dataclasses
import pathlib
import shutil
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from attnlab import config as configs
from attnlab import files
from attnlab.config import build
from attnlab.errors import UserError
from attnlab.train.checkpoint import Checkpoints, copy
from attnlab.train.metrics_file import METRICS
from attnlab.train.run import differences, has_begun, newest_checkpoint, other_parts, saved_config
from attnlab.train.saved import steps_in
from attnlab.train.schedule import in_steps
from attnlab.train.setup import TRACELESS
from attnlab.train.state import TrainState

READ_BY = ('batch_size', 'length', 'seed', 'task')
"""The keys of a config that decide which rows a step reads."""

BESIDE = frozenset({'steps', 'accumulate', 'rows_at_once', 'evals', *TRACELESS})
"""The keys of a config that do not affect a step's update: what surrounds it, and how its work is divided.

They are more than `TRACELESS`: the parts of a step follow from them and the devices, and are compared as such
(`Fork.in_parts`), while a comparison (`attnlab.compare.equality.CONDITIONS`) names all that two runs do not share."""


@dataclasses.dataclass(frozen=True)
class Fork:
    """The checkpoint of a run that another run starts from.

    Attributes:
      run: its work directory.
      step: of the checkpoint.
      same_rates: whether the learning rates up to it are those of the new run.
      other_rows: each key by which the new run reads other rows, or in another order, and how it differs.
      other_updates: each other key by which its steps differ in more than their learning rates, and how; of what a
        config does not say, the parts that a step is taken in.
    """

    run: pathlib.Path
    step: int
    same_rates: bool
    other_rows: tuple[str, ...] = ()
    other_updates: tuple[str, ...] = ()

    def __str__(self) -> str:
        differing = [] if self.same_rates else ['whose learning rates up to there were not those of this run']
        if self.other_rows:
            differing.append(f'whose position in the data is not that of this run ({"; ".join(self.other_rows)})')
        if self.other_updates:
            differing.append(f'whose steps up to there were not those of this run ({"; ".join(self.other_updates)})')
        start = f'from step {self.step} of {self.run}'
        if not differing:
            return start
        return f'{start}, {" and ".join(differing)}: the result differs from training this config from scratch'

    def in_parts(self, parts: int) -> 'Fork':
        """The fork of a run whose steps are taken in `parts` parts, named where those before were not."""
        other = other_parts(self.run, parts)
        return self if other is None else dataclasses.replace(self, other_updates=(*self.other_updates, other))

    def describe(self) -> dict[str, Any]:
        """The fork as plain data, for run.json."""
        facts = {'run': str(self.run), 'step': self.step, 'same_rates': self.same_rates}
        return facts | {'other_rows': list(self.other_rows), 'other_updates': list(self.other_updates)}

    def check(self, abstract: TrainState) -> None:
        """Raises `UserError` where the checkpoint is damaged, or of another model or optimiser; reads no array.

        An average of the parameters may be left behind, parameters and what the optimiser knows of them may not.
        """
        with contextlib.closing(Checkpoints(self.run / 'checkpoints')) as checkpoints:
            checkpoints.check_whole(self.step)
            try:
                checkpoints.check_structure(self.step, abstract, whole=('params', 'opt_state'))
            except UserError as error:
                raise UserError(f'--from is {self.run}, whose model or optimiser is another: {error}') from error

    def copy_into(self, workdir: pathlib.Path) -> None:
        """Copies the checkpoint and the metrics, unless the work directory has a checkpoint already.

        Raises `UserError` where the checkpoint cannot be read or written, which then is not there at all, and for a
        copy of another step, which an earlier start did not come to record.
        """
        folder = workdir / 'checkpoints'
        if there := steps_in(folder):
            if (
                self.step not in there
                and there[-1] <= newest_checkpoint(self.run)
                and not (workdir / 'run.json').exists()
            ):
                raise UserError(
                    f'{workdir} has checkpoint {there[-1]}, and no run.json that says where it is from: go on from it '
                    f'with --from_step={there[-1]} or without --from, put run.json back, or choose another --workdir'
                )
            return
        # A run that was stopped before its first report has none.
        if (self.run / METRICS).exists():
            # Byte by byte: lines that are damaged are dropped when training begins.
            with files.reading(self.run / METRICS) as source:
                files.write(workdir / METRICS, source.read())
        place = folder / str(self.step)
        temporary = files.temporary_name(place)
        try:
            copy(self.run / 'checkpoints' / str(self.step), temporary)
            temporary.rename(place)
        except OSError as error:
            raise UserError(
                f'checkpoint {self.step} of {self.run} cannot be copied to {place}: {error}; '
                'nothing is left of the copy: fix that, and give the same command again'
            ) from error
        finally:
            # What cannot be removed now is removed by the first save.
            shutil.rmtree(temporary, ignore_errors=True)


def forked_config(run: pathlib.Path, workdir: pathlib.Path | None = None) -> ConfigDict:
    """The config of a run with its warm-up in steps, so that its length does not change with that of the run.

    Where `run` is gone and its fork in `workdir` has begun, that of the fork.

    Raises `UserError` for a folder that is not a run, or whose config is damaged.
    """
    path = run / 'config.json'
    if not path.exists():
        if workdir is not None and has_begun(workdir):
            return saved_config(workdir)
        raise UserError(f'--from is {run}, which is not a run: it holds no config.json')
    config = saved_config(run)
    try:
        schedule = config.optimizer.schedule
        # A schedule of one's own may have none.
        if 'warmup' in schedule:
            with config.unlocked():
                schedule.warmup = float(in_steps('warmup', schedule.warmup, config.steps))
    except (AttributeError, LookupError, TypeError) as error:
        raise UserError(f'{path} is damaged: {type(error).__name__}: {error}; put back a copy of it') from error
    return config


def fork(run: pathlib.Path, config: ConfigDict, step: int | None = None) -> Fork:
    """The fork of `run` at `step`, by default at the newest checkpoint that suits `config`.

    That is the newest up to which both have the same learning rates; if there is none, the newest of all.

    Raises `UserError` for a run without the checkpoint, and for a config that ends before it.
    """
    there = steps_in(run / 'checkpoints')
    if not there or (step is not None and step not in there):
        wanted = 'checkpoint' if step is None else f'checkpoint of step {step}'
        has = f'; it has: {", ".join(map(str, there))}' if there else ' yet'
        raise UserError(f'--from is {run}, which has no {wanted}{has}')
    old = configs.load(run / 'config.json')
    agreed = _agreed(old, config, min(there[-1], config.steps))
    chosen = step or max((one for one in there if one <= agreed), default=there[-1])
    if config.steps <= chosen:
        raise UserError(
            f'config.steps is {config.steps}; it must be above {chosen}, the step of {run} that it would go on from'
        )
    return Fork(run, chosen, chosen <= agreed, _other_rows(old, config), _other_updates(old, config))


def _agreed(old: ConfigDict, new: ConfigDict, last: int) -> int:
    """The number of initial steps, up to `last`, with the same learning rate in both configs."""
    counts = np.arange(last)
    rates = [np.asarray(build(config.optimizer).learning_rate(config.steps)(counts)) for config in (old, new)]
    differing = np.flatnonzero(rates[0] != rates[1])
    return int(differing[0]) if differing.size else last


def _other_rows(old: ConfigDict, new: ConfigDict) -> tuple[str, ...]:
    """How the configs differ in what decides which rows a step reads."""
    kept = (ConfigDict({name: config[name] for name in READ_BY}, convert_dict=False) for config in (old, new))
    return tuple(differences(*kept))


def _other_updates(old: ConfigDict, new: ConfigDict) -> tuple[str, ...]:
    """How the configs differ in what a step makes of its rows, but for the learning rate of the step."""
    aside = BESIDE.union(READ_BY)
    kept = (ConfigDict({k: v for k, v in c.items() if k not in aside}, convert_dict=False) for c in (old, new))
    # The checkpoint may have an average that the new run does without.
    unused = ('optimizer.ema:',) if new.optimizer.ema is None else ()
    rates = ('optimizer.peak_lr:', 'optimizer.schedule.')
    return tuple(one for one in differences(*kept) if not one.startswith((*rates, *unused)))
