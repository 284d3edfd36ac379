"""The output of a running run: metrics.jsonl, speed.jsonl, TensorBoard, optionally W&B, and a progress bar."""

import collections
import contextlib
import dataclasses
import math
import pathlib
import time
import uuid
from collections.abc import Mapping
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from attnlab import files
from attnlab.errors import UserError, optional
from attnlab.metrics import bits
from attnlab.tables import visible
from attnlab.train.events import Events
from attnlab.train.hardware import hardware
from attnlab.train.metrics_file import (
    METRICS,
    SPEED,
    append_line,
    interval_ends,
    is_accessory,
    keep_until,
    mend,
    set_aside,
)

WANDB_ID = 'wandb_id'
"""The file of a work directory with the id of its run on Weights & Biases, made once."""


@dataclasses.dataclass(frozen=True)
class Reporting:
    """How often and where a run reports.

    Attributes:
      every: steps between two lines of metrics.
      tensorboard: write TensorBoard events.
      wandb: project to log to on Weights & Biases, or `None`.
    """

    every: int = 10
    tensorboard: bool = True
    wandb: str | None = None


class Report:
    """The open output files of a run; only the first process of several writes.

    `metrics.jsonl` holds only what the config determines, so that two runs of it can be compared byte by byte; speed
    is in `speed.jsonl`. Lines up to step `begun` are of another run, which this one goes on from.
    """

    def __init__(
        self,
        workdir: pathlib.Path,
        settings: Reporting,
        *,
        start: int,
        steps: int,
        tokens_per_step: int,
        flops_per_token: float | None,
        begun: int = 0,
        sums: Mapping[str, float] | None = None,
        console: Console,
    ):
        self.settings = settings
        self.writes = jax.process_index() == 0
        self.start = start
        self.sums = collections.defaultdict(float, sums or {})
        self._steps = steps
        self._tokens_per_step = tokens_per_step
        self._flops_per_token = flops_per_token
        self._workdir = workdir
        self._clock = Clock()
        self._described: set[str] = set()
        self._closing = contextlib.ExitStack()
        self._bar = self._closing.enter_context(_progress(console, self.writes))
        self._task = self._bar.add_task('train', total=steps, completed=start, loss='', speed='')
        if self.writes:
            aside = None if start else set_aside(workdir / METRICS)
            if aside is not None:
                self.say(aside)
            for lost in keep_until(workdir / METRICS, start, settings.every, begun):
                self.say(lost)
            files.check_own(workdir, (SPEED,))
            for lost in mend(workdir / SPEED)[1]:
                self.say(lost)
            self._events = self._open_events(start if start or aside else None)
            if self._events is not None:
                self._closing.callback(self._events.close)
            self._wandb = self._open_wandb()
            if self._wandb is not None:
                self._closing.callback(self._wandb.finish)

    def step(self, number: int, metrics: Mapping[str, Any], learning_rate: float) -> None:
        """Adds the metrics of one finished step; writes a line every `settings.every` steps, and after the last one."""
        self._clock.settled(number)
        self.sums['steps'] += 1
        for name, value in metrics.items():
            self.sums[name] += value
        if number % self.settings.every == 0 or number == self._steps:
            self._write_line(number, learning_rate)
        else:
            self._bar.update(self._task, completed=number)

    def evaluation(self, number: int, name: str, numbers: Mapping[str, float]) -> None:
        """Writes the numbers of one evaluation."""
        if not self.writes:
            return
        self._record(number, {f'{name}/{key}': value for key, value in numbers.items()})
        if SAMPLED.issubset(numbers) and name not in self._described:
            self._described.add(name)
            tokens, documents = (f'{numbers[key]:,.0f}' for key in ('sampled_tokens', 'sampled_documents'))
            self._bar.console.print(f'{name}: a sample of {tokens} tokens from {documents} documents')
        said = visible(f'  {name}: {evaluation_line(numbers)}')
        self._bar.console.print(Text.assemble((f'step {number}', 'dim'), said))

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """Excludes the time spent inside (evaluating, saving) from the reported speed."""
        return self._clock.paused()

    def say(self, text: str) -> None:
        """Prints a line above the progress bar."""
        if self.writes:
            self._bar.console.print(text, highlight=False)

    def close(self) -> None:
        """Closes every file and the bar."""
        self._closing.close()

    def _write_line(self, number: int, learning_rate: float) -> None:
        line = means(self.sums) | {'train/learning_rate': learning_rate}
        self.sums.clear()
        self._record(number, line)
        steps, seconds = self._clock.lap(number)
        shown = self._write_speed(number, steps * self._tokens_per_step / seconds) if steps else ''
        self._bar.update(self._task, completed=number, loss=f'loss {line["train/loss"]:.3f}', speed=shown)

    def _write_speed(self, number: int, tokens_per_second: float) -> str:
        speed = {'tokens_per_second': tokens_per_second}
        utilisation = self._utilisation(tokens_per_second)
        if utilisation is not None:
            speed['mfu'] = utilisation
        self._record(number, speed, SPEED, prefix='speed/')
        return f'{_short(tokens_per_second)} tok/s' + (f' {utilisation:.1%} MFU' if utilisation else '')

    def _record(self, number: int, numbers: Mapping[str, float], file: str = METRICS, prefix: str = '') -> None:
        if not self.writes:
            return
        append_line(self._workdir / file, {'step': number} | dict(numbers))
        named = {f'{prefix}{name}': value for name, value in numbers.items()}
        if self._events is not None:
            self._events.write(number, named)
        if self._wandb is not None:
            self._wandb.log(named, step=number)

    def _utilisation(self, tokens_per_second: float) -> float | None:
        kind = jax.devices()[0].device_kind
        device = hardware(kind)
        if device is None or self._flops_per_token is None:
            return None
        return tokens_per_second * self._flops_per_token / (device.flops * jax.device_count())

    def _open_events(self, after: int | None) -> Events | None:
        """The writer of events; those of steps after `after` that are there already are hidden."""
        if not self.settings.tensorboard:
            return None
        return Events(self._workdir, purge=None if after is None else after + 1)

    def _open_wandb(self) -> Any:
        if self.settings.wandb is None:
            return None
        wandb = optional('wandb', 'report.wandb')
        # Names of folders are not unique in a project: every study has a trial 0000.
        path = self._workdir / WANDB_ID
        files.check_own(self._workdir, (path.name,))
        if not path.exists():
            files.write(path, f'{uuid.uuid4().hex}\n')
        try:
            identity = files.read_text(path).strip()
        except UnicodeDecodeError as error:
            raise UserError(f'{path} is damaged: {error}; remove it, and a new run is begun on W&B') from error
        return wandb.init(
            project=self.settings.wandb,
            id=identity,
            name=self._workdir.name,
            dir=self._workdir,
            resume='allow',
        )


