"""`attnlab analyse --neighbours`: a language model interpolated with the nearest of its hidden states in training."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float, Int
from scipy.special import logsumexp

from attnlab.analysis.lens import inputs_of
from attnlab.analysis.prediction import predictions
from attnlab.analysis.question import Question
from attnlab.config import choose
from attnlab.errors import UserError, optional
from attnlab.runs.loading import Loaded
from attnlab.tables import Column, Printer, Table, digits
from attnlab.tasks.task import Batch, Task
from attnlab.train.rows import rows_of

SHARES = (0.05, 0.25, 0.5)
"""Of the neighbours in the mixture that are tried; 0.25 is the paper's."""

TEMPERATURES = (1.0, 10.0, 100.0)
"""Of squared distances that are tried; 1 is the paper's."""


KEYS = {
    'head': 'the states that the head reads',
    'stream': 'what the last norm reads',
    'mlp': 'what the last channel mixer reads',
    'mlp_output': 'what the last channel mixer makes',
    'mixer': 'what the last mixer reads',
}
"""What states may be compared by."""

STAGES = {'stream': 'stack.output', 'mlp': '.mlp_norm', 'mlp_output': '.mlp', 'mixer': '.mixer_norm'}
"""The endings of the names of the model's stages that keys are values of; the last such stage counts."""

PARTS = (1, 2, 4, 8)
"""Parts of the store that are tried, as the number of them."""


class Found(NamedTuple):
    """The nearest stored states of each query: squared distances, and what came after them."""

    distances: Float[np.ndarray, 'n k']
    values: Int[np.ndarray, 'n k']

    def first(self, count: int) -> 'Found':
        """The nearest `count` of them."""
        return Found(self.distances[:, :count], self.values[:, :count])


def nearest(
    keys: Float[np.ndarray, 'm d'], values: Int[np.ndarray, ' m'], queries: Float[np.ndarray, 'n d'], count: int
) -> Found:
    """The `count` stored states nearest to each query, exactly.

    Raises `UserError` for more than there are, and without the extra `offline`, which has the search.
    """
    search = optional('sklearn.neighbors', 'a search for neighbours').NearestNeighbors
    if not 1 <= count <= len(keys):
        raise UserError(f'neighbours is {count}; {len(keys)} hidden states are stored')
    distances, places = search(n_neighbors=count).fit(keys).kneighbors(queries)
    return Found(np.square(distances), values[places])


def log_probabilities(found: Found, targets: Int[np.ndarray, ' n'], temperature: float) -> Float[np.ndarray, ' n']:
    """`log sum_i 1[v_i = target] softmax_i(-distance_i / temperature)`; minus infinity where no neighbour agrees."""
    scores = -found.distances / temperature
    agreed = np.where(found.values == targets[:, None], scores, -np.inf)
    return logsumexp(agreed, axis=1) - logsumexp(scores, axis=1)


def mixed(losses: Float[np.ndarray, ' n'], neighbours: Float[np.ndarray, ' n'], share: float) -> float:
    """The mean of `-log((1 - share) exp(-loss) + share p)`, in log space, with `log p` of the neighbours."""
    return float(-np.mean(np.logaddexp(np.log1p(-share) - losses, np.log(share) + neighbours)))


@dataclasses.dataclass(frozen=True)
class NeighbourExamination:
    """The results of `analyse_neighbours`.

    Attributes:
      loss: the model's own.
      mixtures: the loss by share and temperature.
      stored: how many hidden states are stored.
      asked: how many predictions are measured.
      by_count: the loss by number of neighbours, at the best share and temperature.
      by_stored: likewise by number of hidden states that are stored, the first of them.
    """

    loss: float
    mixtures: Mapping[tuple[float, float], float]
    stored: int
    asked: int
    by_count: Mapping[int, float]
    by_stored: Mapping[int, float]

    @property
    def best(self) -> tuple[float, float]:
        """The share and temperature of the least loss."""
        return min(self.mixtures, key=lambda each: self.mixtures[each])


def analyse_neighbours(
    question: Question, printer: Printer, count: int, stored_rows: int, *, keys: str = 'head'
) -> NeighbourExamination:
    """Interpolates a checkpoint with the `count` nearest of the hidden states of `stored_rows` rows of training.

    `p(w) = (1 - share) p_model(w) + share sum_{i: v_i = w} softmax_i(-|h - k_i|^2 / temperature)`, with values what
    came next, and keys one of `KEYS`: `mlp` are those of the paper, the input of the last channel mixer after its norm.
    Measured on rows of a split, for every share and temperature tried, at the best of them for fewer neighbours and
    smaller stores too, and written to `analysis/<step>-neighbours.json` (of other keys, `-neighbours-KEYS.json`).
    Khandelwal et al. 2020, https://arxiv.org/abs/1911.00172, with an exact search.

    Raises `UserError` for rows that do not exist, the split that is stored, more neighbours than hidden states, a head
    of real numbers, other keys, keys that the model does not have, and without the extra `offline`.
    """
    choose(KEYS, 'keys', keys)
    if question.split == 'train':
        raise UserError('the split is train, whose hidden states are stored: every query would find itself')
    stored = compared(question.loaded, rows_of(question.loaded.setup, 'train', stored_rows), (keys,))
    queries = compared(question.loaded, question.batches(), (keys,))
    examined = examine(
        stored.states[keys], stored.targets, queries.states[keys], queries.targets, queries.losses, count
    )
    listed = [{'share': share, 'temperature': t, 'loss': loss} for (share, t), loss in examined.mixtures.items()]
    record = question.record() | {'neighbours': count, 'keys': keys, 'stored_rows': stored_rows}
    found = {'stored': examined.stored, 'loss': examined.loss, 'mixtures': listed}
    found |= {'by_count': _listed(examined.by_count), 'by_stored': _listed(examined.by_stored)}
    title = f'{question.title}: {count} neighbours of {examined.stored:,}, {KEYS[keys]}'
    suffix = '-neighbours' if keys == 'head' else f'-neighbours-{keys}'
    question.report(printer, suffix, record, found, (_table(examined, title), _fewer(examined)))
    return examined


