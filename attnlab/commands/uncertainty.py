"""`attnlab uncertainty`: scores, calibration, selective prediction, conformal sets and cascades of a classifier."""

from absl import flags

from attnlab.commands.arguments import (
    define_format,
    define_run,
    define_split,
    directory,
    parsed,
    printing,
    start_devices,
)
from attnlab.errors import UserError


def main(argv: list[str]) -> int:
    """Runs the command."""
    values = flags.FlagValues()
    define_run(values)
    define_split(values)
    flags.DEFINE_integer(
        'rows',
        None,
        'Rows of the split, of which every other one calibrates; 512, or all, by default.',
        lower_bound=4,
        flag_values=values,
    )
    flags.DEFINE_integer(
        'fitted_rows',
        None,
        'Rows of training that scores of features are fitted to, likewise.',
        lower_bound=2,
        flag_values=values,
    )
    flags.DEFINE_float('alpha', 0.1, 'How often conformal sets may lack the label.', flag_values=values)
    flags.DEFINE_string(
        'cascade', None, 'A larger run, to which rows are handed on of which this one is not sure.', flag_values=values
    )
    define_format(values)
    if not parsed(values, argv, 'uncertainty'):
        return 0
    if not 0 < values.alpha < 1:
        raise UserError(f'--alpha is {values.alpha}; it must be above 0 and below 1')
    workdir = directory(values, 'workdir')
    second = None if values.cascade is None else directory(values, 'cascade')
    start_devices(values)
    from attnlab.analysis.uncertainty import analyse_uncertainty

    with printing(values) as printer:
        analyse_uncertainty(
            workdir,
            printer,
            step=values.step,
            split=values.split,
            rows=values.rows,
            fitted=values.fitted_rows,
            alpha=values.alpha,
            second=second,
            other_data=values.other_data,
        )
    return 0
