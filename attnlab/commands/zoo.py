"""`attnlab zoo`: the mixers that configs can name."""

from absl import flags

from attnlab.commands.arguments import define_format, parsed, printing
from attnlab.errors import UserError


def main(argv: list[str]) -> int:
    """Runs the command."""
    names = [word for word in argv if not word.startswith('-')]
    values = flags.FlagValues()
    define_format(values)
    if not parsed(values, [word for word in argv if word.startswith('-')], 'zoo [NAME]'):
        return 0
    if len(names) > 1:
        raise UserError('usage: attnlab zoo [NAME] [--format=FORMAT]')
    from attnlab.zoo.table import print_recipe, print_zoo

    with printing(values) as printer:
        if names:
            print_recipe(printer, names[0])
        else:
            print_zoo(printer)
    return 0