def examine(
    keys: Float[np.ndarray, 'm d'],
    values: Int[np.ndarray, ' m'],
    queries: Float[np.ndarray, 'n d'],
    targets: Int[np.ndarray, ' n'],
    losses: Float[np.ndarray, ' n'],
    count: int,
) -> NeighbourExamination:
    """The loss of every mixture; of the best also with fewer neighbours, by fours, and with parts of the store."""
    found = nearest(keys, values, queries, count)
    mixtures = {
        (share, temperature): mixed(losses, log_probabilities(found, targets, temperature), share)
        for temperature in TEMPERATURES
        for share in SHARES
    }
    share, temperature = min(mixtures, key=lambda each: mixtures[each])

    def loss(found: Found) -> float:
        return mixed(losses, log_probabilities(found, targets, temperature), share)

    counts = sorted({count, *(4**power for power in range(count.bit_length()) if 4**power < count)})
    sizes = sorted({len(keys) // parts for parts in PARTS if len(keys) // parts >= count})
    return NeighbourExamination(
        loss=float(np.mean(losses)),
        mixtures=mixtures,
        stored=len(keys),
        asked=len(queries),
        by_count={fewer: loss(found.first(fewer)) for fewer in counts},
        by_stored={size: loss(nearest(keys[:size], values[:size], queries, count)) for size in sizes},
    )


class Compared(NamedTuple):
    """All that is asked of a model: the states that it may be compared by, what came next, and the model's losses."""

    states: Mapping[str, Float[np.ndarray, 'n d']]
    targets: Int[np.ndarray, ' n']
    losses: Float[np.ndarray, ' n']


def compared(loaded: Loaded, rows: list[Batch], keys: Sequence[str]) -> Compared:
    """What a task asks in rows, with the states of every one of `keys`.

    Raises `UserError` for a head of real numbers, keys that the model does not have, and keys other than `head` of a
    task that does not ask at every position.
    """
    found = predictions(loaded, rows)
    states = {'head': [each.hidden for each in found]}
    inner = [name for name in keys if name != 'head']
    if inner:
        setup = loaded.setup
        run = setup.jit(
            lambda variables, batch: inner_states(setup.task, nnx.merge(setup.graphdef, variables), batch, inner)
        )
        read = [jax.device_get(run(loaded.variables, row)) for row in rows]
        if any(
            each[name].shape[:-1] != one.there.shape for each, one in zip(read, found, strict=True) for name in inner
        ):
            raise UserError(f'keys={inner[0]} is for tasks that ask something at every position; this one does not')
        for name in inner:
            states[name] = [
                np.asarray(each[name], np.float32)[one.there] for each, one in zip(read, found, strict=True)
            ]
    targets, losses = ([getattr(each, name) for each in found] for name in ('targets', 'losses'))
    return Compared(
        {name: np.concatenate(states[name]) for name in keys}, np.concatenate(targets), np.concatenate(losses)
    )


def inner_states(task: Task, model: Any, batch: Batch, keys: Sequence[str]) -> dict[str, Array]:
    """The values of the last stages that `STAGES` has for keys, where the task calls the model; it is changed."""
    found: dict[str, Array] = {}
    for stage in model.stages(*inputs_of(task, model, batch)):
        found |= {name: stage.value for name in keys if stage.name.endswith(STAGES[name])}
    for name in keys:
        if name not in found:
            raise UserError(f'keys={name} are {KEYS[name]}, and this model has no such stage')
    return found


def _listed(losses: Mapping[int, float]) -> list[dict[str, int | float]]:
    return [{'of': size, 'loss': loss} for size, loss in losses.items()]


def _fewer(examined: NeighbourExamination) -> Table:
    columns = (
        Column('neighbours', right=True),
        Column('of states', digits(','), True),
        Column('loss', digits('.4f'), True),
        Column('more than alone', digits('+.4f'), True),
    )
    most = max(examined.by_count)
    rows = [(count, examined.stored, loss, loss - examined.loss) for count, loss in examined.by_count.items()]
    rows += [(most, size, loss, loss - examined.loss) for size, loss in examined.by_stored.items()]
    share, temperature = examined.best
    return Table(
        'fewer', columns, rows[:-1], f'share {share:g}, temperature {temperature:g}: fewer neighbours, or states'
    )


def _table(examined: NeighbourExamination, title: str) -> Table:
    columns = (
        Column('temperature', digits('g'), True),
        Column('share', digits('g'), True),
        Column('loss', digits('.4f'), True),
        Column('more than alone', digits('+.4f'), True),
    )
    rows = [(t, share, loss, loss - examined.loss) for (share, t), loss in examined.mixtures.items()]
    return Table('neighbours', columns, rows, title)
