"""Anomalies drawn into a series, and how well scores of rows find them."""

import dataclasses

import numpy as np
from jaxtyping import Bool, Float
from scipy.stats import rankdata

from attnlab.errors import UserError
from attnlab.signature import checked_fields

Rows = Float[np.ndarray, 'n v']
Scores = Float[np.ndarray, 'n']
Anomalous = Bool[np.ndarray, 'n']


@checked_fields
@dataclasses.dataclass(frozen=True)
class Disturbances:
    """Rows of a scaled series that are disturbed, one variate at a time, in one of four ways, each as likely.

    - spike: `size` is added to one row, or taken off;
    - shift: the same, over `span` rows;
    - noise: normal noise of deviation `size / 2` is added over `span` rows;
    - stillness: `span` rows have the value of the row before.

    They begin in rows at least `2 span` apart: one in every part of `every` rows.

    Attributes:
      every: rows of a part.
      span: rows of a disturbance but a spike.
      size: in units of the training rows.
      seed: of the draw.
    """

    every: int = 80
    span: int = 8
    size: float = 3.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises `UserError` for parts that are too short, a size that is none, and a negative seed."""
        if self.every < 4 * self.span or self.size <= 0 or self.seed < 0:
            raise UserError(
                f'Disturbances has every {self.every}, span {self.span}, size {self.size} and seed {self.seed}; every '
                'must be at least 4 times span, size above 0, and seed at least 0'
            )

    def draw(self, values: Rows) -> tuple[Rows, Anomalous]:
        """The rows with disturbances, and which have them. Raises `UserError` for fewer rows than a part."""
        if len(values) < self.every:
            raise UserError(f'{len(values)} rows are fewer than a part of Disturbances, {self.every}')
        rng = np.random.default_rng(self.seed)
        found, which = values.copy(), np.zeros(len(values), bool)
        for part in range(0, len(values) - self.every + 1, self.every):
            start = part + int(rng.integers(self.span, self.every - 2 * self.span))
            variate, kind, sign = int(rng.integers(values.shape[1])), int(rng.integers(4)), rng.choice([-1.0, 1.0])
            noise = rng.standard_normal(self.span)
            rows = slice(start, start + (1 if kind == 0 else self.span))
            if kind < 2:
                found[rows, variate] += sign * self.size
            elif kind == 2:
                found[rows, variate] += self.size / 2 * noise
            else:
                found[rows, variate] = found[start - 1, variate]
            which[rows] = True
        return found, which


def detection(train: Float[np.ndarray, 'm'], scores: Scores, anomalous: Anomalous, quantile: float) -> dict[str, float]:
    """How well scores find anomalous rows: those above a quantile of the scores of training rows.

    `threshold`; `precision` (of no alarm 0), `recall` and `f1` of rows; `false_alarms`, the share of other rows above;
    and `auroc`, the probability that an anomalous row has a greater score than another, ties counting half. A stretch
    is not found as a whole where one of its rows is: with that adjustment random scores reach the best published
    numbers (Kim et al. 2022, https://arxiv.org/abs/2109.05257).
    """
    threshold = float(np.quantile(train, quantile))
    above = scores > threshold
    right = int((above & anomalous).sum())
    positive, negative = int(anomalous.sum()), int((~anomalous).sum())
    ranks = rankdata(scores)[anomalous].sum()
    return {
        'threshold': threshold,
        'precision': right / max(int(above.sum()), 1),
        'recall': right / positive,
        'f1': 2 * right / (int(above.sum()) + positive),
        'false_alarms': float((above & ~anomalous).sum() / negative),
        'auroc': float((ranks - positive * (positive + 1) / 2) / (positive * negative)),
    }
