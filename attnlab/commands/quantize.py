"""`attnlab quantize`: a run of few bits, of weights, inputs or states, made of a trained one."""

import dataclasses
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from absl import flags

from attnlab.commands.arguments import (
    check_belonging,
    define_ema,
    define_format,
    define_other_data,
    define_platform,
    directory,
    parsed,
    printing,
    start_platform,
)
from attnlab.errors import UserError

if TYPE_CHECKING:
    from attnlab.quantize.allocation import Allocation
    from attnlab.quantize.calibration import Calibration
    from attnlab.quantize.formats import Format, Rounding
    from attnlab.quantize.layers import Quantization
    from attnlab.quantize.run import How
    from attnlab.quantize.shifts import ShiftCalibration
    from attnlab.quantize.states import StateFormat

MEASURED = ('budget', 'softmax', 'sparse')
"""What --rows of training are measured for, besides fixed ranges."""


def main(argv: list[str]) -> int:
    """Runs the command."""
    values = _flags()
    if not parsed(values, argv, 'quantize'):
        return 0
    _check(values)
    return _each(values) if values.each else _one(values)


def _flags() -> flags.FlagValues:
    """The flags of the command."""
    values = flags.FlagValues()
    flags.DEFINE_string('workdir', None, 'The directory of the run.', flag_values=values)
    flags.DEFINE_string('out', None, 'The directory of the new run.', flag_values=values)
    flags.DEFINE_integer(
        'step', None, 'The checkpoint to load; the newest by default.', lower_bound=0, flag_values=values
    )
    flags.DEFINE_string(
        'weights',
        None,
        'The format of the weights of linear maps, such as int4 (one scale per output), int4@32 (one per 32 '
        'inputs), int8@tensor, e4m3, mxe2m1, higgs4, higgs4x2, log4; not quantized by default. Several with '
        '--budget.',
        flag_values=values,
    )
    flags.DEFINE_string(
        'inputs',
        None,
        'The format of the inputs of linear maps, such as affine8 (one scale per token), e4m3, cross8, fixed8 '
        '(one range per map, calibrated on --rows, with channels after norms scaled to equal ranges), or '
        'fixede2m1 (floating point, one exponent per channel, calibrated on --rows); not quantized by '
        'default.',
        flag_values=values,
    )
    flags.DEFINE_string(
        'state',
        None,
        'The format of states between tokens, such as int8 (one scale per slice of the last axis), or kivi2 '
        'for caches of keys and values; not quantized by default.',
        flag_values=values,
    )
    flags.DEFINE_float(
        'budget',
        None,
        'Average bits per weight, scales included: choose one of several formats, such as '
        '--weights=higgs3x2,higgs4x2, for each map of each layer so that the loss rises least.',
        lower_bound=0.0,
        flag_values=values,
    )
    flags.DEFINE_integer(
        'rows',
        64,
        'With --budget, --inputs=fixed8, --softmax or --sparse: how many training rows to calibrate on.',
        lower_bound=1,
        flag_values=values,
    )
    flags.DEFINE_integer(
        'feedback',
        None,
        'Round weights column by column with error feedback (GPTQ), calibrated on this many training rows; by '
        'default each is rounded to the nearest.',
        lower_bound=1,
        flag_values=values,
    )
    flags.DEFINE_float(
        'damping',
        0.01,
        'With --feedback: what is added to the diagonal of second moments, as a fraction of its mean.',
        lower_bound=0.0,
        flag_values=values,
    )
    flags.DEFINE_boolean(
        'ordered', False, 'With --feedback: round the columns of the largest inputs first.', flag_values=values
    )
    flags.DEFINE_integer(
        'tuned',
        None,
        'Fine-tune codes and scales for this many rounds over training rows (PV-tuning); for intN, affineN '
        'and minmaxN.',
        lower_bound=1,
        flag_values=values,
    )
    flags.DEFINE_integer(
        'softmax',
        None,
        'Round attention weights to this many bits, and add back the mean error of each head, calibrated on --rows.',
        lower_bound=1,
        upper_bound=16,
        flag_values=values,
    )
    flags.DEFINE_float(
        'sparse',
        None,
        'Zero this fraction of the activations of gated channel mixers, the smallest, by thresholds '
        'calibrated on --rows (CATS).',
        flag_values=values,
    )
    flags.DEFINE_boolean(
        'native',
        False,
        'Multiply the codes themselves, with --weights=int8 --inputs=int8, or with e4m3 and e5m2; dequantized '
        'numbers by default.',
        flag_values=values,
    )
    flags.DEFINE_boolean(
        'each',
        False,
        'Write one run for each of several formats, --weights=int8,int4,int3 or --state=none,int8,int4, and '
        'each combination, in folders of --out, and compare them with the original.',
        flag_values=values,
    )
    define_ema(values)
    define_other_data(values)
    define_format(values)
    define_platform(values)
    return values


