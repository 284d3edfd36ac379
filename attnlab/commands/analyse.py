"""`attnlab analyse`: layers and few bits, or one of several other looks at a run, each asked for by a flag."""

import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from absl import flags

from attnlab.commands.arguments import (
    check_belonging,
    define_ema,
    define_format,
    define_run,
    define_split,
    directory,
    lines,
    parsed,
    printing,
    start_platform,
    whole,
)
from attnlab.errors import UserError

if TYPE_CHECKING:
    from attnlab.analysis.asked import Prompts
    from attnlab.analysis.question import Question
    from attnlab.tables import Printer

ANALYSES = ('inside', 'head', 'neighbours', 'trace', 'knockout', 'propagate', 'massive', 'influence', 'between')
"""Flags that ask for something else than layers and few bits, one at a time."""

ONLY = {
    'ranks': ('head',),
    'stored_rows': ('neighbours',),
    'keys': ('neighbours',),
    'tuned': ('inside',),
    'merged': ('between',),
    **dict.fromkeys(('prompt', 'prompts', 'answer', 'answers'), ('trace', 'knockout', 'propagate')),
    **dict.fromkeys(('other', 'others', 'places'), ('trace',)),
    'against': ('propagate',),
    **dict.fromkeys(('sources', 'targets', 'layers'), ('knockout',)),
    'window': ('trace', 'knockout'),
}
"""Flags, and the analyses that they are for."""

OF_PROMPTS = {'other': ('prompt',), 'others': ('prompts',), 'answers': ('prompts',)}
"""Flags of one prompt or of a file of them, and the flag that gives it."""

NUMBERED = ('sources', 'targets', 'layers')
"""Flags that hold numbers from 0."""


def main(argv: list[str]) -> int:
    """Runs the command."""
    values = _flags()
    if not parsed(values, argv, 'analyse'):
        return 0
    workdir = directory(values, 'workdir')
    numbers = _numbers(values)
    _check(values)
    others = {name: directory(values, name) for name in ('between', 'merged') if values[name].value is not None}
    start_platform(values)
    own = _prompts(values)
    from attnlab.analysis.question import Question

    with printing(values) as printer:
        named = {'ema': values.ema, 'other_data': values.other_data, 'reads_data': own is None}
        question = Question.of(workdir, values.step, values.split, values.rows, **named)
        _analyse(values, question, printer, numbers, own, others)
    return 0


