"""The training loop: restore, then step, report, evaluate and save, until the last step or a request to stop."""

import contextlib
import dataclasses
import pathlib
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from rich.console import Console

from attnlab.data.pipeline import batches
from attnlab.errors import UserError
from attnlab.figures import loss_curve
from attnlab.tasks.task import Batch
from attnlab.train import partition
from attnlab.train.average import SUFFIX
from attnlab.train.checkpoint import Checkpoints
from attnlab.train.diagnose import first_nonfinite
from attnlab.train.fit import fitted_state
from attnlab.train.metrics_file import METRICS, read_lines
from attnlab.train.profile import Profile, Tracer
from attnlab.train.report import Report
from attnlab.train.run import forked_at
from attnlab.train.setup import Evaluator, Setup
from attnlab.train.state import TrainState

STOPPED = 'stopped'
FINISHED = 'finished'
AGREE_EVERY = 16
"""Steps between two checks of whether any of several processes received a request to stop."""


Watch = Callable[[int, Mapping[str, float]], bool]
"""Called with the step and the numbers evaluated after it, by `evaluator/number`; returns whether to stop."""


def unwatched(step: int, numbers: Mapping[str, float]) -> bool:
    """Never stops a run."""
    return False


class NonFinite(UserError):
    """The loss or its gradient was not finite."""


@dataclasses.dataclass(frozen=True)
class Pending:
    """A dispatched step whose metrics have not been fetched."""

    number: int
    batch: Any
    metrics: Any


@dataclasses.dataclass
class InFlight:
    """The step that devices may still compute, and where its metrics are reported."""

    setup: Setup
    report: Report
    learning_rate: Callable[[int], Any]
    checkpoints: Checkpoints
    step: Pending | None = None

    def settle(self, state: TrainState) -> None:
        """Reports the metrics of the step, if there is one. Raises NonFinite if they are not finite."""
        pending, self.step = self.step, None
        if pending is None:
            return
        metrics = jax.device_get(pending.metrics)
        if not metrics['good']:
            with self.setup.precision.scope(), jax.set_mesh(self.setup.mesh):
                culprit = _culprit(self.setup, state, pending.batch)
            raise NonFinite(
                f'step {pending.number}: loss {_loss(metrics):.4g}, gradient norm {metrics["grad_norm"]:.4g}; '
                f'the first that is not finite: {culprit}. {_kept(self.checkpoints)}'
            )
        self.report.step(pending.number, _floats(metrics), float(self.learning_rate(pending.number - 1)))


def _kept(checkpoints: Checkpoints) -> str:
    """What is left of a run whose step has failed. A save in progress is of a step before."""
    try:
        checkpoints.wait()
        *_, last = (0, *checkpoints.steps())
    except UserError as error:
        return str(error)
    return f'The last checkpoint, of step {last}, is from before it' if last else 'No checkpoint was saved before it'


def _culprit(setup: Setup, state: TrainState, batch: Batch) -> str:
    """What is not finite first; where that cannot be found, why, as the step is what has failed."""
    try:
        return first_nonfinite(setup.task, setup.graphdef, state, batch)
    except UserError as error:
        return f'not known ({error})'


def train(
    setup: Setup,
    workdir: pathlib.Path,
    *,
    console: Console,
    data_workers: int = 0,
    flops_per_token: float | None = None,
    profile: Profile | None = None,
    watch: Watch = unwatched,
    stop: threading.Event | None = None,
) -> tuple[str, TrainState]:
    """Trains to the last step, from the newest checkpoint in `workdir` if there is one.

    The steps of `profile` are traced into `workdir`, which changes no number. `stop` is set by SIGTERM and Ctrl-C, also
    where the run ends otherwise before it looks: a caller that has more to do looks at it then.

    Returns FINISHED, or STOPPED after SIGTERM or by `watch`, which save first; and the state. The state after step n is
    a pure function of the config, wherever and however often the run was interrupted.

    Raises NonFinite, naming the step and the first module that went wrong; the last good checkpoint stays.
    """
    source = setup.task.source('train', setup.length)
    saving = setup.saving
    checkpoints = Checkpoints(
        workdir / 'checkpoints',
        every=saving.every,
        keep=saving.keep,
        steady=setup.optimizer.schedule.steady(setup.steps),
        notify=console.print,
    )
    with contextlib.closing(checkpoints), _stop_on_signal(stop) as stop:
        restored = checkpoints.resume_latest(setup.abstract)
        state, carried = restored or (fitted_state(setup, setup.initialize()), {'step': 0, 'sums': {}})
        start = carried['step']
        report = Report(
            workdir,
            setup.reporting,
            start=start,
            steps=setup.steps,
            tokens_per_step=setup.batch_size * setup.length,
            begun=forked_at(workdir),
            flops_per_token=flops_per_token,
            sums=carried['sums'],
            console=console,
        )
        index, count = partition.feed(setup.mesh)
        feed = batches(
            source,
            batch_size=setup.batch_size,
            seed=setup.seed,
            start=start,
            process_index=index,
            process_count=count,
            num_workers=data_workers,
        )
        with contextlib.closing(report), contextlib.closing(feed):
            if restored:
                report.say(f'going on from step {start} of {setup.steps}')
            tracer = Tracer(profile, workdir)
            with tracer.closing():
                return _steps(
                    setup,
                    workdir,
                    state,
                    start=start,
                    feed=feed,
                    checkpoints=checkpoints,
                    report=report,
                    tracer=tracer,
                    stop=stop,
                    watch=watch,
                )