def _fixed(values: flags.FlagValues) -> re.Match[str] | None:
    """What --inputs says of fixed ranges: bits, or an exponent and a mantissa."""
    return re.fullmatch(r'fixed(\d+|e\dm\d)', values.inputs or '')


def _check(values: flags.FlagValues) -> None:
    """Raises `UserError` for flags that do not go together, of one format or several."""
    check_belonging(values, dict.fromkeys(('damping', 'ordered'), ('feedback',)))
    if values.feedback is not None and values.weights is None:
        raise UserError('--feedback calibrates the rounding of weights; give --weights, such as int4@32')
    fixed = _fixed(values)
    if values['rows'].present and fixed is None and all(values[name].value is None for name in MEASURED):
        raise UserError('--rows is for --budget, --inputs=fixed8, --softmax or --sparse, of which none is given')
    if values.budget is not None:
        _check_budget(values)
    if fixed is not None and not fixed[1].isdecimal() and values.feedback is not None:
        raise UserError(f'--feedback reads inputs as they are; leave it out with --inputs={values.inputs}')


def _check_budget(values: flags.FlagValues) -> None:
    """Raises `UserError` for flags that do not go with a budget of bits."""
    if _fixed(values) is not None:
        raise UserError(f'--inputs={values.inputs} is for weights of one format; leave out --budget')
    if values.weights is None:
        raise UserError('--budget is of bits of weights; give --weights to choose from, such as higgs3x2,higgs4x2')
    for name in ('feedback', 'tuned'):
        if values[name].value is not None:
            raise UserError(f'--{name} is for weights of one format; leave out --budget')


def _check_one(values: flags.FlagValues) -> None:
    """Raises `UserError` for flags that do not make one run."""
    if values.budget is None and values.weights is not None and ',' in values.weights:
        raise UserError(
            f'--weights is {values.weights}; of several formats --budget chooses, and --each makes a run of every one'
        )
    if values.native and values.weights is None and values.inputs is None:
        raise UserError('--native takes products of codes; give --weights and --inputs, such as int8 and int8')
    if values.native and (values.budget is not None or _fixed(values)):
        raise UserError('--native is for one format of weights and one of inputs; leave out --budget and fixed ranges')


def _one(values: flags.FlagValues) -> int:
    """A run of one format, or of those that a budget chooses for every map."""
    _check_one(values)
    formats = _formats(values)
    workdir, out = directory(values, 'workdir'), directory(values, 'out')
    start_platform(values)
    from attnlab.quantize.run import quantize_run

    with printing(values) as printer:
        quantize_run(
            workdir,
            out,
            _quantization(values, *formats),
            printer,
            _how(values),
            step=values.step,
        )
    return 0


def _formats(values: flags.FlagValues) -> 'tuple[tuple[Format, ...], Rounding | None, StateFormat | None]':
    """The formats of weights, inputs and states; fixed ranges, which are yet to be measured, are none."""
    from attnlab.quantize.formats import format_called, storage_called
    from attnlab.quantize.states import state_called

    return (
        () if values.weights is None else tuple(map(storage_called, values.weights.split(','))),
        None if values.inputs is None or _fixed(values) else format_called(values.inputs),
        None if values.state is None else state_called(values.state),
    )