def _flags() -> flags.FlagValues:
    """The flags of the command."""
    values = flags.FlagValues()
    define_run(values)
    define_split(values)
    flags.DEFINE_integer(
        'rows', 32, 'How many rows to analyse, of the training length.', lower_bound=1, flag_values=values
    )
    define_format(values)
    flags.DEFINE_list(
        'bits',
        ['8', '6', '4'],
        'Bits to round weights and activations to; by default none for a run that is quantized already.',
        flag_values=values,
    )
    flags.DEFINE_boolean(
        'inside',
        False,
        'Look inside the layers instead: what each reads, remembers, forgets and would already predict.',
        flag_values=values,
    )
    flags.DEFINE_boolean(
        'tuned',
        False,
        'With --inside: also predict through an affine map fitted for each layer (tuned lens).',
        flag_values=values,
    )
    flags.DEFINE_boolean('head', False, 'Analyse the output head and its hidden states instead.', flag_values=values)
    flags.DEFINE_list('ranks', [], 'With --head: ranks to refit it at; powers of two by default.', flag_values=values)
    flags.DEFINE_integer(
        'neighbours',
        None,
        'Interpolate with this many nearest neighbours among hidden states of training data instead.',
        lower_bound=1,
        flag_values=values,
    )
    flags.DEFINE_integer(
        'stored_rows', 256, 'With --neighbours: how many training rows are stored.', lower_bound=1, flag_values=values
    )
    flags.DEFINE_enum(
        'keys',
        None,
        ['head', 'stream', 'mlp', 'mlp_output', 'mixer'],
        'With --neighbours: the activations that are compared.',
        flag_values=values,
    )
    flags.DEFINE_boolean(
        'trace',
        False,
        'Trace answers causally instead: what restoring clean activations recovers, by layer and token, and '
        'what is lost without each head.',
        flag_values=values,
    )
    flags.DEFINE_integer(
        'influence',
        None,
        'Find which of this many training rows the loss depends on instead.',
        lower_bound=1,
        flag_values=values,
    )
    flags.DEFINE_string(
        'between', None, 'Measure the loss on the path between the run and this other run instead.', flag_values=values
    )
    flags.DEFINE_string(
        'merged',
        None,
        'With --between: where to write a run whose parameters are the mean of both.',
        flag_values=values,
    )
    flags.DEFINE_enum(
        'knockout',
        None,
        ['inputs', 'scores', 'B', 'C', 'conv', 'state'],
        'Cut the paths from other tokens to answers instead: inputs of mixers, attention scores, or a part of '
        'selective state-space models.',
        flag_values=values,
    )
    flags.DEFINE_boolean(
        'propagate',
        False,
        'Show what each branch adds to the logit of answers, and the gradient of the logit there, instead.',
        flag_values=values,
    )
    flags.DEFINE_boolean(
        'massive',
        False,
        'Find the largest activations instead, and measure the loss with them set to zero or to their mean.',
        flag_values=values,
    )
    _define_prompts(values)
    flags.DEFINE_list(
        'places', [], 'With --trace: which activations to restore, such as residual or mixer.input.', flag_values=values
    )
    flags.DEFINE_list(
        'sources',
        [],
        'With --knockout: positions that are cut off, from 0, all together; each in turn by default.',
        flag_values=values,
    )
    flags.DEFINE_list(
        'targets',
        [],
        'With --knockout: positions that may not read them; by default the last of the prompt.',
        flag_values=values,
    )
    flags.DEFINE_list(
        'layers', [], 'With --knockout: layers, from 0; by default all that have the part.', flag_values=values
    )
    flags.DEFINE_integer(
        'window',
        1,
        'With --trace or --knockout: how many consecutive layers are taken at once.',
        lower_bound=1,
        flag_values=values,
    )
    define_ema(values)
    return values


def _numbers(values: flags.FlagValues) -> dict[str, tuple[int, ...]]:
    """The flags that are lists of whole numbers, by name. Raises `UserError` for what is no such number."""
    least = {'bits': 1, 'ranks': 1, **dict.fromkeys(NUMBERED, 0)}
    return {
        name: tuple(whole(text, f'--{name}', smallest) for text in values[name].value or ())
        for name, smallest in least.items()
    }


def _analyse(
    values: flags.FlagValues,
    question: 'Question',
    printer: 'Printer',
    numbers: Mapping[str, tuple[int, ...]],
    own: 'Prompts | None',
    others: Mapping[str, pathlib.Path],
) -> None:
    """The analysis that is asked for, with the numbers, prompts and folders that flags give."""
    if values.neighbours:
        from attnlab.analysis.neighbours import analyse_neighbours

        keys = values['keys'].value or 'head'
        analyse_neighbours(question, printer, values.neighbours, values.stored_rows, keys=keys)
    elif values.head:
        from attnlab.analysis.prediction import analyse_head

        analyse_head(question, printer, numbers['ranks'])
    elif values.inside:
        from attnlab.analysis.inside import analyse_inside

        analyse_inside(question, printer, tuned=values.tuned)
    elif values.trace:
        from attnlab.analysis.tracing import analyse_trace

        analyse_trace(question, printer, own=own, kinds=tuple(values.places), window=values.window)
    elif values.knockout:
        from attnlab.analysis.knockout import Wanted, analyse_knockout

        wanted = Wanted(values.knockout, **{name: numbers[name] for name in NUMBERED}, window=values.window)
        analyse_knockout(question, printer, wanted, own=own)
    elif values.propagate:
        from attnlab.analysis.propagation import analyse_propagation

        analyse_propagation(question, printer, own=own)
    elif values.massive:
        from attnlab.analysis.massive import analyse_massive

        analyse_massive(question, printer)
    elif values.influence:
        from attnlab.analysis.influence import analyse_influence

        analyse_influence(question, printer, values.influence)
    elif values.between:
        from attnlab.analysis.between import analyse_between

        analyse_between(question, others['between'], printer, merged=others.get('merged'))
    else:
        from attnlab.analysis.examination import analyse_run

        analyse_run(question, printer, numbers['bits'], asked=bool(values['bits'].present))


