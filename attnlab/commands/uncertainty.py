"""`attnlab uncertainty`: scores, calibration, selective prediction, conformal sets, risks, ensembles and cascades."""

import pathlib
from typing import TYPE_CHECKING

from absl import flags

from attnlab.commands.arguments import (
    check_belonging,
    define_ema,
    define_format,
    define_run,
    define_split,
    directory,
    parsed,
    printing,
    start_platform,
)
from attnlab.errors import UserError

if TYPE_CHECKING:
    from attnlab.analysis.uncertainty import UncertaintyRequest

RISKS = ('missed', 'wrong')
"""The losses of `attnlab.analysis.risk`."""


def main(argv: list[str]) -> int:
    """Runs the command."""
    values = _flags()
    if not parsed(values, argv, 'uncertainty'):
        return 0
    if not 0 < values.alpha < 1:
        raise UserError(f'--alpha is {values.alpha}; it must be above 0 and below 1')
    check_belonging(values, {'risk_level': ('risk',), 'budget': ('cascade',)})
    workdir = directory(values, 'workdir')
    second = None if values.cascade is None else directory(values, 'cascade')
    start_platform(values)
    from attnlab.analysis.uncertainty import analyse_uncertainty

    with printing(values) as printer:
        analyse_uncertainty(workdir, printer, _asked(values, second), step=values.step)
    return 0


def _flags() -> flags.FlagValues:
    """The flags of the command."""
    values = flags.FlagValues()
    define_run(values)
    define_ema(values)
    define_split(values)
    flags.DEFINE_integer(
        'rows',
        None,
        'How many rows of the split; every other one is used to calibrate. By default enough for about 4,096 '
        'predictions, 20 to 512.',
        lower_bound=4,
        flag_values=values,
    )
    flags.DEFINE_integer(
        'fitted_rows',
        None,
        'How many rows the scores of features are fitted to; by default as many as --rows has by default.',
        lower_bound=2,
        flag_values=values,
    )
    flags.DEFINE_string(
        'fitted_split',
        'train',
        'The split of those rows, which must not be the one that is reported.',
        flag_values=values,
    )
    flags.DEFINE_float('alpha', 0.1, 'How often conformal sets may miss the label.', flag_values=values)
    flags.DEFINE_enum(
        'risk',
        None,
        RISKS,
        'Also control a risk: that sets miss the label (missed), or that an answer is given but wrong (wrong).',
        flag_values=values,
    )
    flags.DEFINE_float('risk_level', 0.1, 'With --risk: the largest expected loss on a new row.', flag_values=values)
    flags.DEFINE_string(
        'cascade', None, 'A larger run that gets the rows of which this run is uncertain.', flag_values=values
    )
    flags.DEFINE_float(
        'budget',
        None,
        'With --cascade: the average cost of a row, in units of the cost of the larger run.',
        lower_bound=0.0,
        flag_values=values,
    )
    flags.DEFINE_list(
        'ensemble', [], 'Further runs, whose probabilities are averaged with those of this run.', flag_values=values
    )
    flags.DEFINE_float(
        'decay',
        None,
        'Also calibrate sets, and the risk, with each row weighted by this factor relative to the row after it.',
        flag_values=values,
    )
    define_format(values)
    return values


def _asked(values: flags.FlagValues, second: pathlib.Path | None) -> 'UncertaintyRequest':
    """What the flags ask."""
    from attnlab.analysis.uncertainty import UncertaintyRequest

    return UncertaintyRequest(
        split=values.split,
        rows=values.rows,
        fitted_split=values.fitted_split,
        fitted=values.fitted_rows,
        alpha=values.alpha,
        risk=values.risk,
        level=values.risk_level,
        second=second,
        budget=values.budget,
        members=tuple(pathlib.Path(each).expanduser() for each in values.ensemble),
        decay=values.decay,
        ema=values.ema,
        other_data=values.other_data,
    )
