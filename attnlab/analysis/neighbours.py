"""`attnlab analyse --neighbours`: a language model interpolated with the nearest of its hidden states in training."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from scipy.special import logsumexp

from attnlab.analysis.examination import first_rows
from attnlab.analysis.prediction import predictions
from attnlab.errors import UserError
from attnlab.files import write_json
from attnlab.runs.loading import load_run
from attnlab.tables import Column, Printer, Table, digits
from attnlab.train.run import check_data

SHARES = (0.05, 0.25, 0.5)
"""Of the neighbours in the mixture that are tried; 0.25 is the paper's."""

TEMPERATURES = (1.0, 10.0, 100.0)
"""Of squared distances that are tried; 1 is the paper's."""


class Found(NamedTuple):
    """The nearest stored states of each query: squared distances, and what came after them."""

    distances: Float[np.ndarray, 'n k']
    values: Int[np.ndarray, 'n k']


def nearest(
    keys: Float[np.ndarray, 'm d'], values: Int[np.ndarray, ' m'], queries: Float[np.ndarray, 'n d'], count: int
) -> Found:
    """The `count` stored states nearest to each query, exactly.

    Raises `UserError` for more than there are, and without the extra `offline`, which has the search.
    """
    try:
        from sklearn.neighbors import NearestNeighbors
    except ImportError as error:
        raise UserError("neighbours need `scikit-learn`: pip install 'attnlab[offline]'") from error
    if not 1 <= count <= len(keys):
        raise UserError(f'neighbours is {count}; {len(keys)} hidden states are stored')
    distances, places = NearestNeighbors(n_neighbors=count).fit(keys).kneighbors(queries)
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
    """

    loss: float
    mixtures: Mapping[tuple[float, float], float]
    stored: int
    asked: int


def analyse_neighbours(
    workdir: pathlib.Path,
    printer: Printer,
    step: int | None,
    split_name: str | None,
    rows: int,
    count: int,
    stored_rows: int,
    *,
    ema: bool = False,
    other_data: bool = False,
) -> NeighbourExamination:
    """Interpolates a checkpoint with the `count` nearest of the hidden states of `stored_rows` rows of training.

    `p(w) = (1 - share) p_model(w) + share sum_{i: v_i = w} softmax_i(-|h - k_i|^2 / temperature)`, with keys the hidden
    states that the head reads and values what came next; measured on the first `rows` rows of a split, for every
    share and temperature tried, and written to `analysis/<step>-neighbours.json`. Khandelwal et al. 2020,
    https://arxiv.org/abs/1911.00172, with other keys (theirs are read before the last MLP) and an exact search.

    Raises `UserError` for a run or split that does not exist, changed data unless `other_data` allows them, the split
    that is stored, more neighbours than hidden states, a head of real numbers, and without the extra `offline`.
    """
    loaded = load_run(workdir, step, ema=ema)
    check_data(workdir, loaded.setup.task.describe(), other=other_data)
    split_name = loaded.setup.task.evaluated_split if split_name is None else split_name
    if split_name == 'train':
        raise UserError('the split is train, whose hidden states are stored: every query would find itself')
    stored = predictions(loaded, first_rows(loaded, 'train', stored_rows))
    asked = predictions(loaded, first_rows(loaded, split_name, rows))
    keys, values = (np.concatenate(each) for each in zip(*((one.hidden, one.targets) for one in stored), strict=True))
    queries, targets, losses = (
        np.concatenate(each) for each in zip(*((one.hidden, one.targets, one.losses) for one in asked), strict=True)
    )
    found = nearest(keys, values, queries, count)
    mixtures = {
        (share, temperature): mixed(losses, log_probabilities(found, targets, temperature), share)
        for temperature in TEMPERATURES
        for share in SHARES
    }
    examined = NeighbourExamination(float(np.mean(losses)), mixtures, len(keys), len(queries))
    path = workdir / 'analysis' / f'{loaded.name}-neighbours.json'
    listed = [{'share': share, 'temperature': t, 'loss': loss} for (share, t), loss in mixtures.items()]
    record = {
        'step': loaded.step,
        'split': split_name,
        'rows': rows,
        'ema': ema,
        'other_data': other_data,
        'neighbours': count,
    }
    write_json(path, record | {'stored': len(keys), 'loss': examined.loss, 'mixtures': listed})
    printer.table(_table(examined, f'{workdir}, step {loaded.name}, {split_name}: {count} neighbours of {len(keys):,}'))
    printer.line(f'written: {path}')
    return examined


def _table(examined: NeighbourExamination, title: str) -> Table:
    columns = (
        Column('temperature', digits('g'), True),
        Column('share', digits('g'), True),
        Column('loss', digits('.4f'), True),
        Column('more than alone', digits('+.4f'), True),
    )
    rows = [(t, share, loss, loss - examined.loss) for (share, t), loss in examined.mixtures.items()]
    return Table('neighbours', columns, rows, title)
