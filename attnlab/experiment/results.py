"""What an experiment writes: its numbers as JSON, one figure, and the table in its README between two comments."""

import itertools
import json
import math
import pathlib
import platform
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from ml_collections import ConfigDict

from attnlab import files
from attnlab.compare.baselines import is_of_this_python
from attnlab.errors import UserError
from attnlab.evals.measured import of_seeds
from attnlab.experiment.experiment import Experiment, module_of, parts_of

Measurements = dict[str, Any]
"""Plain data about one run or study."""

SECONDS = 'seconds.json'
"""How long a run or a sweep took, all its starts together but those that were killed, in its folder."""

IN_A_ROW = 3
"""Pictures of a README side by side: more would be shown too small to look at."""


def write_results(experiment: Experiment, facts: Mapping[str, Any], key: str, items: Sequence[Measurements]) -> None:
    """Writes `results/SIZE.json`: `facts` about all, and under `key` the items, one a line.

    A number that is missing is null; see `rounded`. Raises `ValueError` for one that is not finite.
    """
    lines = ',\n'.join(json.dumps(item, allow_nan=False) for item in items)
    path = experiment.folder / 'results' / f'{experiment.size}.json'
    files.write(path, f'{json.dumps(facts, allow_nan=False)[:-1]}, {json.dumps(key)}: [\n{lines}\n]}}\n')


def written_results(experiment: Experiment) -> dict[str, Any]:
    """What `write_results` wrote. Raises `UserError` where it never did, and where that was damaged since."""
    path = experiment.folder / 'results' / f'{experiment.size}.json'
    if not path.exists():
        raise UserError(f'nothing of {experiment.folder.name} has been measured at size {experiment.size}')
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise UserError(f'{path} is not what was written there: {error}; restore it, or run the experiment') from error


def write_figure(experiment: Experiment, figure: Figure) -> None:
    """Writes `results/SIZE.png`."""
    path = experiment.folder / 'results' / f'{experiment.size}.png'
    with files.replacing(path) as temporary:
        figure.savefig(temporary, format='png', dpi=120, metadata={'Software': None})


def kept_pictures(experiment: Experiment, plot: Any, rows: Sequence[Measurements], root: pathlib.Path) -> str:
    """Copies pictures that runs left in `root` to `results/SIZE/NAME.png`; returns what shows them in a README.

    `pictures(rows)` of `plot.py`, where it has that function, gives the path in `root` of every picture, by name. What
    was copied before is shown where its run is gone; a picture that is in neither place, as of a run that was measured
    before pictures were kept, is not. A row holds three.
    """
    named = plot.pictures(rows) if hasattr(plot, 'pictures') else {}
    folder, there = pathlib.Path('results') / experiment.size, []
    for name, path in named.items():
        kept = folder / f'{name}.png'
        if (root / path).exists():
            files.write(experiment.folder / kept, (root / path).read_bytes())
        if (experiment.folder / kept).exists():
            there.append((name, f'![{name}]({kept.as_posix()})'))
    return '\n\n'.join(
        markdown([list(line) for line in zip(*row, strict=True)]) for row in itertools.batched(there, IN_A_ROW)
    )


def write_readme(experiment: Experiment, text: str) -> None:
    """Puts the text between the two comments of the size, and the figure before it where no other place shows it.

    What `plot.py` says of itself stands in its place where figures are not shown. Raises `UserError` for a README
    without the comments.
    """
    readme, plot = experiment.folder / 'README.md', experiment.folder / 'plot.py'
    figure = f'results/{experiment.size}.png'
    elsewhere = with_results(readme.read_text(), experiment.size, '')
    if plot.exists() and (experiment.folder / figure).exists() and f']({figure})' not in elsewhere:
        said = (module_of(plot).__doc__ or f'size {experiment.size}').partition('\n')[0].rstrip('.')
        text = f'![{said}]({figure})\n\n{text}'
    files.write(readme, with_results(elsewhere, experiment.size, text))


