"""What a model says of its own rows of predictions, beside how many of these are right."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float
from scipy.special import logsumexp
from scipy.stats import pearsonr, spearmanr

from attnlab.analysis.scores import negative_entropy
from attnlab.tables import Column, Table, digits


@dataclasses.dataclass(frozen=True)
class Judged:
    """How a statistic that a model gives of its own predictions goes with how good they are, over rows.

    Attributes:
      pearson: the correlation with the share of a row's predictions that are right.
      spearman: that of ranks.
    """

    pearson: float
    spearman: float


def row_statistics(logits: Float[np.ndarray, 't o']) -> dict[str, float]:
    """What a model's probabilities say of its predictions in a row: glass-box statistics.

    The mean log-probability of the tokens that it would choose, the mean negative entropy, the share of predictions
    with more than half of the probability, and the mean variance of probabilities over the vocabulary. Huang et al.
    2024, https://arxiv.org/abs/2403.04222.
    """
    logs = logits - logsumexp(logits, axis=1, keepdims=True)
    p = np.exp(logs)
    return {
        'log-probability': float(logs.max(axis=1).mean()),
        'negative entropy': float(negative_entropy(logits).mean()),
        'sure': float((p.max(axis=1) > 0.5).mean()),
        'variance': float(p.var(axis=1).mean()),
    }


def self_judged(logits: list[Float[np.ndarray, '_ o']], labels: list[Any]) -> dict[str, Judged]:
    """How statistics of rows go with the share of their predictions that are right; NaN where either is constant."""
    quality = np.array([np.mean(np.argmax(one, axis=1) == label) for one, label in zip(logits, labels, strict=True)])
    by_row = [row_statistics(each) for each in logits]

    def both(name: str) -> Judged:
        values = np.array([row[name] for row in by_row])
        if np.ptp(values) == 0 or np.ptp(quality) == 0:
            return Judged(float('nan'), float('nan'))
        return Judged(float(pearsonr(values, quality)[0]), float(spearmanr(values, quality)[0]))

    return {name: both(name) for name in by_row[0]}


def judged_table(judged: Mapping[str, Judged]) -> Table:
    """What is printed of it."""
    three = digits('.3f')
    columns = [Column('statistic'), Column('correlation', three, True), Column('of ranks', three, True)]
    rows = [(name, each.pearson, each.spearman) for name, each in judged.items()]
    return Table(
        'itself', columns, rows, 'what the model says of its rows, with how many predictions in them are right'
    )
