"""`attnlab zoo`: the mixers, and the heads, that configs can name."""

from absl import flags

from attnlab.commands.arguments import define_format, parsed, printing
from attnlab.errors import UserError


def main(argv: list[str]) -> int:
    """Runs the command."""
    names = [word for word in argv if not word.startswith('-')]
    values = flags.FlagValues()
    flags.DEFINE_boolean(
        'heads', False, 'List the heads, head= of a config, in place of the mixers.', flag_values=values
    )
    define_format(values)
    if not parsed(values, [word for word in argv if word.startswith('-')], 'zoo [NAME]'):
        return 0
    if len(names) > 1:
        raise UserError('usage: attnlab zoo [NAME] [--heads] [--format=FORMAT]')
    if values.heads:
        from attnlab.models.heads.table import print_head, print_heads

        show_one, show_all = print_head, print_heads
    else:
        from attnlab.zoo.table import print_recipe, print_zoo

        show_one, show_all = print_recipe, print_zoo
    with printing(values) as printer:
        if names:
            show_one(printer, names[0])
        else:
            show_all(printer)
    return 0
