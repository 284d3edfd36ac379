"""One trial: an ordinary run whose evaluations and result are reported to the study."""

import contextlib
import enum
import functools
import math
import pathlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
from ml_collections import ConfigDict
from optuna.trial import TrialState
from rich.console import Console

from attnlab import config as configs
from attnlab import files
from attnlab.config import from_plain, plain
from attnlab.errors import UserError, nearest, out_of_memory
from attnlab.sweep.study import Claim, Study, workdir
from attnlab.sweep.sweep import Sweep, read
from attnlab.sweep.together import Abandoned, Followers, Order, OutOfStep, heard
from attnlab.tables import plain_console
from attnlab.train import launch, loop
from attnlab.train.average import SUFFIX
from attnlab.train.metrics_file import METRICS, read_lines
from attnlab.train.programs import Programs, Unbuildable
from attnlab.train.run import newest_checkpoint
from attnlab.train.setup import Setup

STARTS = 10
"""Number of starts from one checkpoint after which a trial counts as failed."""


class Outcome(enum.Enum):
    """How an attempt at a trial ended."""

    DONE = 'done'
    PRUNED = 'pruned'
    FAILED = 'failed'
    STOPPED = 'stopped'


STATES = {Outcome.DONE: TrialState.COMPLETE, Outcome.PRUNED: TrialState.PRUNED, Outcome.FAILED: TrialState.FAIL}


class Failed(Exception):
    """The point of the trial cannot be run; the message gives the reason."""


def run_trial(
    study: Study,
    claim: Claim,
    programs: Programs,
    followers: Followers | None = None,
    stop: threading.Event | None = None,
) -> Outcome:
    """Runs a claimed trial, from its newest checkpoint if it has one, and records its end; `followers` run it too.

    `stop` is set where it was asked to stop, which may have come too late to end the trial.

    Errors caused by the point (a config that cannot be built, a loss that is not finite, too little memory, a bug it
    triggers) fail the trial; errors of the machine (a full disk, a missing data set) are raised, and the trial
    resumes when it is claimed again. Raises OutOfStep where the followers may not have failed in the same way.
    """
    followers = Followers(study.folder) if followers is None else followers
    began = time.perf_counter()
    path = study.log(claim.number)
    files.check_own(study.folder / 'trials', (f'{claim.number:04}',))
    path.parent.mkdir(exist_ok=True)
    with files.appending(path) as file:
        console = plain_console(file=file, width=120)
        run = functools.partial(_value, study, claim, programs, followers, console, stop)
        outcome, value, reason = _outcome(run, claim, programs, console)
        if reason is not None:
            console.print(f'failed: {reason}')
    before = claim.notes.get('seconds', 0.0)
    claim.note('seconds', before + time.perf_counter() - began)
    if outcome != Outcome.STOPPED:
        study.tell(claim, STATES[outcome], value, reason)
    if not followers.in_step:
        raise OutOfStep(
            f'trial {claim.number} failed in one process of {jax.process_count()} ({reason}): start them again'
        )
    return outcome


def follow_trial(folder: pathlib.Path, order: Order, programs: Programs) -> None:
    """Runs a trial together with the first process, which claimed it, checked its config and created its folder."""
    study = folder / order.study
    config = read(configs.load(study / 'sweep.json')).config(order.number, order.drawn)
    setup, facts = programs.prepare(config)
    folder = workdir(study, order.number)
    with contextlib.suppress(loop.NonFinite, Abandoned):
        launch.train(setup, from_plain(plain(config)), folder, facts, console=plain_console(quiet=True), watch=heard)


def _outcome(
    run: Callable[[], float | Outcome], claim: Claim, programs: Programs, console: Console
) -> tuple[Outcome, float | None, str | None]:
    """The outcome of what runs a trial, with the value of a completed one and the reason of a failed one."""
    starts = claim.notes.get('starts', [])
    try:
        value = run()
    except (Failed, Unbuildable, loop.NonFinite) as error:
        return Outcome.FAILED, None, str(error)
    except (UserError, OSError):
        # The trial did not die. Where nothing can be written either, this start stays counted.
        with contextlib.suppress(UserError, OSError):
            claim.note('starts', starts)
        raise
    except Exception as error:
        console.print_exception(max_frames=20)
        reason = _reason(error)
    else:
        return (value, None, None) if isinstance(value, Outcome) else (Outcome.DONE, value, None)
    programs.clear()
    return Outcome.FAILED, None, reason


