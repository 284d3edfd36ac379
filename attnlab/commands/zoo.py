"""`attnlab zoo`: the mixers that configs can name."""

from absl import flags

from attnlab.commands.arguments import parsed
from attnlab.errors import UserError


def main(argv: list[str]) -> int:
    """Runs the command."""
    names = [word for word in argv if not word.startswith('-')]
    values = flags.FlagValues()
    flags.DEFINE_bool('markdown', False, 'Print the table as Markdown.', flag_values=values)
    if not parsed(values, [word for word in argv if word.startswith('-')], 'zoo [NAME]'):
        return 0
    if len(names) > 1 or (names and values.markdown):
        raise UserError('usage: attnlab zoo [NAME], or attnlab zoo --markdown')
    from rich.console import Console

    from attnlab.zoo.table import print_recipe, print_zoo

    if names:
        print_recipe(Console(soft_wrap=True), names[0])
        return 0
    print_zoo(Console(), markdown=values.markdown)
    return 0
