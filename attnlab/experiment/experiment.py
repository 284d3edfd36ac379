"""An experiment: one question, the runs or sweeps that answer it, what is measured of them, a figure and a table.

It is a folder with two files of Python. `sweep.py` has `runs(size)`, a list of `Run`, and `measure(finished)`, which
returns plain data about a `Finished` one; or it has `studies(size)`, see `attnlab.experiment.studies`. `plot.py` has
`figure(results)` and, for runs, `table(results)`, a list of lines of text cells, the heading first; it may have
`pictures(results)`, which of the pictures that runs left are kept (`attnlab.experiment.results.kept_pictures`). An
experiment that repeats a published result has `published(size)` in `sweep.py` in place of all: see
`attnlab.experiment.published`.
"""

import contextlib
import dataclasses
import pathlib
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from attnlab.configuration import load_module, raised
from attnlab.errors import UserError, nearest, of_the_machine
from attnlab.runs.loading import Loaded
from attnlab.train.metrics_file import METRICS, read_lines, speeds

SIZES = ('cpu', 'full')
"""How large an experiment is: minutes on 2 cores, or what the question deserves, on an accelerator."""


def label_of(*parts: str | int) -> str:
    """A name of parts, such as `gla-low-0`; of a run they are what is varied, then the rate, and at last the seed.

    Raises `UserError` for a part that `parts_of` would not give back: one with a dash.
    """
    found = '-'.join(map(str, parts))
    if parts_of(found) != tuple(map(str, parts)):
        raise UserError(f'parts of a label are {", ".join(map(repr, parts))}; none may have a dash, which joins them')
    return found


def parts_of(label: str) -> tuple[str, ...]:
    """The parts of which `label_of` made a label."""
    return tuple(label.split('-'))


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of an experiment: an ordinary config, under a name that its work directory has too (`label_of`)."""

    label: str
    config: ConfigDict


@dataclasses.dataclass(frozen=True)
class Finished:
    """A run that came to its end, for what is to be measured of it; `size` is that of its experiment."""

    label: str
    workdir: pathlib.Path
    loaded: Loaded
    size: str

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of its label."""
        return parts_of(self.label)

    def curve(self, metric: str) -> list[tuple[int, float]]:
        """The metric over steps, as the run wrote it down."""
        lines = read_lines(self.workdir / METRICS)
        return [(line['step'], float(line[metric])) for line in lines if metric in line]

    def last(self, metric: str) -> float:
        """The last value of the metric. Raises `UserError` for one that the run has not written down."""
        curve = self.curve(metric)
        if not curve:
            names = {name for line in read_lines(self.workdir / METRICS) for name in line}
            raise UserError(f'there is no {metric} in metrics.jsonl{nearest(metric, sorted(names))}')
        return curve[-1][1]

    @property
    def tokens_per_second(self) -> float:
        """The speed of training, the median over what was reported."""
        return float(np.median(speeds(self.workdir)))


@dataclasses.dataclass(frozen=True)
class Experiment:
    """The folder of an experiment at one of its sizes, its Python loaded.

    Raises `UserError` for an experiment or a size that is not there, naming those there are, and for what is raised in
    its Python, as `telling` does.
    """

    folder: pathlib.Path
    size: str

    def __post_init__(self) -> None:
        there = sorted(path.parent.name for path in self.folder.parent.glob('*/sweep.py'))
        if not there:
            raise UserError(
                f'{self.folder.parent} holds no experiments: run this in a clone, or give the path of a folder'
            )
        if self.folder.name not in there:
            raise UserError(
                f'there is no experiment {self.folder.name!r} in {self.folder.parent}{nearest(self.folder.name, there)}'
            )
        if self.size not in SIZES:
            raise UserError(f'there is no size {self.size!r}{nearest(self.size, SIZES)}')

    def runs(self) -> list[Run]:
        """The runs, as `sweep.py` has them. Raises `UserError` for two of one name."""
        runs = called(self.folder / 'sweep.py', 'runs', self.size)
        labels = [run.label for run in runs]
        twice = sorted({label for label in labels if labels.count(label) > 1})
        if twice:
            raise UserError(f'two runs of {self.folder.name} are called {", ".join(twice)}')
        return runs

    def has_studies(self) -> bool:
        """Whether it is one of sweeps; see `attnlab.experiment.studies`."""
        return hasattr(module_of(self.folder / 'sweep.py'), 'studies')

    def studies(self) -> Mapping[str, Mapping[str, ConfigDict]]:
        """The configs of its sweeps, as `sweep.py` has them."""
        return called(self.folder / 'sweep.py', 'studies', self.size)

    def root(self, workdirs: pathlib.Path) -> pathlib.Path:
        """Where its runs, or studies, are kept."""
        return workdirs / self.folder.name / self.size

    def workdir(self, each: Run, workdirs: pathlib.Path) -> pathlib.Path:
        """Where a run is kept."""
        return self.root(workdirs) / each.label


def module_of(path: pathlib.Path) -> Any:
    """A file of an experiment as a module. Raises `UserError` where it is not there, and as `telling` does."""
    if not path.exists():
        raise UserError(f'there is no {path}')
    with telling(path):
        return load_module(path, f'{path.parent.name}_{path.stem}')


def called(path: pathlib.Path, name: str, *arguments: Any) -> Any:
    """What a function of a file of Python returns. Raises `UserError` where it is not there, and as `telling` does."""
    module = module_of(path)
    if not hasattr(module, name):
        raise UserError(f'{path} has no function {name}')
    with telling(path):
        return getattr(module, name)(*arguments)


@contextlib.contextmanager
def telling(path: pathlib.Path, before: str = '') -> Iterator[None]:
    """Raises `UserError` for what a file of Python raises, with `before` in front.

    A `UserError` has the line of the file that it came from, and a bug its traceback from the file on; what the command
    line has a line for itself (`of_the_machine`) passes through.
    """
    try:
        yield
    except UserError as error:
        frames, file = traceback.extract_tb(error.__traceback__), str(path.absolute())
        lines = [frame.lineno for frame in frames if frame.filename == file]
        where = f'{path}, line {lines[-1]}' if lines else str(path)
        raise UserError(f'{before}{where}: {error}') from error
    except Exception as error:
        if of_the_machine(error):
            raise
        raise UserError(f'{before}{raised(path, error)}') from error
