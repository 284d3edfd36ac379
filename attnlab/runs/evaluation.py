"""A finished or unfinished run, evaluated at and beyond the length it was trained on."""

import dataclasses
import pathlib

import jax
from rich.console import Console

from attnlab.evals.asked import Asked
from attnlab.evals.by_slice import BySlice
from attnlab.evals.held_out import HeldOut
from attnlab.files import write_json
from attnlab.runs.loading import Loaded
from attnlab.tasks.task import Sliced


def evaluate_run(
    loaded: Loaded,
    asked: Asked,
    workdir: pathlib.Path,
    console: Console,
    name: str | None = None,
    *,
    other_data: bool = False,
) -> dict[str, float]:
    """Evaluates a loaded checkpoint, prints a table, and writes `evals/<name>.json` and figures by position.

    The name is the step by default; whoever changed the model gives it another, and that of a sample of a text says so:
    `600-65536-tokens`. What was asked is written down too, and `other_data`, that the data are not those of the run.
    Raises `UserError` for what was asked of another kind of task.
    """
    name = (str(loaded.step) if name is None else name) + asked.suffix
    setup = loaded.setup
    evaluator = (BySlice if isinstance(setup.task, Sliced) else HeldOut).asked(setup, asked)
    evaluation = evaluator.evaluate(setup, loaded.variables)
    if jax.process_index() == 0:
        folder = workdir / 'evals'
        evaluation.draw(folder / name)
        path = folder / f'{name}.json'
        record = {'asked': dataclasses.asdict(asked), 'other_data': other_data}
        write_json(path, {'step': loaded.step, 'split': evaluator.split, **record, **evaluation.numbers})
        console.print(evaluation.table(f'{workdir}, step {name}, {evaluator.split}'))
        figures = sorted(map(str, (folder / name).glob('*.png')))
        console.print(f'written: {", ".join([str(path), *figures])}', highlight=False, soft_wrap=True)
    return dict(evaluation.numbers)
