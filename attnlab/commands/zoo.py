"""`attnlab zoo`: the mixers that configs can name."""

from absl import flags

from attnlab.commands.arguments import parsed


def main(argv: list[str]) -> int:
    """Runs the command."""
    values = flags.FlagValues()
    flags.DEFINE_bool('markdown', False, 'Print the table as Markdown.', flag_values=values)
    if not parsed(values, argv, 'zoo'):
        return 0
    from rich.console import Console

    from attnlab.zoo.table import print_zoo

    print_zoo(Console(), markdown=values.markdown)
    return 0
