"""Find a planted mixture of experts from a sample of it."""

import dataclasses
from typing import Any, ClassVar

import numpy as np

from attnlab.data.synthetic.planted import PlantedSample
from attnlab.metrics import Average
from attnlab.models.predictor import Predictor
from attnlab.nn.planted import PlantedExperts
from attnlab.tasks.task import Batch, Slice, WithoutFiles, context
from attnlab.typing import DropoutKey

TESTED = 8_192
"""Points of the test split, whatever the size of the sample."""


@dataclasses.dataclass(frozen=True)
class Planted(WithoutFiles):
    """Predict values at points; a row is all of the sample, so that `length` is its size and a step sees it whole.

    Attributes:
      planted: the mixture.
      seed: of the sample.
    """

    packs: ClassVar[bool] = False
    labels: ClassVar[str] = 'targets'

    planted: PlantedExperts = PlantedExperts()
    seed: int = 0

    @property
    def vocab(self) -> int:
        """One output."""
        return 1

    @property
    def evaluated_split(self) -> str:
        """Other points."""
        return 'test'

    def source(self, split: str, length: int, tokens: int | None = None) -> PlantedSample:
        """The one row of a split, whatever the number of `tokens` asked for."""
        del tokens
        return PlantedSample(self.planted, self.seed, split, length)

    def slices(self, split: str, length: int, multiples: tuple[int, ...], count: int) -> dict[str, Slice]:
        """All of `TESTED` points, `all`."""
        del length, multiples, count
        return {'all': Slice(self.source(split, TESTED), TESTED)}

    def example(self, length: int) -> dict[str, np.ndarray]:
        """A row of zeros."""
        numbers = {name: np.zeros(length, np.float32) for name in ('targets', 'weights', 'least')}
        return {'tokens': np.zeros((length, 2), np.float32), **numbers}

    def describe(self) -> dict[str, Any]:
        """The mixture and the seed: everything a sample depends on."""
        described = {'source': 'a planted mixture of experts', 'planted': repr(self.planted), 'seed': self.seed}
        return described | {'content': self.source('train', 1).content}

    def measure(self, model: Predictor, batch: Batch, dropout_key: DropoutKey | None) -> dict[str, Average]:
        """The loss in nats, and `excess`, what it is above that of the planted mixture."""
        hidden, _ = model.hidden(batch['tokens'], context(batch, dropout_key))
        losses = model.losses(hidden, batch['targets'], dropout_key)
        return {
            'loss': Average.of(losses, batch['weights']),
            'excess': Average.of(losses - batch['least'], batch['weights']),
        }