def provenance(rows: Sequence[Measurements], planned: int, command: str, what: str = 'runs') -> str:
    """What the rows were made with, in a sentence; how long it took, unless that is not known of one."""
    seconds = [row['seconds'] for row in rows]
    took = 'time unknown' if None in seconds else f'{sum(seconds) / 60:.1f} minutes'

    def all_of(read: Any) -> str:
        return ', '.join(dict.fromkeys(str(read(row['made'])) for row in rows))

    return (
        f'{len(rows)} of {planned} {what}, {took}, by `{command}`; '
        f'device: {all_of(lambda made: f"{made['device_count']} {made['device_kind']}, {made['cores']} cores")}; '
        f'Python {all_of(lambda made: made["python"])}, jax {all_of(lambda made: made["packages"]["jax"])}, '
        f'flax {all_of(lambda made: made["packages"]["flax"])}; '
        f'commit {all_of(lambda made: _commit(made["git"]))}.'
    )


def seconds_of(path: pathlib.Path) -> float | None:
    """How long a run or sweep took; `None` where that was not written. Raises `UserError` where the file is damaged."""
    if not path.exists():
        return None
    remedy = 'remove it, and the time is said to be unknown'
    found = files.read_json(path, remedy)
    if type(found) not in (int, float) or not 0 <= found < math.inf:
        raise UserError(f'{path} is damaged: {found!r:.40} is no time in seconds; {remedy}')
    return float(found)


def pythons_of(made: str) -> list[str]:
    """The versions of Python in the sentence of `provenance`."""
    found = re.search(r'; Python (.+?), jax ', made)
    return [] if found is None else found[1].split(', ')


def of_other_python(versions: Iterable[str], configs: Iterable[ConfigDict]) -> str | None:
    """A line that says why no baselines are computed for results made by these versions of Python; `None` where they
    may be: by this version, or on data that are the same under all."""
    this = platform.python_version()
    others = sorted(set(versions) - {this})
    if not others or not any(map(is_of_this_python, configs)):
        return None
    return (
        f'what trivial predictors reach is not in these results and is left out: they were made by Python '
        f'{", ".join(others)}, whose own text they are of, and this is {this}; --report by that one adds it'
    )


def _commit(git: Mapping[str, Any]) -> str:
    if git['commit'] is None:
        return 'unknown'
    return git['commit'][:10] + {True: ' with changes', False: '', None: ', changed or not'}[git['changed']]


def with_gaps(rows: Sequence[Measurements]) -> list[Measurements]:
    """The rows as `plot.py` reads them: a number that is null in one of them, and known in another, is `nan`.

    So it has no point, and makes a mean no number, where null would end a report, or have to be left out of it.
    """
    known = {place for row in rows for place, value in _places(row) if type(value) in (int, float)}
    return [_gaps(row, known, ()) for row in rows]


def _places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Everything that plain data hold, by the keys and numbers that lead there."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    if parts is None:
        yield place, value
    else:
        for name, part in parts:
            yield from _places(part, (*place, name))


def _gaps(value: Any, known: Container[tuple[Any, ...]], place: tuple[Any, ...]) -> Any:
    if isinstance(value, dict):
        return {name: _gaps(part, known, (*place, name)) for name, part in value.items()}
    if isinstance(value, list):
        return [_gaps(part, known, (*place, number)) for number, part in enumerate(value)]
    return math.nan if value is None and place in known else value


def least_first(value: float) -> tuple[bool, float]:
    """A key that sorts numbers, of which those that are none come last."""
    return math.isnan(value), value


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """A table; the first line is its heading, and columns after the first are flush right."""
    if not lines:
        return ''
    rule = ['---', *['---:'] * (len(lines[0]) - 1)]
    return '\n'.join(f'| {" | ".join(line)} |' for line in (lines[0], rule, *lines[1:]))


def with_results(readme: str, size: str, text: str) -> str:
    """A README with what stands between the two comments of a size replaced. Raises `UserError` where they are not."""
    begin, end = f'<!-- results of size {size} -->', f'<!-- end of size {size} -->'
    before, found, rest = readme.partition(begin)
    _, closed, after = rest.partition(end)
    if not (found and closed):
        raise UserError(f'README.md lacks the comments {begin} and {end}, between which the table goes')
    return f'{before}{begin}\n{text}\n{end}{after}'


