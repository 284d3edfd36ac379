"""A trained model of embedding-free attention, evaluated with fewer keys: what is lost over what is saved."""

import functools
import pathlib
from typing import Any

import jax

from attnlab.blocks.block import mixer_of
from attnlab.errors import UserError
from attnlab.evals.by_slice import ENDS, EXAMPLES, BySlice
from attnlab.evals.request import Request
from attnlab.figures import cost_curves
from attnlab.files import check_own, figures_of, write_results
from attnlab.mixers.spatial.reduced import EmbeddingFreeAttention
from attnlab.models.layers import stacks
from attnlab.runs.loading import Loaded
from attnlab.tables import Column, Printer, Table, digits
from attnlab.tasks.task import Sliced
from attnlab.train.cost import forward_flops_per_token
from attnlab.train.run import check_data

Found = dict[str, dict[str, float]]


def reduce(
    loaded: Loaded,
    factors: tuple[int, ...],
    request: Request,
    workdir: pathlib.Path,
    printer: Printer,
    *,
    other_data: bool = False,
) -> Found:
    """Evaluates a run at its ratios of reduction times each of the factors, without training.

    Prints a table, and writes `evals/<name>-reduced.json` and the metrics over operations of a forward pass, as a
    figure and as CSV. Yu et al. 2024, https://arxiv.org/abs/2407.17261, multiply the ratios of some stages only.

    Raises `UserError` for a run without such attention, a task without slices, and a factor that leaves no key.
    """
    setup = loaded.setup
    if not isinstance(setup.task, Sliced):
        raise UserError(
            f'--factors is for tasks that are evaluated by slices, such as images; {workdir} was trained for '
            f'{type(setup.task).__name__}'
        )
    if not _reducible(loaded.model()):
        raise UserError(
            f'--factors is for runs whose keys are reduced without parameters (zoo=embedding_free); {workdir} has none'
        )
    check_data(workdir, setup.task.describe(), other=other_data)
    evaluator = BySlice.requested(setup, request)
    numbers: Found = {}
    operations: dict[str, float] = {}
    for factor in factors:
        changed = loaded.altered(functools.partial(reduced, factor=factor))
        found = evaluator.evaluate(changed.setup, changed.variables).numbers
        numbers[str(factor)] = {name: value for name, value in found.items() if not name.endswith((*ENDS, EXAMPLES))}
        operations[str(factor)] = forward_flops_per_token(changed.setup)
    if jax.process_index() == 0:
        folder, name = workdir / 'evals', f'{loaded.name}-reduced'
        check_own(workdir, ('evals', f'evals/{name}'))
        metrics = list(next(iter(numbers.values())))
        curves = {metric: {factor: one[metric] for factor, one in numbers.items()} for metric in metrics}
        record = {'step': loaded.step, 'ema': loaded.ema, 'split': evaluator.split, 'other_data': other_data}
        record['asked'] = {'factors': list(factors), 'examples': evaluator.examples}
        path = write_results(folder / f'{name}.json', record, {'operations_a_token': operations, 'factors': numbers})
        figures = figures_of(path)
        cost_curves(curves, operations, figures / 'reductions.png')
        columns = [Column('factor', right=True), Column('operations a token', digits(',.0f'), True)]
        columns += [Column(metric, digits('.4f'), True) for metric in metrics]
        rows = [(factor, operations[factor], *one.values()) for factor, one in numbers.items()]
        title = f'{workdir}, step {loaded.name}, {evaluator.split}: ratios of reduction multiplied'
        printer.table(Table('reductions', columns, rows, title))
        printer.line(f'written: {path}, {figures / "reductions.png"}')
    return numbers


def reduced(model: Any, factor: int) -> Any:
    """The model with the ratios of all its reductions multiplied, in place."""
    for mixer in _reducible(model):
        mixer.ratio *= factor
    return model


def _reducible(model: Any) -> list[EmbeddingFreeAttention]:
    """The mixers of a model whose ratio no parameter depends on."""
    found = [mixer_of(block) for stack in stacks(model) for block in stack.blocks]
    return [mixer for mixer in found if isinstance(mixer, EmbeddingFreeAttention)]
