"""`attnlab analyse`: sinks, sparsity and outliers by layer; the loss with few bits."""

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


def main(argv: list[str]) -> int:
    """Runs the command."""
    values = flags.FlagValues()
    define_run(values)
    define_split(values)
    flags.DEFINE_integer('rows', 32, 'Rows to look at, of the length trained on.', lower_bound=1, flag_values=values)
    define_format(values)
    flags.DEFINE_list('bits', ['8', '6', '4'], 'Bits of weights and activations to try.', flag_values=values)
    if not parsed(values, argv, 'analyse'):
        return 0
    workdir = directory(values, 'workdir')
    bits = tuple(whole(text, '--bits') for text in values.bits)
    start_devices(values)
    from attnlab.analysis.examination import analyse_run

    with printing(values) as printer:
        analyse_run(workdir, printer, values.step, values.split, values.rows, bits, other_data=values.other_data)
    return 0
