"""A finished or unfinished run, evaluated at and beyond the length it was trained on."""

import dataclasses
import pathlib
from collections.abc import Mapping

import jax
from rich.console import Console
from rich.table import Table

from attnlab.errors import UserError
from attnlab.evals.by_slice import BySlice
from attnlab.evals.cadence import AtEnd
from attnlab.evals.held_out import HeldOut
from attnlab.files import write_json
from attnlab.runs.loading import Loaded
from attnlab.tasks.language import LanguageModelling
from attnlab.train.setup import Setup


@dataclasses.dataclass(frozen=True)
class Asked:
    """What to evaluate; `None` is the task's own.

    Attributes:
      split: of the task.
      multiples: lengths, in multiples of the training length.
      tokens: of a text, at each length.
      examples: of each slice of another task.
    """

    split: str | None = None
    multiples: tuple[int, ...] = (1, 2, 4, 8)
    tokens: int | None = None
    examples: int | None = None


def evaluate_run(
    loaded: Loaded, asked: Asked, workdir: pathlib.Path, console: Console, name: str | None = None
) -> dict[str, float]:
    """Evaluates a loaded checkpoint, prints a table, and writes `evals/<name>.json` and figures by position.

    The name is the step by default; whoever changed the model gives it another.
    """
    name = str(loaded.step) if name is None else name
    evaluator = _evaluator(loaded.setup, asked)
    evaluation = evaluator.evaluate(loaded.setup, loaded.variables)
    if jax.process_index() == 0:
        folder = workdir / 'evals'
        evaluation.draw(folder / name)
        path = folder / f'{name}.json'
        write_json(path, {'step': loaded.step, 'split': evaluator.split, **evaluation.numbers})
        title = f'{workdir}, step {name}, {evaluator.split}'
        if isinstance(evaluator, HeldOut):
            console.print(_window_table(evaluation.numbers, asked.multiples, loaded.setup.length, title))
        else:
            console.print(_slice_table(evaluation.numbers, title))
        figures = sorted(map(str, (folder / name).glob('*.png')))
        console.print(f'written: {", ".join([str(path), *figures])}', highlight=False, soft_wrap=True)
    return dict(evaluation.numbers)


def _evaluator(setup: Setup, asked: Asked) -> HeldOut | BySlice:
    """The evaluator of the run's task; raises `UserError` for what was asked of another kind of task."""
    text = isinstance(setup.task, LanguageModelling)
    if (asked.examples if text else asked.tokens) is not None:
        flag, right = ('--examples', '--tokens') if text else ('--tokens', '--examples')
        raise UserError(f'{flag} is not for {type(setup.task).__name__}, which takes {right}')
    if text:
        return HeldOut(AtEnd(), split=asked.split or 'valid', multiples=asked.multiples, tokens=asked.tokens)
    own = next((evaluator for evaluator in setup.evals if isinstance(evaluator, BySlice)), BySlice(AtEnd()))
    return dataclasses.replace(
        own,
        split=asked.split or own.split,
        multiples=asked.multiples,
        examples=own.examples if asked.examples is None else asked.examples,
    )


def _window_table(numbers: Mapping[str, float], multiples: tuple[int, ...], length: int, title: str) -> Table:
    table = Table(title=title, title_justify='left')
    for column in ('window', 'tokens', 'nats/token', 'bits/byte', 'perplexity'):
        table.add_column(column, justify='right')
    for multiple in multiples:
        suffix = '' if multiple == multiples[0] else f'@{multiple}x'
        loss, bits, perplexity = (numbers[f'{name}{suffix}'] for name in ('loss', 'bits_per_byte', 'perplexity'))
        table.add_row(f'{multiple}x', str(multiple * length), f'{loss:.4f}', f'{bits:.4f}', f'{perplexity:.4g}')
    return table


def _slice_table(numbers: Mapping[str, float], title: str) -> Table:
    """One row a slice, one column a metric."""
    slices = dict.fromkeys(name.rpartition('/')[0] for name in numbers)
    metrics = dict.fromkeys(name.rpartition('/')[2] for name in numbers)
    table = Table(title=title, title_justify='left')
    table.add_column('slice')
    for metric in metrics:
        table.add_column(metric.replace('_', ' '), justify='right')
    for name in slices:
        table.add_row(name, *(f'{numbers[f"{name}/{metric}"]:.4f}' for metric in metrics))
    return table
