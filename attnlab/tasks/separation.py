"""Separation: the sources of which a mixture is the sum."""

import dataclasses
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from attnlab.data.series.mixtures import BASELINES, ESTIMATES, DrawnMixtures, Mixtures, Separated
from attnlab.functional.separation import best_order, every_pair, matched, si_snr
from attnlab.metrics import Average
from attnlab.models.predictor import Predictor
from attnlab.signature import checked_fields
from attnlab.tasks.task import Batch, Slice, WithoutFiles, context
from attnlab.tasks.trivial import sampled_rows
from attnlab.typing import DropoutKey


@checked_fields
@dataclasses.dataclass(frozen=True)
class Separation(WithoutFiles):
    """Estimate the sources of mixtures of `length` samples, in any order and at any scale.

    Attributes:
      data: the mixtures.
    """

    packs: ClassVar[bool] = False
    labels: ClassVar[str] = 'sources'

    data: DrawnMixtures = DrawnMixtures()

    @property
    def vocab(self) -> int:
        """Sources of a mixture."""
        return self.data.sources

    @property
    def evaluated_split(self) -> str:
        """Mixtures that are drawn apart."""
        return 'test'

    def source(self, split: str, length: int, tokens: int | None = None) -> Mixtures:
        """The mixtures of a split; with `tokens`, those of the first `tokens` samples, at least one."""
        return self.data.rows(split, length, None if tokens is None else max(1, tokens // length))

    def slices(self, split: str, length: int, multiples: tuple[int, ...], count: int) -> dict[str, Slice]:
        """The first `count` mixtures: of the training length by the model, `1x`, and longer ones; and the baselines."""
        found: dict[str, Slice] = {
            f'{n}x': Slice(self.data.rows(split, n * length, count), n * length) for n in multiples
        }
        rows = self.data.rows(split, length, count)
        return found | {name: Slice(Separated(rows, one), length) for name, one in BASELINES.items()}

    def trivial(self, part: Slice) -> dict[str, dict[str, float]]:
        """What the baselines reach on the first mixtures of a slice (`attnlab.data.series.mixtures.BASELINES`)."""
        rows = sampled_rows(part.source, GUESSED)
        sources, tokens = (jnp.asarray(np.stack([row[name] for row in rows])) for name in ('sources', 'tokens'))
        found: dict[str, dict[str, float]] = {'si_snr': {}, 'si_snr_improvement': {}}
        for name, one in BASELINES.items():
            made = np.stack([one.separate(row['tokens'][:, 0], row['sources']) for row in rows])
            ratio, gain = ratios(jnp.asarray(made), sources, tokens)
            found['si_snr'][name], found['si_snr_improvement'][name] = float(ratio.mean()), float(gain.mean())
        return found | {'loss': {name: -value for name, value in found['si_snr'].items()}}

    def example(self, length: int) -> dict[str, np.ndarray]:
        """A row of zeros."""
        return {
            'tokens': np.zeros((length, 1), np.float32),
            'sources': np.zeros((self.data.sources, length), np.float32),
            'weights': np.zeros((), np.float32),
        }

    def describe(self) -> dict[str, Any]:
        """Where the data are from."""
        return self.data.describe()

    def measure(self, model: Predictor, batch: Batch, dropout_key: DropoutKey | None) -> dict[str, Average]:
        """The loss, the SI-SNR and its improvement over that of the mixture, in dB; what is given has no loss."""
        if ESTIMATES in batch:
            return _measured(batch[ESTIMATES], batch)
        weights = _weights(batch, batch['sources'][..., 0])
        hidden, _ = model.hidden(batch['tokens'], context(batch, dropout_key, weights))
        losses = model.losses(hidden, batch['sources'], dropout_key)
        found = _measured(model.logits(hidden), batch)
        return {'loss': Average.of(losses, weights)} | found


GUESSED = 64
"""Mixtures that baselines are drawn from where no table asks for all."""


def ratios(
    estimates: Float[Array, 'b n t'], sources: Float[Array, 'b n t'], tokens: Float[Array, 'b t 1']
) -> tuple[Float[Array, 'b n'], Float[Array, 'b n']]:
    """SI-SNR of the estimates in the order of the sources that is best, and how much it is above the mixture's."""
    scores = every_pair(estimates, sources)
    order = best_order(scores)
    found = matched(scores, order)
    mixture = jnp.broadcast_to(jnp.swapaxes(tokens, 1, 2), sources.shape)
    before = jnp.take_along_axis(si_snr(mixture, sources), order, axis=1)
    return found, found - before


def _measured(estimates: Float[Array, 'b n t'], batch: Batch) -> dict[str, Average]:
    ratio, gain = ratios(estimates, batch['sources'], batch['tokens'])
    weights = _weights(batch, ratio)
    return {'si_snr': Average.of(ratio, weights), 'si_snr_improvement': Average.of(gain, weights)}


def _weights(batch: Batch, like: Float[Array, 'b n']) -> Float[Array, 'b n']:
    return jnp.broadcast_to(batch['weights'][:, None], like.shape)
