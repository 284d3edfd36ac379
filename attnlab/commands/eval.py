"""`attnlab eval`: every metric of a trained run, at and beyond the length it was trained on."""

import pathlib
from typing import TYPE_CHECKING

from absl import flags

from attnlab.commands.arguments import (
    define_ema,
    define_format,
    define_run,
    define_split,
    directory,
    parsed,
    printing,
    start_devices,
    whole,
)
from attnlab.errors import UserError

if TYPE_CHECKING:
    from attnlab.runs.loading import Loaded
    from attnlab.tables import Printer
    from attnlab.tasks.task import Task


def main(argv: list[str]) -> int:
    """Runs the command."""
    values = _flags()
    if not parsed(values, argv, 'eval'):
        return 0
    workdir, multiples = directory(values, 'workdir'), _multiples(values)
    judging = None if values.judge is None else _judging(values)
    if values.reuse is not None and judging is None:
        raise UserError('--reuse is for a run that draws images, which --judge=RUN has another run classify')
    factors = tuple(whole(text, '--factors') for text in values.factors or ())
    if factors:
        _check_alone(values, ('multiples', 'tokens', 'stride', 'attention', 'judge'), '--factors')
    start_devices(values)
    from attnlab.runs.loading import load_run

    loaded = load_run(workdir, values.step, ema=values.ema)
    with printing(values, several=True) as printer:
        if judging is not None:
            _judge(values, loaded, judging, workdir, printer)
        elif factors:
            _reduce(values, loaded, factors, workdir, printer)
        else:
            _evaluate(values, loaded, multiples, workdir, printer)
    return 0


def _flags() -> flags.FlagValues:
    """The flags of the command."""
    values = flags.FlagValues()
    define_run(values, several=True)
    define_ema(values)
    define_split(values)
    define_format(values)
    flags.DEFINE_list(
        'multiples',
        ['1', '2', '4', '8'],
        'Lengths to evaluate at, as multiples of the training length.',
        flag_values=values,
    )
    flags.DEFINE_integer(
        'tokens',
        None,
        'How many tokens of text to evaluate, spread over its documents; all by default.',
        lower_bound=1,
        flag_values=values,
    )
    flags.DEFINE_integer(
        'stride',
        None,
        'Tokens from the start of one window of text to the start of the next; below the length, windows '
        'overlap, and each token counts only once.',
        lower_bound=1,
        flag_values=values,
    )
    flags.DEFINE_integer(
        'examples',
        None,
        'For tasks without text: how many examples of each slice to evaluate.',
        lower_bound=1,
        flag_values=values,
    )
    flags.DEFINE_string(
        'attention',
        None,
        'What replaces the softmax: adaptive_temperature, ssmax, quantized_8, quantized_8_corrected.',
        flag_values=values,
    )
    flags.DEFINE_string(
        'judge',
        None,
        'A run that classifies images, which judges the images that this run generates, as many as --examples.',
        flag_values=values,
    )
    flags.DEFINE_float(
        'reuse',
        None,
        'With --judge: the fraction of keys that attention reads in most sampling steps, completed by what it '
        'keeps from the full steps (Re-ttention).',
        flag_values=values,
    )
    flags.DEFINE_list(
        'factors',
        None,
        'Evaluate a model with embedding-free attention at its reduction ratios times each of these factors.',
        flag_values=values,
    )
    return values


def _multiples(values: flags.FlagValues) -> tuple[int, ...]:
    """The lengths, in training lengths. Raises `UserError` for none, or one twice."""
    multiples = tuple(whole(text, '--multiples') for text in values.multiples)
    if not multiples or len(set(multiples)) != len(multiples):
        raise UserError(
            f'--multiples is {",".join(values.multiples)!r}; it must hold whole numbers of at least 1, each once'
        )
    return multiples


def _judging(values: flags.FlagValues) -> pathlib.Path:
    """The run that judges. Raises `UserError` for flags of evaluations that draw nothing."""
    given = [f'--{name}' for name in ('multiples', 'tokens', 'stride', 'attention') if values[name].present]
    if given:
        raise UserError(f'{given[0]} is for what a task asks; with --judge a run draws images, --examples of them')
    return directory(values, 'judge')


def _check_alone(values: flags.FlagValues, others: tuple[str, ...], flag: str) -> None:
    """Raises `UserError` for flags that do not go with this one."""
    given = [f'--{name}' for name in others if values[name].present]
    if given:
        raise UserError(f'{given[0]} does not go with {flag}; leave one of them out')


def _judge(
    values: flags.FlagValues, loaded: 'Loaded', judging: pathlib.Path, workdir: pathlib.Path, printer: 'Printer'
) -> None:
    """Has another run judge the images that a run draws."""
    from attnlab.analysis.judged import judge
    from attnlab.mixers.softmax.reused import Reuse

    reuse = None if values.reuse is None else Reuse(share=values.reuse)
    asked = {'split': values.split, 'count': values.examples, 'other_data': values.other_data}
    judge(loaded, judging, workdir, printer, reuse=reuse, **asked)


def _reduce(
    values: flags.FlagValues, loaded: 'Loaded', factors: tuple[int, ...], workdir: pathlib.Path, printer: 'Printer'
) -> None:
    """Evaluates a model at other ratios of reduction."""
    from attnlab.analysis.reductions import reduce
    from attnlab.evals.request import Request

    asked = Request(values.split, (1,), examples=values.examples)
    reduce(loaded, factors, asked, workdir, printer, other_data=values.other_data)


def _evaluate(
    values: flags.FlagValues, loaded: 'Loaded', multiples: tuple[int, ...], workdir: pathlib.Path, printer: 'Printer'
) -> None:
    """Evaluates what the task of a run asks for."""
    from attnlab.convert.substitution import substituted
    from attnlab.evals.request import Request
    from attnlab.runs.evaluation import evaluate_run
    from attnlab.train.run import check_data

    task, name = loaded.setup.task, loaded.name
    check_data(workdir, task.describe(), other=values.other_data)
    if values['multiples'].present:
        check_lengths(task, values.split or task.evaluated_split, loaded.setup.length, multiples)
    if values.attention is not None:
        loaded, name = substituted(loaded, values.attention), f'{name}-{values.attention}'
    request = Request(values.split, multiples, values.tokens, values.examples, values.stride)
    evaluate_run(loaded, request, workdir, printer, name, other_data=values.other_data)


def check_lengths(task: 'Task', split: str, length: int, multiples: tuple[int, ...]) -> None:
    """Raises `UserError` for lengths that a task does not have, and for a text shorter than a window."""
    from attnlab.tasks.task import Sliced, Textual

    if isinstance(task, Textual):
        # A window that is all padding but for a short text takes for ever.
        task.source(split, length * max(multiples))
    elif isinstance(task, Sliced):
        slices = task.slices(split, length, multiples, 1)
        others = [each for each in multiples if each != 1 and f'{each}x' not in slices]
        if others:
            raise UserError(
                f'--multiples holds {others[0]}; {type(task).__name__} has examples of the training length alone: '
                'leave --multiples out'
            )
