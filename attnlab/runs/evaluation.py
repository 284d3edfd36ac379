"""A finished or unfinished run, evaluated at and beyond the length it was trained on."""

import dataclasses
import pathlib

import jax

from attnlab.evals.by_slice import BySlice
from attnlab.evals.held_out import HeldOut
from attnlab.evals.request import Request
from attnlab.files import write_json
from attnlab.runs.loading import Loaded
from attnlab.tables import Printer
from attnlab.tasks.task import Sliced


def evaluate_run(
    loaded: Loaded,
    request: Request,
    workdir: pathlib.Path,
    printer: Printer,
    name: str | None = None,
    *,
    other_data: bool = False,
) -> dict[str, float]:
    """Evaluates a loaded checkpoint, prints a table, and writes `evals/<name>.json` and figures by position.

    The name is the step by default, `600-ema` for the average of the parameters, and another where the model was
    changed; for a sample of a text the number of tokens is appended: `600-65536-tokens`. The file also holds the
    request, `ema`, whether it is the average that was evaluated, and `other_data`, whether the data may differ from the
    run's.
    Raises `UserError` for an option that does not apply to the task.
    """
    model = loaded.name if name is None else name
    name = f'{model}{request.suffix}'
    setup = loaded.setup
    evaluator = (BySlice if isinstance(setup.task, Sliced) else HeldOut).requested(setup, request)
    evaluation = evaluator.evaluate(setup, loaded.variables)
    if jax.process_index() == 0:
        folder = workdir / 'evals'
        evaluation.draw(folder / name)
        path = folder / f'{name}.json'
        record = {'asked': dataclasses.asdict(request), 'other_data': other_data}
        write_json(
            path, {'step': loaded.step, 'ema': loaded.ema, 'split': evaluator.split, **record, **evaluation.numbers}
        )
        printer.table(evaluation.table(f'{workdir}, step {model}, {evaluator.split}'))
        figures = sorted(map(str, (folder / name).glob('*.png')))
        printer.line(f'written: {", ".join([str(path), *figures])}')
    return dict(evaluation.numbers)
