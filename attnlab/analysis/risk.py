"""Conformal risk control: a setting of which the expected loss of a new row is at most what is asked.

A prediction `i` costs `amount_i` with settings below `when_i` and nothing with others, so that losses fall from bold
settings to cautious ones. The loss of a row is the mean over its predictions: rows are what may be exchanged, or ages
of what drifts, and not the predictions of one row, which depend on each other.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping

import numpy as np
from jaxtyping import Float

from attnlab.analysis import calibration, scores
from attnlab.analysis.calibration import Estimate
from attnlab.analysis.outputs import Outputs
from attnlab.errors import UserError
from attnlab.evals.measured import SHARE

SETTINGS = 1000
"""Settings that are tried at most; fewer make what is chosen more cautious, and the promise holds."""


@dataclasses.dataclass(frozen=True)
class Loss:
    """What a setting costs.

    Attributes:
      steps: `when` and `amount` of every prediction.
      used: what the setting leaves of every prediction, of which `name` is the mean.
    """

    steps: Callable[[Outputs], tuple[Float[np.ndarray, 'b'], Float[np.ndarray, 'b']]]
    used: Callable[[Outputs, float], np.ndarray]
    name: str


def _missed(outputs: Outputs) -> tuple[np.ndarray, np.ndarray]:
    misfit = calibration.misfit(outputs.logits)[np.arange(len(outputs.labels)), outputs.labels]
    return misfit, np.ones(len(misfit))


LOSSES: Mapping[str, Loss] = {
    # Sets of classes with a misfit up to the setting, that lack the label.
    'missed': Loss(
        _missed,
        lambda outputs, setting: np.sum(calibration.conformal_sets(outputs.logits, setting), axis=1),
        'mean size',
    ),
    # Predictions with a probability above the setting, that are given, and wrong.
    'wrong': Loss(
        lambda outputs: (scores.max_probability(outputs.logits), (~outputs.right).astype(float)),
        lambda outputs, setting: scores.max_probability(outputs.logits) > setting,
        'answered',
    ),
}
"""What may be lost, by name; 1 a prediction at most."""


@dataclasses.dataclass(frozen=True)
class Risk:
    """What a setting whose risk is controlled comes to, on rows that it was not chosen on.

    Attributes:
      loss: what is lost, a name among `LOSSES`.
      level: the largest expected loss of a new row that is allowed.
      setting: what was chosen; infinite where only the most cautious one will do. `None` where every row has its own.
      risk: the mean loss of rows, with its interval.
      used: the mean size of sets, or the share of predictions that are given.
    """

    loss: str
    level: float
    setting: float | None
    risk: Estimate
    used: float


def check_level(level: float, rows: int, decay: float | None = None) -> None:
    """Raises `UserError` for a level of which `rows` that choose, or their weights, can promise nothing."""
    if not 0 < level < 1:
        raise UserError(f'--risk_level is {level}; it must be above 0 and below 1')
    if 1 / (rows + 1) > level:
        raise UserError(
            f'--risk_level is {level}; {rows} rows that choose promise {1 / (rows + 1):.3g} at best: give '
            f'--rows={2 * math.ceil(round(1 / level - 1, 9))} or more'
        )
    if decay is not None and 1 / (np.sum(_weights(rows, decay)) + 1) > level:
        raise UserError(
            f'--decay is {decay}; rows so weighted promise a risk of {1 / (np.sum(_weights(rows, decay)) + 1):.3g} at '
            f'best, and --risk_level is {level}: give a decay nearer to 1'
        )


def controlled_risk(chosen: Outputs, tested: Outputs, name: str, level: float) -> Risk:
    """The boldest setting whose risk the chosen rows control, tried on others (`calibration.controlled`)."""
    loss = LOSSES[name]
    settings = _settings(chosen, loss)
    column = calibration.controlled(_losses(chosen, loss, settings), level)
    # With the last setting nothing is lost.
    setting = float(settings[-1 if column is None else column])
    lost = _losses(tested, loss, np.array([setting]))[:, 0]
    used = float(np.mean(tested.by_row(loss.used(tested, setting))))
    return Risk(name, level, setting, _mean(lost), used)


def recent_risk(outputs: Outputs, name: str, level: float, decay: float) -> Risk:
    """The same where rows come in order: of every other one, by those before it that choose.

    Each counts by `decay` less than the one after it: the non-exchangeable form, Farinhas et al. 2023,
    https://arxiv.org/abs/2310.01262. Where rows drift the risk is `level + sum_i w_i d_i` at most, see
    `calibration.weighted_threshold`. Raises `UserError` for a decay outside of (0, 1].
    """
    check_decay(decay)
    loss = LOSSES[name]
    # Of parts rows keep their places among all.
    outputs = dataclasses.replace(outputs, groups=outputs.places)
    chosen, tested = outputs.part(0, 2), outputs.part(1, 2)
    settings = _settings(chosen, loss)
    known, asked = (_losses(part, loss, settings) for part in (chosen, tested))
    lost, used = np.zeros(len(asked)), np.zeros(len(asked))
    for index, row in enumerate(tested.rows):
        before = known[chosen.rows < row]
        column = calibration.controlled(before, level, weights=_weights(len(before), decay))
        column = len(settings) - 1 if column is None else column
        lost[index] = asked[index, column]
        used[index] = np.mean(loss.used(tested.only(int(row)), settings[column]))
    return Risk(name, level, None, _mean(lost), float(np.mean(used)))


def check_decay(decay: float) -> None:
    """Raises `UserError` for a decay outside of (0, 1]."""
    if not 0 < decay <= 1:
        raise UserError(f'--decay is {decay}; it must be above 0 and at most 1')


def _mean(lost: Float[np.ndarray, 'r']) -> Estimate:
    return calibration.bootstrapped(lambda each: float(np.mean(lost[each])), len(lost), SHARE)


def _weights(rows: int, decay: float) -> Float[np.ndarray, 'r']:
    return decay ** np.arange(rows, 0, -1.0)


def _settings(outputs: Outputs, loss: Loss) -> Float[np.ndarray, 's']:
    """From the boldest to the most cautious: where losses change, or some of these places."""
    when, amount = loss.steps(outputs)
    places = np.unique(when[amount > 0])
    if len(places) > SETTINGS:
        places = places[np.linspace(0, len(places) - 1, SETTINGS).astype(int)]
    return np.concatenate([[-np.inf], places, [np.inf]])


def _losses(outputs: Outputs, loss: Loss, settings: Float[np.ndarray, 's']) -> Float[np.ndarray, 'r s']:
    """The loss of every row, by setting."""
    when, amount = loss.steps(outputs)
    return outputs.by_row(amount[:, None] * (settings[None] < when[:, None]))
