"""`attnlab analyse`: sinks, sparsity and outliers by layer, the loss with few bits; inside; the head; neighbours."""

from absl import flags

from attnlab.commands.arguments import (
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
        'keys', None, ['head', 'mlp'], 'With --neighbours: what states are compared by.', flag_values=values
    )
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
    given = [f'--{name}' for name in ('inside', 'head', 'neighbours') if values[name].value]
    if values['bits'].present and given:
        raise UserError(f'--bits is for the analysis of layers; leave out {given[0]}')
    if len(given) > 1:
        raise UserError(f'{" and ".join(given[:2])} are two analyses; ask for one at a time')
    start_devices(values)
    if values.neighbours:
        from attnlab.analysis.neighbours import analyse_neighbours

        with printing(values) as printer:
            analyse_neighbours(
                workdir,
                printer,
                values.step,
                values.split,
                values.rows,
                values.neighbours,
                values.stored_rows,
                keys=values['keys'].value or 'head',
                other_data=values.other_data,
            )
        return 0
    if values.head:
        from attnlab.analysis.prediction import analyse_head

        with printing(values) as printer:
            analyse_head(workdir, printer, values.step, values.split, values.rows, ranks, other_data=values.other_data)
        return 0
    if values.inside:
        from attnlab.analysis.inside import analyse_inside

        with printing(values) as printer:
            analyse_inside(
                workdir,
                printer,
                values.step,
                values.split,
                values.rows,
                tuned=values.tuned,
                other_data=values.other_data,
            )
        return 0
    from attnlab.analysis.examination import analyse_run

    with printing(values) as printer:
        analyse_run(workdir, printer, values.step, values.split, values.rows, bits, other_data=values.other_data)
    return 0