class Clock:
    """Seconds spent training since the last lap, without the pauses.

    The first lap of a start begins when its first step is settled, which has waited for the step to be compiled.
    """

    def __init__(self) -> None:
        self._number: int | None = None
        self._since = 0.0

    def settled(self, number: int) -> None:
        """Begins the first lap, with the first step."""
        if self._number is None:
            self._number, self._since = number, time.perf_counter()

    def lap(self, number: int) -> tuple[int, float]:
        """Whole steps and seconds since the last lap; no steps where the first has just been settled."""
        assert self._number is not None
        now = time.perf_counter()
        steps, seconds = number - self._number, now - self._since
        self._number, self._since = number, now
        return steps, max(seconds, 1e-9)

    @contextlib.contextmanager
    def paused(self) -> Any:
        """Excludes the time spent inside."""
        before = time.perf_counter()
        yield
        self._since += time.perf_counter() - before


SAMPLED = frozenset({'sampled_tokens', 'sampled_documents'})
"""Counts in the numbers of an evaluation on a sample."""


def evaluation_line(numbers: Mapping[str, float]) -> str:
    """The numbers of an evaluation in one line, without its counts; ends of intervals are in brackets."""
    parts = []
    for name, value in numbers.items():
        if is_accessory(name):
            continue
        ends = [numbers.get(end) for end in interval_ends(name)]
        parts.append(f'{name} {value:.4g}' + ('' if None in ends else f' [{ends[0]:.4g}, {ends[1]:.4g}]'))
    return ', '.join(parts)


def means(sums: Mapping[str, float]) -> dict[str, float]:
    """The means of a line of metrics, from totals and counts summed over steps."""
    # The loss of no labels at all is a mean of nothing.
    labels = sums['loss.count']
    line = {
        'train/loss': sums['loss.total'] / labels if labels else math.nan,
        'train/grad_norm': sums['grad_norm'] / sums['steps'],
    }
    if sums.get('byte_loss.count'):
        line['train/bits_per_byte'] = bits(sums['byte_loss.total'] / sums['byte_loss.count'])
    others = {name.removesuffix('.total') for name in sums if name.endswith('.total')} - {'loss', 'byte_loss'}
    return line | {
        f'train/{name}': sums[f'{name}.total'] / sums[f'{name}.count']
        for name in sorted(others)
        if sums[f'{name}.count']
    }


def _progress(console: Console, shown: bool) -> Progress:
    return Progress(
        TextColumn('{task.description}'),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn('{task.fields[loss]}'),
        TextColumn('{task.fields[speed]}'),
        TimeRemainingColumn(),
        console=console,
        disable=not shown,
        refresh_per_second=2,
        # Of the last thousand steps, however long: 30 seconds, as is the default, may have no two of them.
        speed_estimate_period=math.inf,
    )


def _short(value: float) -> str:
    for unit, size in (('G', 1e9), ('M', 1e6), ('k', 1e3)):
        if value >= size:
            return f'{value / size:.3g}{unit}'
    return f'{value:.3g}'