def _steps(
    setup: Setup,
    workdir: pathlib.Path,
    state: TrainState,
    *,
    start: int,
    feed: Iterator[Any],
    checkpoints: Checkpoints,
    report: Report,
    tracer: Tracer,
    stop: threading.Event,
    watch: Watch,
) -> tuple[str, TrainState]:
    in_flight = InFlight(setup, report, setup.optimizer.learning_rate(setup.steps), checkpoints)
    for number in range(start + 1, setup.steps + 1):
        if tracer.begins(number):
            in_flight.settle(state)
            tracer.start()
        batch = setup.place(next(feed))
        with jax.profiler.StepTraceAnnotation('train', step_num=number):
            state, metrics = setup.step(state, batch, np.int32(number))
        in_flight.settle(state)
        in_flight.step = Pending(number, batch, metrics)
        if tracer.ends(number):
            in_flight.settle(state)
            with report.paused():
                report.say(tracer.stop())
        stopping = _should_stop(stop, number, setup.steps)
        due = [evaluator for evaluator in setup.evals if evaluator.cadence.due(number, setup.steps)]
        saving = stopping or number == setup.steps or checkpoints.due(number)
        if not (due or saving):
            continue
        in_flight.settle(state)
        with report.paused():
            numbers: dict[str, float] = {}
            for evaluator in due:
                numbers |= _evaluate(setup, workdir, evaluator, state, number, report)
            if due and watch(number, numbers):
                stopping = saving = True
            if saving:
                checkpoints.save(number, state, {'step': number, 'sums': dict(report.sums)})
        if stopping and number < setup.steps:
            checkpoints.wait()
            report.say(f'asked to stop: saved step {number} of {setup.steps}; the same command goes on from there')
            return STOPPED, state
    checkpoints.wait()
    return FINISHED, state


def _evaluate(
    setup: Setup, workdir: pathlib.Path, evaluator: Evaluator, state: TrainState, number: int, report: Report
) -> dict[str, float]:
    """The numbers of the parameters, and those of their average under a name of its own."""
    figures, found = workdir / 'figures', dict[str, float]()
    for name, variables, folder in (
        (evaluator.name, state.variables, figures),
        (f'{evaluator.name}{SUFFIX}', state.averaged_variables, figures / 'ema'),
    ):
        if variables is None:
            continue
        evaluation = evaluator.evaluate(setup, variables)
        report.evaluation(number, name, evaluation.numbers)
        if report.writes:
            evaluation.draw(folder)
            loss_curve(read_lines(workdir / METRICS), figures / 'loss.png')
        found |= {f'{name}/{key}': value for key, value in evaluation.numbers.items()}
    return found


def _loss(metrics: Any) -> float:
    return float(metrics['loss'].total / max(metrics['loss'].count, 1.0))


def _floats(metrics: Any) -> dict[str, float]:
    """Totals and counts as Python floats, by dotted name."""
    averages = {name: value for name, value in metrics.items() if name not in ('grad_norm', 'good')}
    parts = {f'{name}.{part}': float(getattr(a, part)) for name, a in averages.items() for part in ('total', 'count')}
    return parts | {'grad_norm': float(metrics['grad_norm'])}


def _should_stop(stop: threading.Event, number: int, steps: int) -> bool:
    """Whether to stop; several processes synchronise every few steps, so that all stop after the same step.

    They do after the last one too, and all have `stop` set: who runs them may have more to do.
    """
    if jax.process_count() == 1:
        return stop.is_set()
    if number % AGREE_EVERY and number < steps:
        return False
    asked = bool(np.any(multihost_utils.process_allgather(np.array(stop.is_set()))))
    if asked:
        stop.set()
    return asked


@contextlib.contextmanager
def _stop_on_signal(given: threading.Event | None) -> Iterator[threading.Event]:
    """An event, that given or a new one, set by the first SIGTERM or Ctrl-C; a second one ends the process as usual."""
    event = threading.Event() if given is None else given
    previous: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def ask(number: int, _: Any) -> None:
        event.set()
        signal.signal(number, previous[number])

    for number in previous:
        signal.signal(number, ask)
    try:
        yield event
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
