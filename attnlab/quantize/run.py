"""A quantized run: made of a trained one in a folder of its own, evaluated as that was, and from then on a run."""

import dataclasses
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
from ml_collections import ConfigDict

from attnlab.config import build, spec, spec_of
from attnlab.errors import UserError
from attnlab.module import modules_of
from attnlab.quantize.allocation import Allocation, Share
from attnlab.quantize.calibration import Calibration
from attnlab.quantize.feedback import Feedback, calibrated
from attnlab.quantize.formats import Format
from attnlab.quantize.layers import Quantization, QuantizedLinear
from attnlab.quantize.shifts import ShiftCalibration
from attnlab.quantize.softmax import Correction
from attnlab.quantize.sparsity import Sparsity
from attnlab.quantize.training import Rounded
from attnlab.quantize.tuning import Alternation, tuned
from attnlab.runs.loading import Loaded, load_checked
from attnlab.runs.made import check_new, reported, score_table, write_made
from attnlab.tables import Column, Printer, Table, digits, shown
from attnlab.train import run
from attnlab.train.cost import state_bytes, weight_bytes
from attnlab.train.partition import Axes
from attnlab.train.run import QUANTIZATION
from attnlab.train.setup import ROUNDING, Setup


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What a model weighs.

    Attributes:
      numbers: parameters and buffers before.
      quantized: how many of them have few bits.
      bits: of each of these on average, scales included; of 32 where none has few bits.
      before: bytes of parameters and buffers before.
      after: the same after.
    """

    numbers: int
    quantized: int
    bits: float
    before: int
    after: int


Wanted = Quantization | Allocation | Calibration | ShiftCalibration
"""What is quantized to which formats, or how that is found."""


@dataclasses.dataclass(frozen=True)
class How:
    """How a run is quantized, besides the formats.

    Attributes:
      feedback: calibrates the rounding of weights on rows of training.
      tuning: tunes codes and scales on such rows.
      sparsity: small activations are zero, by thresholds found on such rows.
      softmax: the weights of softmaxes are rounded, and their mean error on such rows is added back.
      ema: the average of the parameters is what is quantized.
      other_data: data that have changed are taken.
    """

    feedback: Feedback | None = None
    tuning: Alternation | None = None
    sparsity: Sparsity | None = None
    softmax: Correction | None = None
    ema: bool = False
    other_data: bool = False

    def record(self) -> dict[str, Any]:
        """What `run.json` has of it among the facts of a quantization."""
        found = {name: getattr(self, name) for name in ('feedback', 'sparsity', 'softmax', 'tuning')}
        return {'ema': self.ema, **{name: each and dataclasses.asdict(each) for name, each in found.items()}}


def quantize_run(
    workdir: pathlib.Path,
    out: pathlib.Path,
    quantization: Wanted | None,
    printer: Printer,
    how: How,
    *,
    step: int | None = None,
) -> dict[str, float]:
    """Quantizes a checkpoint into the folder `out`, evaluates it as the run was in training, and prints both.

    Of an `Allocation` it is found on rows of training which maps have which format, of a `Calibration` the ranges of
    what they read, and of a `ShiftCalibration` its exponents.

    A run that was trained with few bits (`config.rounding`) is packed as it computes; `quantization` is then `None`.

    What is written is a run: config, checkpoint, facts, metrics. It is not trained further, and has no optimiser state
    and no average of parameters.
    Raises `UserError` for feedback without one format of weights, for a quantization of a run that was trained with one
    and none of another, a run that is quantized, one without linear maps,
    changed data unless they are to be taken, and a folder that holds something else.
    """
    config = run.saved_config(workdir)
    if QUANTIZATION in config:
        raise UserError(f'{workdir} is quantized already; give --workdir the run that it was made from')
    given = not (quantization is None and how.sparsity is None and how.softmax is None)
    rounded = _trained_rounding(workdir, config, given=given)
    check_new(workdir, out, '--out')
    loaded = load_checked(workdir, step, ema=how.ema, other_data=how.other_data)
    before = loaded.setup
    planned, loaded, shares = _planned(loaded, quantization, how)
    if rounded is not None:
        planned = rounded.quantization
    assert planned is not None
    changed = _carried_out(loaded, planned, rounded, how, printer)
    with config.unlocked():
        config[QUANTIZATION], config.mesh = spec_of(planned), spec(Axes)
        if ROUNDING in config:
            del config[ROUNDING]
    length, found = changed.setup.length, sizes(before, changed)
    facts = {
        'weight_bytes': found.after,
        'state_bytes_per_sequence': {str(each): state_bytes(changed.setup, each) for each in (length, 8 * length)},
        'quantized': {
            'from': str(workdir),
            'step': loaded.step,
            **how.record(),
            'rows': None if quantization is None or isinstance(quantization, Quantization) else quantization.rows,
            'allocation': [_recorded(share) for share in shares],
            **dataclasses.asdict(found),
        },
        'other_data': how.other_data,
    }
    numbers = write_made(workdir, loaded, changed, out, facts, config)
    states = (state_bytes(each, length) for each in (before, changed.setup))
    if shares:
        printer.table(_share_table(shares))
    printer.table(_size_table(found, *states))
    printer.table(score_table(numbers, reported(workdir, loaded.step, how.ema)))
    printer.line(f'written: {out}, a run that eval, generate, analyse and compare take')
    return numbers


def _planned(
    loaded: Loaded, quantization: Wanted | None, how: How
) -> tuple[Quantization | None, Loaded, Sequence[Share]]:
    """What is to be quantized, where it is found on rows too, the run that it is of, and what formats were chosen."""
    shares: Sequence[Share] = []
    if isinstance(quantization, Allocation):
        quantization, shares = quantization.found(loaded)
    elif isinstance(quantization, Calibration | ShiftCalibration):
        quantization, loaded = quantization.found(loaded)
    more: dict[str, Any] = {} if how.sparsity is None else {'thresholds': how.sparsity.found(loaded)}
    more |= {} if how.softmax is None else {'softmax': how.softmax.bits}
    if more:
        quantization = Quantization(**more) if quantization is None else dataclasses.replace(quantization, **more)
    return quantization, loaded, shares


def _carried_out(
    loaded: Loaded, quantization: Quantization, rounded: Rounded | None, how: How, printer: Printer
) -> Loaded:
    """The run with few bits, which are calibrated and tuned. Raises `UserError` for feedback without one format."""
    changed = loaded.altered(quantization if rounded is None else rounded.packed)
    if how.feedback is not None:
        if not isinstance(quantization.weights, Format):
            raise UserError('--feedback calibrates the rounding of weights; give one format, such as --weights=int4@32')
        changed = calibrated(loaded.altered(quantization.opened), changed, quantization.weights, how.feedback)
    if how.softmax is not None:
        changed = how.softmax.found(loaded.altered(quantization.opened), changed)
    if how.tuning is not None:
        changed, losses = tuned(changed, how.tuning)
        printer.line(f'tuned: the loss on the first of its rows was {losses[0]:.4f} and is {losses[-1]:.4f}')
    return changed


def _trained_rounding(workdir: pathlib.Path, config: ConfigDict, *, given: bool) -> Rounded | None:
    """What a run was trained with, which is packed if nothing else is `given`; `None` of a run of full precision."""
    if ROUNDING not in config:
        if not given:
            raise UserError(
                'nothing is quantized: give --weights, --inputs, --state or --softmax, such as --weights=int4@32'
            )
        return None
    rounded = build(config[ROUNDING], f'config.{ROUNDING}')
    if not isinstance(rounded, Rounded):
        raise UserError(f'{workdir} was trained with {type(rounded).__name__}, which is not stored; take another run')
    if given:
        raise UserError(
            f'{workdir} was trained with few bits and is packed as it is; leave out --weights, --inputs, --state, '
            '--softmax and --sparse'
        )
    return rounded


def sizes(setup: Setup, changed: Loaded) -> Sizes:
    """What the model of a run weighs before and after."""
    layers = modules_of(changed.model(), QuantizedLinear)
    stored = [(layer, [variable[...] for variable in layer.stored.values()]) for layer in layers if layer.format]
    count = sum(layer.numbers() * _repeats(arrays[0]) for layer, arrays in stored)
    size = sum(array.size * array.dtype.itemsize for _, arrays in stored for array in arrays)
    return Sizes(
        numbers=sum(leaf.size for leaf in _leaves(setup)),
        quantized=count,
        bits=8 * size / count if count else 32.0,
        before=weight_bytes(setup),
        after=weight_bytes(changed.setup),
    )


def _leaves(setup: Setup) -> list[Any]:
    return jax.tree.leaves(setup.abstract.variables)


def _repeats(codes: Any) -> int:
    """How many layers the codes of a map are stacked over; those of one are a matrix."""
    return math.prod(codes.shape[:-2])


def _recorded(share: Share) -> dict[str, Any]:
    """What `run.json` has of a share; its format stands in the config."""
    return {name: getattr(share, name) for name in ('name', 'slope', 'error', 'bits', 'numbers')}


def _share_table(shares: Sequence[Share]) -> Table:
    columns = (
        Column('map'),
        Column('slope', right=True),
        Column('error', right=True),
        Column('rise', right=True),
        Column('bits a number', digits('.3f'), right=True),
    )
    rows = [(each.name, each.slope, each.error, each.slope * each.error, each.bits / each.numbers) for each in shares]
    rise = sum(each.slope * each.error for each in shares)
    return Table('allocation', columns, rows, f'the loss on the rows measured is to rise by {rise:.4g} nats')


def _size_table(found: Sizes, state_before: int, state_after: int) -> Table:
    columns = Column('what'), Column('before', shown, right=True), Column('after', shown, right=True)
    rows = [
        ('bytes of weights', found.before, found.after),
        ('bytes of the state of a sequence', state_before, state_after),
        ('bits a number', 8 * found.before / found.numbers, 8 * found.after / found.numbers),
        ('bits a number of linear maps', 32.0, found.bits),
        ('numbers of linear maps', found.quantized, found.quantized),
    ]
    return Table('sizes', columns, rows, f'{found.quantized:,} of {found.numbers:,} numbers have few bits')
