"""What a run directory says of its run: what it was, what it cost, how far it came. Nothing is built or measured."""

import dataclasses
import itertools
import math
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from attnlab.errors import UserError
from attnlab.evals.measured import NORMAL, Kind, Measured
from attnlab.train import run
from attnlab.train.metrics_file import METRICS, interval_ends, read_lines, speeds


@dataclasses.dataclass(frozen=True)
class Record:
    """One run, as it wrote itself down.

    Attributes:
      folder: its work directory.
      config: all of it.
      step: how many steps are reported.
      last: the newest value of each metric by name, such as `valid/loss`; NaN for one that was not finite. Ends of
        intervals are those of that value.
      facts: what the newest start recorded: the model, kernels, data, versions and devices.
      tokens_per_second: of training, the median over what was reported; `None` before the first report.
    """

    folder: pathlib.Path
    config: ConfigDict
    step: int
    last: Mapping[str, float]
    facts: Mapping[str, Any]
    tokens_per_second: float | None

    @property
    def name(self) -> str:
        """The name of the directory."""
        return self.folder.absolute().name

    @property
    def finished(self) -> bool:
        """Whether every step was taken."""
        return self.step == self.config.steps

    @property
    def parameters(self) -> int:
        """Numbers that are trained."""
        return self.facts['parameters']

    @property
    def weight_bytes(self) -> int:
        """Bytes of parameters and buffers; of runs that did not record them four a parameter."""
        return self.facts['weight_bytes'] if 'weight_bytes' in self.facts else 4 * self.parameters

    @property
    def quantized(self) -> bool:
        """Whether `attnlab quantize` made it."""
        return 'quantized' in self.facts

    @property
    def state_bytes(self) -> dict[int, int]:
        """Bytes that decoding one sequence keeps, by its length: that of training, and eight times that."""
        return {int(length): size for length, size in self.facts['state_bytes_per_sequence'].items()}

    def state_bytes_at(self, length: int) -> int:
        """Those at one length. Raises `UserError` for a length of which they were not recorded."""
        known = self.state_bytes
        if length not in known:
            lengths = ', '.join(map(str, known)) or 'none'
            raise UserError(
                f'{self.folder / "run.json"} has no state_bytes_per_sequence at length {length}, only at {lengths}; '
                'put back a copy of it'
            )
        return known[length]

    @property
    def flops_per_token(self) -> float:
        """Floating-point operations of a training step per token."""
        return self.facts['flops_per_token']

    @property
    def tokens(self) -> int:
        """Tokens of all the training that the config asks for."""
        return self.config.steps * self.config.batch_size * self.config.length

    def measured(self, metric: str) -> Measured:
        """The newest value of a metric, with its interval over what was evaluated where the run wrote one down.

        Raises `UserError` for an interval that is none of this value, which the file of metrics was given by hand.
        """
        value, low, high = (self.last.get(name) for name in (metric, *interval_ends(metric)))
        if value is None:
            raise KeyError(metric)
        if low is None or high is None:
            return Measured(value, None, None, 1, 'one')
        folder = f'{metric.rpartition("/")[0]}/'
        counts = {name: self.last.get(f'{folder}{name}') for name in ('examples', 'documents', 'sampled_documents')}
        name, count = next((item for item in counts.items() if item[1] is not None), ('documents', 0.0))
        count = count or 0.0
        if not -math.inf < low <= value <= high < math.inf or not 0 <= count < math.inf:
            raise UserError(
                f'{self.folder / METRICS} is damaged: {metric} is {value:g}, with an interval from {low:g} to {high:g} '
                f'over {count:g} {name}; put back a copy of it'
            )
        kind: Kind = 'examples' if name == 'examples' else 'documents'
        return Measured(value, low, high, int(count), kind, (high - low) / (2 * NORMAL))

    def curve(self, metric: str) -> list[tuple[int, float]]:
        """A metric over steps, as far as it is finite."""
        lines = read_lines(self.folder / METRICS)
        found = [(line['step'], float(line[metric])) for line in lines if metric in line]
        return [(step, value) for step, value in found if math.isfinite(value)]

    @property
    def implementations(self) -> Sequence[Mapping[str, Any]]:
        """Which implementation of which core ran, by layers; see `attnlab.train.cost.LayerCore`."""
        return self.facts['implementations']


def newest(lines: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The newest value of each name in lines of metrics; ends of intervals are of the line that has their value."""
    found: dict[str, Any] = {}
    for line in lines:
        # A value that is not finite has no interval, and that of an older step is not its own.
        for end in itertools.chain.from_iterable(map(interval_ends, line)):
            found.pop(end, None)
        found |= line
    return found


def read_record(workdir: pathlib.Path) -> Record:
    """Reads a run directory. Raises `UserError` where it is none, or was never started."""
    config, starts = run.saved_config(workdir), run.starts(workdir)
    if not starts:
        raise UserError(f'{workdir} is a run that never started: it holds no run.json')
    lines, reported = read_lines(workdir / METRICS), speeds(workdir)
    return Record(
        folder=workdir,
        config=config,
        step=max((line['step'] for line in lines), default=0),
        last={name: float(value) for name, value in newest(lines).items() if name != 'step'},
        facts=starts[-1],
        tokens_per_second=float(np.median(reported)) if reported else None,
    )