def _value(
    study: Study,
    claim: Claim,
    programs: Programs,
    followers: Followers,
    console: Console,
    stop: threading.Event | None,
) -> float | Outcome:
    """The metric after the last step; PRUNED or STOPPED where the run ended before."""
    sweep = study.sweep
    config = _config(sweep, claim)
    folder = study.workdir(claim.number)
    _check_starts(claim, newest_checkpoint(folder))
    setup, facts = programs.prepare(config)
    check_metric(sweep.metric, setup)
    check_metric(sweep.score, setup, 'reported')
    pruned_at = claim.notes.get('pruned_at')
    if pruned_at is None or newest_checkpoint(folder) < pruned_at:
        watch = followers.broadcasting(_watch(claim, sweep, setup.steps))
        followers.run(study.folder, claim.number, claim.drawn)
        try:
            outcome = launch.train(
                setup, from_plain(plain(config)), folder, facts, console=console, watch=watch, stop=stop
            )
        except loop.NonFinite:
            followers.ran()
            raise
        followers.ran()
        if outcome == loop.FINISHED:
            return _last(folder, sweep.metric, setup.steps)
        if 'pruned_at' not in claim.notes:
            return Outcome.STOPPED
    return Outcome.PRUNED


def _config(sweep: Sweep, claim: Claim) -> ConfigDict:
    """The config of the trial. Raises Failed where its point does not fit, which older versions did not check."""
    try:
        return sweep.config(claim.number, claim.drawn)
    except UserError as error:
        raise Failed(str(error)) from error


def _watch(claim: Claim, sweep: Sweep, steps: int) -> loop.Watch:
    """Returns the watch that reports evaluations to the study and returns whether to prune.

    It raises `UserError` where what is evaluated lacks the metric, or the one that is reported in the end: after all
    trials nothing could be done about it.

    After a restart, evaluations since the last checkpoint are repeated, with the same numbers. They are not reported
    again; for the last one pruning is decided again, for the process may have died before the decision.
    """

    def watch(step: int, numbers: Mapping[str, float]) -> bool:
        for key, name in (('metric', sweep.metric), ('reported', sweep.score)):
            evaluated = any(one.partition('/')[0] == name.partition('/')[0] for one in numbers)
            if evaluated and name not in numbers:
                raise UserError(f'config.{key} is {name}, which is not evaluated{nearest(name, numbers)}')
        metric = sweep.metric
        if metric not in numbers:
            return False
        value = numbers[metric]
        if not math.isfinite(value):
            raise Failed(f'{metric} is {value} after step {step}')
        notes = claim.notes
        if 'pruned_at' in notes:
            return step >= notes['pruned_at']
        study, trial = claim.trial.study, claim.trial
        reported = study.get_trials(deepcopy=False)[claim.number].intermediate_values
        if step not in reported:
            trial.report(value, step)
        elif step < max(reported):
            return False
        if step == steps or not trial.should_prune():
            return False
        claim.note('pruned_at', step)
        return True

    return watch


def _check_starts(claim: Claim, checkpoint: int) -> None:
    """Counts this start; raises Failed where the last `STARTS` all died before saving a checkpoint."""
    starts = [*claim.notes.get('starts', ()), checkpoint][-STARTS - 1 :]
    claim.note('starts', starts)
    if len(starts) > STARTS and len(set(starts)) == 1:
        raise Failed(f'died {STARTS} times after step {checkpoint} without an error; the kernel may be out of memory')


def check_metric(metric: str, setup: Setup, key: str = 'metric') -> None:
    """Raises `UserError` where no evaluator of the setup has the name that the metric begins with."""
    names = [evaluator.name for evaluator in setup.evals]
    names += [f'{name}{SUFFIX}' for name in names if setup.optimizer.ema is not None]
    name = metric.partition('/')[0]
    if name not in names:
        raise UserError(f'config.{key} is {metric}, and there is no evaluator {name}{nearest(name, names)}')


def _last(workdir: Any, metric: str, steps: int) -> float:
    """The metric after the last step, from the run's metrics."""
    found = [line[metric] for line in read_lines(workdir / METRICS) if line['step'] == steps and metric in line]
    if not found:
        raise UserError(f'config.metric is {metric}, which is not evaluated after the last step')
    if isinstance(found[-1], str):
        raise Failed(f'{metric} is {found[-1]} after step {steps}')
    return found[-1]


def _reason(error: Exception) -> str:
    first = str(error).strip().partition('\n')[0]
    if isinstance(error, MemoryError):
        return 'out of memory'
    if out_of_memory(error):
        return f'out of memory: {first}'
    return f'{type(error).__name__}: {first}'
