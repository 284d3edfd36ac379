"""`attnlab analyse`: layers and few bits; inside; the head; neighbours; traces; influence; between two runs."""

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


def main(argv: list[str]) -> int:
    """Runs the command."""
    values = flags.FlagValues()
    define_run(values)
    define_split(values)
    flags.DEFINE_integer('rows', 32, 'Rows to look at, of the length trained on.', lower_bound=1, flag_values=values)
    define_format(values)
    flags.DEFINE_list('bits', ['8', '6', '4'], 'Bits of weights and activations to try.', flag_values=values)
    flags.DEFINE_boolean(
        'inside',
        False,
        'Look inside instead: what layers read, remember and forget, and would already predict.',
        flag_values=values,
    )
    flags.DEFINE_boolean(
        'tuned', False, 'With --inside: also through affine maps fitted for every layer.', flag_values=values
    )
    flags.DEFINE_boolean('head', False, 'Look at the head and its hidden states instead.', flag_values=values)
    flags.DEFINE_list(
        'ranks', [], 'With --head: ranks to refit it with; powers of two if left out.', flag_values=values
    )
    flags.DEFINE_integer(
        'neighbours',
        None,
        'Interpolate with so many neighbours among hidden states of training instead.',
        lower_bound=1,
        flag_values=values,
    )
    flags.DEFINE_integer(
        'stored_rows', 256, 'With --neighbours: rows of training that are stored.', lower_bound=1, flag_values=values
    )
    flags.DEFINE_enum(
        'keys',
        None,
        ['head', 'stream', 'mlp', 'mlp_output', 'mixer'],
        'With --neighbours: what states are compared by.',
        flag_values=values,
    )
    flags.DEFINE_boolean(
        'trace',
        False,
        'Trace answers instead: what clean values bring back, by layer and token, and what is lost without each head.',
        flag_values=values,
    )
    flags.DEFINE_integer(
        'influence',
        None,
        'Ask which of so many rows of training the loss depends on instead.',
        lower_bound=1,
        flag_values=values,
    )
    flags.DEFINE_string('between', None, 'Measure the loss between the run and this one instead.', flag_values=values)
    flags.DEFINE_string(
        'merged', None, 'With --between: where to write a run that is the mean of both.', flag_values=values
    )
    define_ema(values)
    if not parsed(values, argv, 'analyse'):
        return 0
    workdir = directory(values, 'workdir')
    bits = tuple(whole(text, '--bits') for text in values.bits)
    ranks = tuple(whole(text, '--ranks') for text in values.ranks)
    if ranks and not values.head:
        raise UserError('--ranks is for --head, which is not given')
    if values['stored_rows'].present and not values.neighbours:
        raise UserError('--stored_rows is for --neighbours, which is not given')
    if values['keys'].value and not values.neighbours:
        raise UserError('--keys is for --neighbours, which is not given')
    if values.tuned and not values.inside:
        raise UserError('--tuned is for --inside, which is not given')
    if values.merged is not None and values.between is None:
        raise UserError('--merged is for --between, which is not given')
    names = ('inside', 'head', 'neighbours', 'trace', 'influence', 'between')
    given = [f'--{name}' for name in names if values[name].value]
    if values['bits'].present and given:
        raise UserError(f'--bits is for the analysis of layers; leave out {given[0]}')
    if len(given) > 1:
        raise UserError(f'{" and ".join(given[:2])} are two analyses; ask for one at a time')
    others = {name: directory(values, name) for name in ('between', 'merged') if values[name].value is not None}
    start_devices(values)
    asked = (values.step, values.split, values.rows)
    named = {'ema': values.ema, 'other_data': values.other_data}
    with printing(values) as printer:
        if values.neighbours:
            from attnlab.analysis.neighbours import analyse_neighbours

            keys = values['keys'].value or 'head'
            analyse_neighbours(workdir, printer, *asked, values.neighbours, values.stored_rows, keys=keys, **named)
        elif values.head:
            from attnlab.analysis.prediction import analyse_head

            analyse_head(workdir, printer, *asked, ranks, **named)
        elif values.inside:
            from attnlab.analysis.inside import analyse_inside

            analyse_inside(workdir, printer, *asked, tuned=values.tuned, **named)
        elif values.trace:
            from attnlab.analysis.tracing import analyse_trace

            analyse_trace(workdir, printer, *asked, **named)
        elif values.influence:
            from attnlab.analysis.influence import analyse_influence

            analyse_influence(workdir, printer, *asked, values.influence, **named)
        elif values.between:
            from attnlab.analysis.between import analyse_between

            analyse_between(workdir, others['between'], printer, *asked, merged=others.get('merged'), **named)
        else:
            from attnlab.analysis.examination import analyse_run

            analyse_run(workdir, printer, *asked, bits, **named)
    return 0
