"""`attnlab uncertainty` of a run that predicts tokens: scores of predictions, and what it says of its own rows."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float
from scipy.special import logsumexp
from scipy.stats import pearsonr, spearmanr

from attnlab.analysis.examination import first_rows
from attnlab.analysis.uncertainty import Outputs, Scores, Uncertainty, examined, tables
from attnlab.errors import UserError
from attnlab.files import write_results
from attnlab.runs.loading import Loaded, load_run
from attnlab.tables import Column, Printer, Table, digits
from attnlab.tasks.task import Batch, context
from attnlab.train.run import check_data

ROWS = 16
"""Rows that are looked at where no number is asked for: of each token there are as many numbers as classes."""


@dataclasses.dataclass(frozen=True)
class Judged:
    """How a statistic that a model gives of its own predictions goes with how good they are, over rows.

    Attributes:
      pearson: the correlation with the share of a row's predictions that are right.
      spearman: that of ranks.
    """

    pearson: float
    spearman: float


def analyse_tokens(
    workdir: pathlib.Path,
    printer: Printer,
    *,
    step: int | None = None,
    split: str | None = None,
    rows: int | None = None,
    alpha: float = 0.1,
    ema: bool = False,
    other_data: bool = False,
) -> tuple[Uncertainty, dict[str, Judged]]:
    """Scores, calibrates and tests predictions of tokens, and writes `analysis/<step>-uncertainty.json`.

    Of the first `rows` rows of a split, 16 if not given, every other one chooses the temperature and the threshold of
    sets of tokens; numbers are of the predictions of those between. Then the model judges itself: statistics of its own
    probabilities over a row beside how many of the row's predictions are right, over all rows. Raises `UserError` for a
    run that predicts no tokens, fewer than four rows, and changed data unless `other_data` allows them.
    """
    loaded = load_run(workdir, step, ema=ema)
    task = loaded.setup.task
    check_data(workdir, task.describe(), other=other_data)
    rows = ROWS if rows is None else rows
    if rows < 4:
        raise UserError(f'rows is {rows}; every other one calibrates, and there must be at least 4')
    split = task.evaluated_split if split is None else split
    found = [predictions(loaded, row) for row in first_rows(loaded, split, rows)]
    chosen, tested = (_joined(part) for part in (found[::2], found[1::2]))
    result = examined(chosen, tested, Scores(), alpha, {})
    judged = self_judged([each.logits for each in found], [each.labels for each in found])
    path = workdir / 'analysis' / f'{loaded.name}-uncertainty.json'
    record = {'step': loaded.step, 'ema': ema, 'split': split, 'rows': rows, 'other_data': other_data}
    of_itself = {name: dataclasses.asdict(each) for name, each in judged.items()}
    write_results(path, record | dataclasses.asdict(result) | {'of_itself': of_itself})
    for table in tables(result, f'{workdir}, step {loaded.name}, {split}'):
        printer.table(table)
    printer.table(_table(judged))
    printer.line(f'written: {path}')
    return result, judged


def predictions(loaded: Loaded, row: Batch) -> Outputs:
    """What a run predicts in a row, and what was right. Raises `UserError` for a task that asks for no tokens."""
    task = loaded.setup.task
    labels = np.asarray(row[task.labels]) if task.labels in row else np.zeros(0)
    if labels.ndim != 2 or not np.issubdtype(labels.dtype, np.integer) or 'weights' not in row:
        raise UserError(
            f'{type(task).__name__} asks for no tokens; attnlab uncertainty is of classifiers and of predicted tokens'
        )

    def of(variables: nnx.State, batch: Batch) -> tuple[Array, Array]:
        model = nnx.merge(loaded.setup.graphdef, variables)
        hidden, _ = model.hidden(batch['tokens'], context(batch))
        if 'at' in batch:
            hidden = jnp.take_along_axis(hidden, batch['at'][..., None], axis=1)
        return hidden, model.logits(hidden)

    hidden, logits = jax.device_get(loaded.setup.jit(of)(loaded.variables, row))
    there = np.asarray(row['weights']) > 0
    return Outputs(hidden[there].astype(np.float64), logits[there].astype(np.float64), labels[there])


def _joined(parts: list[Outputs]) -> Outputs:
    """Predictions of several rows; those of one are not independent of each other."""
    names = ('features', 'logits', 'labels')
    groups = np.repeat(np.arange(len(parts)), [len(part.labels) for part in parts])
    joined = Outputs(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))
    return dataclasses.replace(joined, groups=groups)


def statistics(logits: Float[np.ndarray, 't o']) -> dict[str, float]:
    """What a model's probabilities say of its predictions in a row: glass-box statistics.

    The mean log-probability of the tokens that it would choose, the mean negative entropy, the share of predictions
    with more than half of the probability, and the mean variance of probabilities over the vocabulary. Huang et al.
    2024, https://arxiv.org/abs/2403.04222.
    """
    logs = logits - logsumexp(logits, axis=1, keepdims=True)
    p = np.exp(logs)
    return {
        'log-probability': float(logs.max(axis=1).mean()),
        'negative entropy': float(np.sum(p * logs, axis=1).mean()),
        'sure': float((p.max(axis=1) > 0.5).mean()),
        'variance': float(p.var(axis=1).mean()),
    }


def self_judged(logits: list[Float[np.ndarray, '_ o']], labels: list[Any]) -> dict[str, Judged]:
    """How statistics of rows go with the share of their predictions that are right; NaN where either is constant."""
    quality = np.array([np.mean(np.argmax(one, axis=1) == label) for one, label in zip(logits, labels, strict=True)])
    by_row = [statistics(each) for each in logits]

    def both(name: str) -> Judged:
        values = np.array([row[name] for row in by_row])
        if np.ptp(values) == 0 or np.ptp(quality) == 0:
            return Judged(float('nan'), float('nan'))
        return Judged(float(pearsonr(values, quality)[0]), float(spearmanr(values, quality)[0]))

    return {name: both(name) for name in by_row[0]}


def _table(judged: Mapping[str, Judged]) -> Table:
    three = digits('.3f')
    columns = [Column('statistic'), Column('correlation', three, True), Column('of ranks', three, True)]
    rows = [(name, each.pearson, each.spearman) for name, each in judged.items()]
    return Table(
        'itself', columns, rows, 'what the model says of its rows, with how many predictions in them are right'
    )
