"""Anomalies found by a model that fills gaps: rows that it does not fill with what is there."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float

from attnlab.context import Context
from attnlab.data.pipeline import ordered_batches
from attnlab.data.series.anomalies import Disturbances, Scores, detection
from attnlab.data.series.gaps import FILLINGS, Gapped, Grating
from attnlab.data.series.windows import Scaled, scaled
from attnlab.errors import UserError
from attnlab.tables import Column, Table, digits
from attnlab.tasks.imputation import Imputation
from attnlab.train.setup import Cadence, Setup

MODEL = 'model'
"""What the scores of the model are called, beside those of baselines."""


@dataclasses.dataclass(frozen=True)
class Detections:
    """The results of `Anomalies`: numbers by `score/metric` (`attnlab.data.series.anomalies.detection`)."""

    numbers: Mapping[str, float]

    def draw(self, folder: pathlib.Path) -> None:
        """Draws nothing."""
        del folder

    def table(self, title: str) -> Table:
        """One row a score."""
        scores, metrics = (dict.fromkeys(name.split('/')[place] for name in self.numbers) for place in (0, 1))
        columns = [Column('score'), *(Column(name.replace('_', ' '), digits('.3f'), True) for name in metrics)]
        rows = [(score, *(self.numbers[f'{score}/{metric}'] for metric in metrics)) for score in scores]
        return Table('anomalies', columns, rows, f'{title}: rows above a quantile of the scores of training')


@dataclasses.dataclass(frozen=True)
class Anomalies:
    """Scores every row of a split by how far it is from what the model fills in for it, and finds anomalies by that.

    A window is read `count` times, in each of which every `count`-th run of `span` rows is missing. The score of a row
    is the mean over variates of its squared error when it was; a row is an alarm above a quantile of the scores of
    training rows. The split's own rows are disturbed, those of training as they are. Beside the model stand
    `distance_to_mean`, the mean square of a row in units of the training rows, and the same gaps filled by baselines.

    Attributes:
      cadence: when to run during training.
      split: whose rows are disturbed.
      disturbances: which.
      quantile: of the scores of training rows.
      count: of readings.
      span: rows of a run.
      name: the prefix of its numbers.
    """

    cadence: Cadence
    split: str = 'test'
    disturbances: Disturbances = Disturbances()
    quantile: float = 0.99
    count: int = 4
    span: int = 4
    name: str = 'anomalies'

    def __post_init__(self) -> None:
        """Raises `UserError` for a quantile beyond 0 and 1, one reading, or no rows."""
        if not 0 < self.quantile < 1 or self.count < 2 or self.span < 1:
            raise UserError(
                f'Anomalies has quantile {self.quantile}, count {self.count} and span {self.span}; it needs a quantile '
                'within 0 and 1, at least 2 readings and runs of at least 1 row'
            )

    def load_data(self, setup: Setup) -> None:
        """Draws the disturbances. Raises `UserError` for a task of another kind, and a split that no window fits."""
        if not isinstance(setup.task, Imputation):
            raise UserError(f'Anomalies needs a model that fills gaps; the task is {type(setup.task).__name__}')
        series = scaled(setup.task.data)
        self.disturbances.draw(series.split(self.split))
        for split in ('train', self.split):
            self._reading(series, split, setup.length, 0)

    def evaluate(self, setup: Setup, variables: nnx.State) -> Detections:
        """Returns how well every score finds the disturbances."""
        assert isinstance(setup.task, Imputation)
        series = scaled(setup.task.data)
        values, anomalous = self.disturbances.draw(series.split(self.split))
        disturbed = with_rows(series, self.split, values)
        train = self._scores(setup, variables, series, 'train')
        found = self._scores(setup, variables, disturbed, self.split)
        numbers: dict[str, float] = {}
        for score, scores in found.items():
            measured = detection(train[score], scores, anomalous, self.quantile)
            numbers |= {f'{score}/{name}': value for name, value in measured.items()}
        return Detections(numbers)

    def _scores(self, setup: Setup, variables: nnx.State, series: Scaled, split: str) -> dict[str, Scores]:
        """The scores of all rows of a split, by what scores them."""
        values = series.split(split)
        scored = {score: np.zeros(len(values)) for score in (MODEL, *FILLINGS)}
        program = setup.program(_program)
        for place in range(self.count):
            source = self._reading(series, split, setup.length, place)
            filled: list[np.ndarray] = []
            with ordered_batches(source, batch_size=setup.rows_of_part) as batches:
                for batch in batches:
                    filled += list(np.asarray(program(variables, batch['tokens'])))
            for window in range(len(source)):
                row, first = source[window], source.first(window)
                gone = np.flatnonzero(row['missing'][:, 0])
                there = row['missing'] == 0
                predictions = {name: one.fill(row['targets'], there) for name, one in FILLINGS.items()}
                for score, predicted in {MODEL: filled[window], **predictions}.items():
                    apart = np.mean(np.square(predicted - row['targets'], dtype=np.float64), axis=1)
                    scored[score][first + gone] = apart[gone]
        return scored | {'distance_to_mean': np.mean(np.square(values, dtype=np.float64), axis=1)}

    def _reading(self, series: Scaled, split: str, length: int, place: int) -> Gapped:
        """All windows of a split, side by side, with the gaps of one of the readings."""
        return Gapped(series, split, length, Grating(place, self.count, self.span), stride=length)


def with_rows(series: Scaled, split: str, values: Float[np.ndarray, 'n v']) -> Scaled:
    """The series with other values in the rows of a split."""
    start, end = series.borders[split]
    found = series.values.copy()
    found[start:end, : series.targets] = values
    return dataclasses.replace(series, values=found)


def _program(setup: Setup) -> Callable[[nnx.State, np.ndarray], Array]:
    """What the model fills windows with, the same in every process."""

    def filled(variables: nnx.State, tokens: Float[Array, 'b t m']) -> Float[Array, 'b t v']:
        model = nnx.merge(setup.graphdef, variables)
        return jnp.swapaxes(model.logits(model.hidden(tokens, Context.full(*tokens.shape[:2]))[0]), 1, 2)

    return setup.jit(filled, out_shardings=setup.whole)
