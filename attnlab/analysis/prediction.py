"""`attnlab analyse --head`: what a trained model's head and its hidden states could predict, and what they do."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from attnlab.analysis import output_head
from attnlab.analysis.interventions import with_methods
from attnlab.analysis.output_head import Predictions, Refit
from attnlab.analysis.question import Question
from attnlab.errors import UserError
from attnlab.models.heads.classification import ClassificationHead
from attnlab.models.heads.head import Head
from attnlab.models.heads.language import VocabularyHead
from attnlab.models.heads.links import LinkHead
from attnlab.models.heads.mixture import MixtureOfSoftmaxes
from attnlab.quantize.layers import matrix_of_inputs
from attnlab.runs.loading import Loaded
from attnlab.tables import Column, Printer, Table, digits, pairs
from attnlab.tasks.task import Batch, Task

SHARES = (0.9, 0.99)
"""Of the sum of squares of a spectrum, whose directions are counted."""

MOST = 512
"""The most contexts of the matrix of empirical log-probabilities: those that occur most often."""


@dataclasses.dataclass(frozen=True)
class HeadExamination:
    """The results of `analyse_head`.

    Attributes:
      numbers: statistics by name.
      loss: the head's own mean loss of the rows held out from the refits.
      refits: softmax heads of lower rank on the same hidden states.
    """

    numbers: Mapping[str, float]
    loss: float
    refits: Sequence[Refit]


def analyse_head(question: Question, printer: Printer, ranks: tuple[int, ...]) -> HeadExamination:
    """Analyses the head of a checkpoint on rows of a split, and writes `analysis/<step>-head.json`.

    Singular entropy and effective rank are those of the head's matrix, where it has one; anisotropy is that of the
    hidden states that something is predicted from; the spectrum of log-probabilities is that of counts of targets after
    each input token. Softmax heads of the ranks given, by default powers of two up to the width, are fitted to the
    first half of the rows with the rest of the model frozen, and measured on the other half.

    Raises `UserError` for rows that do not exist, fewer than two, a rank that is not from 1 to the width of the model,
    and a head of real numbers.
    """
    loaded, rows = question.loaded, question.rows
    if rows < 2:
        raise UserError(f'rows is {rows}; a head is refitted on one half of the rows and measured on the other')
    found = predictions(loaded, question.batches())
    width = found[0].hidden.shape[1]
    ranks = ranks or tuple(2**power for power in range(width.bit_length()) if 2**power <= width)
    if min(ranks) < 1 or max(ranks) > width:
        raise UserError(f'ranks is {list(ranks)}; ranks must be from 1 to {width}, the width of the hidden states')
    examined = _examined(loaded.model().head, found, rows, ranks)
    record = question.record() | {'ranks': list(ranks)}
    found_of = {**examined.numbers, 'loss': examined.loss, 'refits': [each._asdict() for each in examined.refits]}
    numbers = pairs('head', {name: f'{value:.4g}' for name, value in examined.numbers.items()})
    question.report(printer, '-head', record, found_of, (numbers, _table(examined, question.title)))
    return examined


def _examined(head: Any, found: list['HeadCalls'], rows: int, ranks: tuple[int, ...]) -> HeadExamination:
    hidden = np.concatenate([each.hidden for each in found])
    numbers = {
        'anisotropy': output_head.anisotropy(hidden),
        'anisotropy_centred': output_head.anisotropy(hidden, centred=True),
        'rank_hidden': output_head.effective_rank(hidden - hidden.mean(axis=0)),
    }
    matrix = matrix_of(head)
    if matrix is not None:
        numbers |= {
            'singular_entropy': output_head.singular_entropy(matrix),
            'rank_head': output_head.effective_rank(matrix),
        }
    outputs = found[0].logits.shape[1]
    if all(each.tokens is not None for each in found):
        numbers |= _spectrum(found, outputs)
    first, second = found[: rows // 2], found[rows // 2 :]
    loss = float(np.mean(np.concatenate([each.losses for each in second])))
    if matrix is None:
        # The linear head nearest to what it predicts.
        logits = np.concatenate([each.logits for each in first])
        asked = np.concatenate([each.hidden for each in first])
        matrix = np.linalg.lstsq(asked, logits - logits.mean(axis=1, keepdims=True), rcond=None)[0].T
    return HeadExamination(numbers, loss, output_head.refits(matrix, _joined(first), _joined(second), ranks))


def matrix_of(head: Head) -> np.ndarray | None:
    """The matrix `o d` that scores of a head are products with; `None` if it has no such matrix."""
    if isinstance(head, VocabularyHead | LinkHead | MixtureOfSoftmaxes):
        return np.asarray(head.weight[...])
    return np.asarray(matrix_of_inputs(head.linear)).T if isinstance(head, ClassificationHead) else None


@dataclasses.dataclass(frozen=True)
class HeadCalls:
    """What was asked of the head in one row: hidden states, logits, losses, targets, and inputs if these are tokens.

    `there` are the places of all of these among what the row could ask.
    """

    hidden: np.ndarray
    logits: np.ndarray
    losses: np.ndarray
    targets: np.ndarray
    tokens: np.ndarray | None
    there: np.ndarray


def predictions(loaded: Loaded, rows: list[Batch]) -> list[HeadCalls]:
    """What the task asks of the head, row by row, without what it does not count.

    Raises `UserError` for a head of real numbers.
    """
    setup = loaded.setup

    def asked_of(variables: nnx.State, batch: Batch) -> tuple[Any, Array]:
        return what_is_asked(setup.task, nnx.merge(setup.graphdef, variables), batch)

    run = setup.jit(asked_of)
    found = []
    for row in rows:
        asked, weights = jax.device_get(run(loaded.variables, row))
        hidden, logits, losses, targets = asked
        if not np.issubdtype(targets.dtype, np.integer):
            raise UserError('the head predicts real numbers; this is for heads over a vocabulary or classes')
        there = weights > 0
        tokens = np.asarray(row['tokens'])
        same = np.issubdtype(tokens.dtype, np.integer) and tokens.shape == targets.shape
        hidden, logits, losses = (np.asarray(each, np.float32)[there] for each in (hidden, logits, losses))
        found.append(HeadCalls(hidden, logits, losses, targets[there], tokens[there] if same else None, there))
    return found


def what_is_asked(task: Task, model: Any, batch: Batch) -> tuple[tuple[Array, Array, Array, Array], Array]:
    """Hidden states, logits, losses and targets of what a task asks of a model's head, and the weights of the losses.

    A weight is the derivative of the total by the loss: zero of what is not counted.
    """

    def with_more(more: Array) -> tuple[Array, Any]:
        return loss_and_head_calls(task, model, batch, more)

    shape = jax.eval_shape(lambda: loss_and_head_calls(task, model, batch)[1][2])
    weights, asked = jax.grad(with_more, has_aux=True)(jnp.zeros(shape.shape, shape.dtype))
    return asked, weights


def loss_and_head_calls(task: Task, model: Any, batch: Batch, more: Array | None = None) -> tuple[Array, Any]:
    """The total loss, with `more` added to the losses, and what the head was asked."""
    asked = []

    def losses(own: Any, hidden: Array, targets: Array, key: Array | None = None) -> Array:
        found = own(hidden, targets, key)
        asked.append((hidden, model.logits(hidden), found, targets))
        return found if more is None else found + more

    return task.measure(with_methods(model, losses=losses), batch, None)['loss'].total, asked[0]


def _joined(asked: list[HeadCalls]) -> Predictions:
    return Predictions(
        np.concatenate([each.hidden for each in asked]), np.concatenate([each.targets for each in asked])
    )


def _spectrum(found: list[HeadCalls], outputs: int) -> dict[str, float]:
    """Of the logarithms of empirical probabilities of targets after tokens, less their mean over targets."""
    contexts = np.concatenate([each.tokens for each in found if each.tokens is not None])
    targets = np.concatenate([each.targets for each in found])
    seen, counts = np.unique(contexts, return_counts=True)
    often = np.isin(contexts, seen[np.argsort(-counts, kind='stable')[:MOST]])
    matrix = output_head.log_probabilities(contexts[often], targets[often], outputs)
    matrix = matrix - matrix.mean(axis=1, keepdims=True)
    directions = {f'directions_{100 * share:g}': float(output_head.directions_for(matrix, share)) for share in SHARES}
    return {'contexts': float(len(matrix)), 'rank_log_probabilities': output_head.effective_rank(matrix), **directions}


def _table(examined: HeadExamination, title: str) -> Table:
    columns = (
        Column('rank', right=True),
        Column('loss', digits('.4f'), True),
        Column('held out', digits('.4f'), True),
        Column('more than the head', digits('+.4f'), True),
    )
    rows = [(each.rank, each.fitted, each.held_out, each.held_out - examined.loss) for each in examined.refits]
    return Table('refits', columns, rows, f'{title}: softmax heads refitted, the rest frozen')
