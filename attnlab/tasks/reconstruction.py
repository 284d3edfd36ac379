"""Reconstruction of a dynamical system from one of its trajectories."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from attnlab.data.series.drawn import DrawnSeries, Lorenz
from attnlab.data.series.series import Series
from attnlab.data.series.trajectories import Trajectories
from attnlab.data.series.windows import scaled
from attnlab.metrics import Average
from attnlab.models.predictor import Predictor
from attnlab.signature import checked_fields
from attnlab.tasks.task import Batch, Slice, WithoutFiles, context
from attnlab.tasks.trivial import sampled_rows
from attnlab.typing import DropoutKey


@checked_fields
@dataclasses.dataclass(frozen=True)
class Reconstruction(WithoutFiles):
    """Follow stretches of `length` rows of a series by a model that could go on by itself.

    Errors are means over stretches, rows and variates, in units of the training rows: of every variate less its mean
    there, divided by its standard deviation there. How well the system is reconstructed a run of the model by itself
    tells (`attnlab.evals.attractor`), not these.

    Attributes:
      data: the series.
    """

    packs: ClassVar[bool] = False
    labels: ClassVar[str] = 'targets'

    data: Series = DrawnSeries(Lorenz(step=0.01), rows=30_000)

    @property
    def vocab(self) -> int:
        """Numbers of a row."""
        return self.data.variates

    @property
    def evaluated_split(self) -> str:
        """The last rows in time."""
        return 'test'

    def source(self, split: str, length: int, tokens: int | None = None) -> Trajectories:
        """The stretches of a split; with `tokens`, as many all over it as read `tokens` rows, at least one."""
        count = None if tokens is None else max(1, tokens // length)
        return Trajectories(scaled(self.data).split(split), length, count)

    def slices(self, split: str, length: int, multiples: tuple[int, ...], count: int) -> dict[str, Slice]:
        """`count` stretches all over a split, `1x`, and those of multiples of their length."""
        rows = scaled(self.data).split(split)
        return {f'{n}x': Slice(Trajectories(rows, n * length, count), n * length) for n in multiples}

    def trivial(self, part: Slice) -> dict[str, dict[str, float]]:
        """The errors of predicting the mean of the training rows, and of predicting that nothing changes."""
        rows = sampled_rows(part.source)
        past, targets = (np.stack([row[name] for row in rows]) for name in ('tokens', 'targets'))
        return {'loss': {'mean': float(np.mean(targets**2)), 'last row': float(np.mean((past - targets) ** 2))}}

    def example(self, length: int) -> dict[str, np.ndarray]:
        """A row of zeros."""
        blank = np.zeros((length, self.vocab), np.float32)
        return {'tokens': blank, 'targets': blank, 'weights': np.zeros((), np.float32)}

    def describe(self) -> dict[str, Any]:
        """Where the data are from."""
        return self.data.describe()

    def measure(self, model: Predictor, batch: Batch, dropout_key: DropoutKey | None) -> dict[str, Average]:
        """The mean squared error of the row after every row."""
        weights = jnp.broadcast_to(batch['weights'][:, None], batch['targets'].shape[:2])
        hidden, _ = model.hidden(batch['tokens'], context(batch, dropout_key, weights))
        return {'loss': Average.of(model.losses(hidden, batch['targets'], dropout_key), weights)}