def _quantization(
    values: flags.FlagValues,
    formats: 'tuple[Format, ...]',
    inputs: 'Rounding | None',
    state: 'StateFormat | None',
) -> 'Quantization | Allocation | Calibration | ShiftCalibration | None':
    """What makes the run, from the formats or by measuring; `None` where it is packed as it was trained."""
    from attnlab.quantize.allocation import Allocation
    from attnlab.quantize.calibration import Calibration
    from attnlab.quantize.layers import Quantization
    from attnlab.quantize.shifts import ShiftCalibration

    if values.budget is not None:
        return Allocation(formats, values.budget, values.rows, inputs, state)
    weights, fixed = formats[0] if formats else None, _fixed(values)
    if fixed:
        width = fixed[1]
        of = Calibration(int(width), values.rows) if width.isdecimal() else ShiftCalibration(width, values.rows)
        return dataclasses.replace(of, weights=weights, state=state)
    if weights is None and inputs is None and state is None:
        return None
    return Quantization(weights, inputs, state, native=values.native)


def _how(values: flags.FlagValues) -> 'How':
    """How the run is made, besides the formats."""
    from attnlab.quantize.feedback import Feedback
    from attnlab.quantize.run import How
    from attnlab.quantize.softmax import Correction
    from attnlab.quantize.sparsity import Sparsity
    from attnlab.quantize.tuning import Alternation

    return How(
        feedback=None if values.feedback is None else Feedback(values.feedback, values.damping, values.ordered),
        tuning=None if values.tuned is None else Alternation(values.tuned),
        sparsity=None if values.sparse is None else Sparsity(values.sparse, values.rows),
        softmax=None if values.softmax is None else Correction(values.softmax, values.rows),
        ema=values.ema,
        other_data=values.other_data,
    )


def _check_each(values: flags.FlagValues, formats: 'Mapping[str, Quantization]') -> None:
    """Raises `UserError` for formats that are not calibrated or tuned as asked, before a run of any is made."""
    from attnlab.quantize.formats import Elementwise, Uniform

    kinds = {
        'feedback': (Elementwise, 'int4, affine4, minmax4, e2m1 or mxe2m1'),
        'tuned': (Uniform, 'int3, affine3 or minmax3'),
    }
    for name, (kind, such) in kinds.items():
        if values[name].value is None:
            continue
        if values.weights is None:
            raise UserError(f'--{name} is for weights of few bits; give --weights, such as {such}')
        for label, each in formats.items():
            if each.weights is None:
                raise UserError(f'--{name} is for weights of few bits; leave none out of --weights={values.weights}')
            if not isinstance(each.weights, kind):
                raise UserError(f'--{name} is for weights such as {such}; it does not go with {label}')


def _each(values: flags.FlagValues) -> int:
    """Makes a run of each of several formats."""
    for name in ('budget', 'softmax', 'sparse', 'native', 'rows'):
        if values[name].present:
            raise UserError(f'--{name} does not go with --each; quantize to one format at a time with it')
    from attnlab.quantize.each import CALLED, combinations

    formats = combinations({name: str(values[name].value) for name in CALLED if values[name].value is not None})
    _check_each(values, formats)
    workdir, out = directory(values, 'workdir'), directory(values, 'out')
    start_platform(values)
    from attnlab.compare.runs_table import compare_runs
    from attnlab.quantize.each import quantize_each

    with printing(values) as printer:
        made = quantize_each(
            workdir,
            out,
            formats,
            printer,
            _how(values),
            step=values.step,
        )
        as_it_was = [] if values.step is not None or values.ema else [workdir]
        if not as_it_was:
            printer.line(f'{workdir} is not compared: it reports its newest step, as it was trained')
        compare_runs([*as_it_was, *made], out / 'comparison', printer)
    return 0