def rounded(value: Any) -> Any:
    """The same with numbers of six digits, for files that are read, and kept in git; `None` for what is not finite."""
    if isinstance(value, dict):
        return {name: rounded(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return files.finite(float(f'{value:.6g}')) if isinstance(value, float) else value


def plus_minus(values: Sequence[float | None], digits: int, bounds: tuple[float, float] = (-math.inf, math.inf)) -> str:
    """The mean over seeds with its error, as `Measured.text` shows it.

    The interval ends at the `bounds` of the quantity, which are `SHARE` for an accuracy. A value that is missing makes
    the mean no number, `nan`.
    """
    return of_seeds(np.asarray(values, np.float64)).within(*bounds).text(digits)


def preferred(
    rates: Mapping[Any, Sequence[Measurements]], score: Callable[[Measurements], float | None], *, highest: bool = False
) -> list[Measurements]:
    """The runs of the setting, such as a learning rate, whose mean score over seeds is the least, or the highest.

    A setting that lost a seed, to a score that is missing, not finite or another failure, is not judged by those that
    are left: it comes into question only where all lost as many. Raises `UserError` where no run has a finite score.
    """
    found = [[run for run in runs if np.isfinite(np.float64(score(run)))] for runs in rates.values()]
    most = max(map(len, found))
    if not most:
        raise UserError(f'no run of the settings {", ".join(map(str, rates))} has a finite score; none is preferred')
    whole = [runs for runs in found if len(runs) == most]
    return (max if highest else min)(whole, key=lambda runs: float(np.mean([score(run) for run in runs])))


def grouped(rows: Iterable[Measurements], *, but: int = 1) -> dict[Any, list[Measurements]]:
    """Runs, or studies, by the parts of their labels without the last `but`, which are the seed, or rate and seed.

    A key is the part where there is one, and a tuple of them where there are more; groups come in order of their first.
    """

    def key(row: Measurements) -> Any:
        parts = named_parts(row)[:-but]
        return parts[0] if len(parts) == 1 else parts

    return _by(rows, key)


def named_parts(row: Measurements) -> tuple[str, ...]:
    """The parts of the label of a run, or of the name of a study (`attnlab.experiment.experiment.label_of`)."""
    return parts_of(row['label'] if 'label' in row else row['study'])


def rate_of(row: Measurements) -> str:
    """The rate of a run: the part of its label before the seed."""
    return named_parts(row)[-2]


def at_best_rate(
    rows: Iterable[Measurements], score: Callable[[Measurements], float], *, highest: bool = False
) -> dict[Any, list[Measurements]]:
    """Runs by the parts of their labels before rate and seed, each at the rate that is `preferred`."""
    groups = grouped(rows, but=2)
    return {key: preferred(_by(runs, rate_of), score, highest=highest) for key, runs in groups.items()}


def _by(rows: Iterable[Measurements], key: Callable[[Measurements], Any]) -> dict[Any, list[Measurements]]:
    found: dict[Any, list[Measurements]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def panels(
    columns: int, *, rows: int = 1, width: int | float = 4.2, height: int | float = 3.4
) -> tuple[Figure, list[Any]]:
    """A figure of panels side by side, and their axes in reading order."""
    figure = Figure(figsize=(width * columns, height * rows), layout='constrained')
    axes = list(figure.subplots(rows, columns, squeeze=False).ravel())
    for each in axes:
        each.grid(alpha=0.3)
        each.spines[['top', 'right']].set_visible(False)
    return figure, axes


def legend_beside(figure: Figure, axis: Any, **options: Any) -> None:
    """One legend for all panels, of what is named in one: on the right of them, or where `loc` says."""
    options = {'loc': 'outside right upper', **options}
    figure.legend(*axis.get_legend_handles_labels(), frameon=False, **options)


def aside(number: int, count: int, apart: float) -> float:
    """How far one of `count` things is drawn from a place that they share, all about it, so much apart."""
    return apart * (number - (count - 1) / 2)


def seeds_on_line(
    axis: Any, places: Sequence[int | float] | np.ndarray, seeds: Sequence[Sequence[float]], colour: str, label: str
) -> None:
    """A line through the means at all places, and a point a seed."""
    axis.plot(places, [np.mean(values) for values in seeds], color=colour, label=label)
    for place, values in zip(places, seeds, strict=True):
        axis.plot([place] * len(values), values, '.', color=colour)


def seeds_on_bar(axis: Any, place: int | float, values: Sequence[float], colour: str) -> None:
    """A bar as high as the mean, 0 of none, and a point a seed."""
    axis.bar(place, np.mean(values) if values else 0, color=colour, alpha=0.5)
    axis.plot([place] * len(values), values, '.', color=colour)


def dashed(axis: Any, values: Iterable[int | float]) -> None:
    """Dashed lines behind all else, such as what predictors reach that need no training."""
    for value in values:
        axis.axhline(value, color='0.6', lw=0.8, ls='--', zorder=0)
