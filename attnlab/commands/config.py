"""`attnlab config`: every key of a config, with its value, its type and what it is."""

from absl import flags

from attnlab.commands.arguments import asks_for_help, define_format, help_text, printing


def main(argv: list[str]) -> int:
    """Runs the command."""
    values = flags.FlagValues()
    define_format(values)
    if asks_for_help(argv):
        print(
            help_text('usage: attnlab config --config=NAME[:ARG] [--config.KEY=VALUE ...] [--flag=value ...]', values)
        )
        return 0
    from attnlab.config_keys import documented, print_config
    from attnlab.configuration import read_config

    config = read_config(values, argv, 'config')
    own = {}
    if 'space' in config:
        from attnlab.sweep.sweep import Sweep

        own = documented(Sweep)
    with printing(values) as printer:
        print_config(config, printer, own)
    return 0
