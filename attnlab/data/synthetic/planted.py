"""Samples of a planted mixture of experts: a row is a whole sample."""

import dataclasses
import functools

import numpy as np

from attnlab.data.edition import Editioned
from attnlab.data.pipeline import Row
from attnlab.data.synthetic.problem import SPLITS
from attnlab.errors import UserError, nearest
from attnlab.nn.planted import PlantedExperts


@dataclasses.dataclass(frozen=True)
class PlantedSample(Editioned):
    """One row of `count` points: `tokens`, float32 `t 2`; `targets` and `weights`, float32 `t`; `least`, float32 `t`.

    `least` is `-log p` of the planted mixture itself. The edition is raised where `PlantedExperts` draws others, too.

    Raises `UserError` for an unknown split, and a seed below 0.
    """

    planted: PlantedExperts
    seed: int
    split: str
    count: int

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise UserError(f'PlantedSample has no split {self.split!r}{nearest(self.split, SPLITS)}')
        if self.seed < 0:
            raise UserError(f'seed of PlantedSample is {self.seed}; it must be a whole number of at least 0')

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Row:
        if index:
            raise IndexError(f'row {index} of 1')
        return _drawn(self)


@functools.lru_cache(maxsize=4)
def _drawn(sample: PlantedSample) -> Row:
    rng = np.random.default_rng((sample.seed, SPLITS[sample.split]))
    x, y, _ = sample.planted.draw(rng, sample.count)
    least = sample.planted.losses(x, y).astype(np.float32)
    return {'tokens': x, 'targets': y, 'weights': np.ones(sample.count, np.float32), 'least': least}