def _define_prompts(values: flags.FlagValues) -> None:
    """Defines the flags of prompts of a user's own."""
    flags.DEFINE_string(
        'prompt',
        None,
        'With --trace, --knockout or --propagate: a prompt in place of rows; for a run without text, token '
        'numbers separated by spaces.',
        flag_values=values,
    )
    flags.DEFINE_string('prompts', None, 'Like --prompt: a file of prompts, one per line.', flag_values=values)
    flags.DEFINE_string(
        'answer',
        None,
        'With --prompt or --prompts: the answer expected, of which the first token counts; the most likely '
        'one by default.',
        flag_values=values,
    )
    flags.DEFINE_string(
        'answers', None, 'With --prompts: a file with the answer of each, one per line.', flag_values=values
    )
    flags.DEFINE_string(
        'against',
        None,
        'With --propagate and prompts: a wrong answer, whose logit is subtracted.',
        flag_values=values,
    )
    flags.DEFINE_string(
        'other',
        None,
        'With --trace and --prompt: a prompt of the same length, into which activations of the first are patched.',
        flag_values=values,
    )
    flags.DEFINE_string(
        'others', None, 'With --trace and --prompts: a file of as many such prompts.', flag_values=values
    )


def _check(values: flags.FlagValues) -> None:
    """Raises `UserError` for flags that do not go together."""
    given = [name for name in ANALYSES if values[name].value]
    check_belonging(values, {name: of for name, of in ONLY.items() if values[name].value is not False}, given)
    if values['bits'].present and given:
        raise UserError(f'--bits is for the analysis of layers; leave out --{given[0]}')
    if len(given) > 1:
        raise UserError(f'--{given[0]} and --{given[1]} are two analyses; ask for one at a time')
    pairs = (('prompt', 'prompts'), ('other', 'others'), ('answer', 'answers'))
    for one, several in pairs:
        if values[one].present and values[several].present:
            raise UserError(f'--{one} is one text and --{several} a file of them; give one of the two')
    asked = values['prompt'].present or values['prompts'].present
    for name in ('other', 'others', 'answer', 'answers', 'against'):
        if values[name].present and not asked:
            raise UserError(f'--{name} is for prompts of your own; give --prompt, or --prompts')
    check_belonging(values, OF_PROMPTS)
    if asked and (values['rows'].present or values['split'].present):
        name = 'rows' if values['rows'].present else 'split'
        raise UserError(f'--{name} is of the data; leave it out with prompts of your own')


def _prompts(values: flags.FlagValues) -> 'Prompts | None':
    """The prompts that are given, one or a file of them."""
    from attnlab.analysis.asked import Prompts

    def texts(one: str, several: str) -> tuple[str, ...]:
        if values[several].value is not None:
            return lines(values, several)
        return () if values[one].value is None else (str(values[one].value),)

    prompts = texts('prompt', 'prompts')
    if not prompts:
        return None
    answers, against = texts('answer', 'answers'), values['against'].value
    return Prompts(
        prompts,
        answers=answers * len(prompts) if values['answer'].present else answers,
        others=texts('other', 'others'),
        against=() if against is None else (against,) * len(prompts),
    )
