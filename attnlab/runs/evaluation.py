"""A finished or unfinished run, evaluated at and beyond the length it was trained on."""

import dataclasses
import pathlib

import jax

from attnlab.evals.by_slice import BySlice
from attnlab.evals.cadence import AtEnd
from attnlab.evals.forecasts import Forecasts, ShownForecasts
from attnlab.evals.held_out import HeldOut
from attnlab.evals.request import Request
from attnlab.files import check_own, figures_of, write_results
from attnlab.runs.loading import Loaded
from attnlab.tables import Printer
from attnlab.tasks.forecasting import Forecasting
from attnlab.tasks.task import Guessable, Sliced
from attnlab.tasks.trivial import TRAINED
from attnlab.train.setup import Setup


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

    Of a run that forecasts a series, forecasts and their spectra are drawn too, each with its numbers as CSV.

    The name is the step by default, `600-ema` for the average of the parameters, and another where the model was
    changed; for a sample of a text the number of tokens is appended: `600-65536-tokens`. What another request found
    stays, and a number follows the name: `600-1`. The file also holds the request, `ema`, whether it is the average
    that was evaluated, and `other_data`, whether the data may differ from the run's.
    Raises `UserError` for an option that does not apply to the task, and where `evals` is a link.
    """
    model = loaded.name if name is None else name
    name = f'{model}{request.suffix}'
    check_own(workdir, ('evals', f'evals/{name}'))
    setup = loaded.setup
    evaluator = (BySlice if isinstance(setup.task, Sliced) else HeldOut).requested(setup, request)
    evaluation = evaluator.evaluate(setup, loaded.variables)
    shown = _forecasts(loaded, evaluator.split)
    if jax.process_index() == 0:
        asked = dataclasses.asdict(dataclasses.replace(request, split=evaluator.split))
        record = {'step': loaded.step, 'ema': loaded.ema, 'split': evaluator.split, 'asked': asked}
        of_forecasts = {} if shown is None else {f'forecasts/{key}': value for key, value in shown.numbers.items()}
        found = {**evaluation.numbers, **of_forecasts}
        path = write_results(workdir / 'evals' / f'{name}.json', record | {'other_data': other_data}, found)
        figures = figures_of(path)
        evaluation.draw(figures)
        if shown is not None:
            shown.draw(figures)
        title = f'{workdir}, step {model}, {evaluator.split}'
        printer.table(evaluation.table(title))
        if shown is not None and shown.numbers:
            printer.table(shown.table(title))
        if isinstance(evaluator, BySlice) and (guessed := trivial_line(setup, evaluator)) is not None:
            printer.line(guessed)
        printer.line(f'written: {", ".join([str(path), *sorted(map(str, figures.glob("*.png")))])}')
    return dict(evaluation.numbers)


def trivial_line(setup: Setup, evaluator: BySlice) -> str | None:
    """What trivial predictors reach on the first slice that an evaluator asks, as `attnlab compare` has it; `None` for
    a task that knows of none.

    They count examples all over training, and are asked some all over the slice, `TRAINED` of each at most.
    """
    if not isinstance(setup.task, Guessable) or not isinstance(setup.task, Sliced):
        return None
    slices = setup.task.slices(evaluator.split, setup.length, evaluator.multiples, evaluator.examples)
    name, part = next(iter(slices.items()))
    found = {
        f'{name}/{metric}': ', '.join(f'{guess} {score:.3g}' for guess, score in scores.items())
        for metric, scores in setup.task.trivial(part).items()
    }
    reached = '; '.join(f'{metric} {scores}' for metric, scores in found.items() if scores)
    return f'trivial predictors (at most {TRAINED:,} examples): {reached}' if reached else None


def _forecasts(loaded: Loaded, split: str) -> ShownForecasts | None:
    """Forecasts of windows of the split; `None` for a task of another kind."""
    if not isinstance(loaded.setup.task, Forecasting):
        return None
    own = next((each for each in loaded.setup.evals if isinstance(each, Forecasts)), Forecasts(AtEnd()))
    return dataclasses.replace(own, split=split).evaluate(loaded.setup, loaded.variables)
