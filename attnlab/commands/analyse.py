"""`attnlab analyse`: sinks, sparsity and outliers by layer, the loss with few bits; the head; neighbours."""

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
    if not parsed(values, argv, 'analyse'):
        return 0
    workdir = directory(values, 'workdir')
    bits = tuple(whole(text, '--bits') for text in values.bits)
    ranks = tuple(whole(text, '--ranks') for text in values.ranks)
    if ranks and not values.head:
        raise UserError('--ranks is for --head, which is not given')
    if values['stored_rows'].present and not values.neighbours:
        raise UserError('--stored_rows is for --neighbours, which is not given')
    if values['bits'].present and (values.head or values.neighbours):
        raise UserError('--bits is for the analysis of layers; leave out --head and --neighbours')
    if values.head and values.neighbours:
        raise UserError('--head and --neighbours are two analyses; ask for one at a time')
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
                other_data=values.other_data,
            )
        return 0
    if values.head:
        from attnlab.analysis.prediction import analyse_head

        with printing(values) as printer:
            analyse_head(workdir, printer, values.step, values.split, values.rows, ranks, other_data=values.other_data)
        return 0
    from attnlab.analysis.examination import analyse_run

    with printing(values) as printer:
        analyse_run(workdir, printer, values.step, values.split, values.rows, bits, other_data=values.other_data)
    return 0
