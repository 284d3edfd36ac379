"""Imputation: what is missing of a window of a series."""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from attnlab.data.series.drawn import DrawnSeries
from attnlab.data.series.gaps import FILLED, FILLINGS, Filled, Gapped, Gaps, blank
from attnlab.data.series.series import Series
from attnlab.data.series.windows import scaled
from attnlab.errors import UserError
from attnlab.metrics import Average
from attnlab.models.predictor import Predictor
from attnlab.signature import checked_fields
from attnlab.tasks.task import Batch, Slice, WithoutFiles, context
from attnlab.tasks.trivial import sampled_rows
from attnlab.typing import DropoutKey

SHARES = (0.125, 0.25, 0.375, 0.5)
"""The shares that are missing in slices of their own, those of Wu et al. 2023, https://arxiv.org/abs/2210.02186."""


@checked_fields
@dataclasses.dataclass(frozen=True)
class Imputation(WithoutFiles):
    """Fill the gaps of windows of `steps` rows, all variates; errors and the loss are of missing values alone.

    Errors are means over these, in units of the training rows. Where a value is missing, models see the mean of what is
    there; which are, they read in as many columns besides (`attnlab.data.series.gaps.Gapped`).

    Attributes:
      data: the series.
      steps: of a window, which is the length of the run.
      gaps: what is missing, drawn anew at every step of training.
      seed: of the gaps of evaluations.
    """

    packs: ClassVar[bool] = False
    labels: ClassVar[str] = 'targets'

    data: Series = DrawnSeries()
    steps: int = 96
    gaps: Gaps = Gaps()
    seed: int = 0

    @property
    def vocab(self) -> int:
        """Numbers that are predicted of every variate."""
        return self.steps

    @property
    def evaluated_split(self) -> str:
        """The last rows in time."""
        return 'test'

    def source(self, split: str, length: int, tokens: int | None = None) -> Gapped:
        """The windows of a split; with `tokens`, as many all over it as read `tokens` rows, at least one.

        Raises `UserError` for another length than that of the windows.
        """
        if length != self.steps:
            raise UserError(f'config.length is {length}; windows of the task have {self.steps} rows (task.steps)')
        count = None if tokens is None else max(1, tokens // length)
        return Gapped(scaled(self.data), split, length, self.gaps, self.seed, count=count)

    def slices(self, split: str, length: int, multiples: tuple[int, ...], count: int) -> dict[str, Slice]:
        """`count` windows all over a split with gaps as in training, `1x`; with shares of `SHARES`; and the baselines.

        Windows have one length, so that there are no multiples of it.
        """
        del multiples
        windows = dataclasses.replace(self.source(split, length), count=count)
        found: dict[str, Slice] = {'1x': Slice(windows, length)}
        for share in SHARES:
            gaps = dataclasses.replace(self.gaps, low=share, high=share)
            found[f'missing={share:g}'] = Slice(dataclasses.replace(windows, gaps=gaps), length)
        return found | {name: Slice(Filled(windows, one), length) for name, one in FILLINGS.items()}

    def trivial(self, part: Slice) -> dict[str, dict[str, float]]:
        """The errors of the baselines on windows all over a slice."""
        rows = sampled_rows(part.source)
        targets, missing = (np.stack([row[name] for row in rows]) for name in ('targets', 'missing'))
        found: dict[str, dict[str, float]] = {'mse': {}, 'mae': {}}
        for name, one in FILLINGS.items():
            filled = np.stack([one.fill(row['targets'], row['missing'] == 0) for row in rows])
            apart = (filled - targets)[missing > 0]
            found['mse'][name], found['mae'][name] = float(np.mean(apart**2)), float(np.mean(np.abs(apart)))
        return found | {'loss': found['mse']}

    def example(self, length: int) -> dict[str, np.ndarray]:
        """A row of zeros."""
        return blank(length, self.data.variates)

    def describe(self) -> dict[str, Any]:
        """Where the data are from."""
        return self.data.describe()

    def measure(self, model: Predictor, batch: Batch, dropout_key: DropoutKey | None) -> dict[str, Average]:
        """The loss of the head and the errors, of missing values; windows that are given filled have no loss.

        Where a value is there, its prediction is its own target, so that a head of squared errors has no loss and no
        gradient there. Of absolute errors rounding would leave a gradient.
        """
        if FILLED in batch:
            return _errors(batch[FILLED], batch)
        asked = batch['missing'] * _weights(batch)
        hidden, _ = model.hidden(batch['tokens'], context(batch, dropout_key, asked))
        found = jnp.swapaxes(model.logits(hidden), 1, 2)
        targets = jnp.where(batch['missing'] > 0, batch['targets'], jax.lax.stop_gradient(found))
        # Means over the steps of a variate, which become one over what is missing.
        losses = model.losses(hidden, jnp.swapaxes(targets, 1, 2), dropout_key) * targets.shape[1]
        weights = jnp.broadcast_to(batch['weights'][:, None], losses.shape)
        loss = Average(jnp.sum(losses * weights), jnp.sum(asked))
        return {'loss': loss} | _errors(found, batch)


def _errors(found: Float[Array, 'b t v'], batch: Batch) -> dict[str, Average]:
    """Mean squared and absolute errors of missing values, in units of the training rows and of the data."""
    apart = (found - batch['targets']).astype(jnp.float32)
    weights = batch['missing'] * _weights(batch)
    unit = jnp.broadcast_to(batch['unit'][:, None], apart.shape)
    return {
        'mse': Average.of(jnp.square(apart), weights),
        'mae': Average.of(jnp.abs(apart), weights),
        'mse_original': Average.of(jnp.square(apart * unit), weights),
        'mae_original': Average.of(jnp.abs(apart) * unit, weights),
    }


def _weights(batch: Batch) -> Float[Array, 'b t v']:
    return jnp.broadcast_to(batch['weights'].reshape(-1, 1, 1), batch['missing'].shape)
