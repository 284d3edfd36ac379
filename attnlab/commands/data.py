"""`attnlab data`: makes or converts a data set, once, and verifies it."""

import os
import pathlib

from absl import flags

from attnlab.commands.arguments import help_text, parsed
from attnlab.errors import UserError


def main(argv: list[str]) -> int:
    """Runs the command."""
    from attnlab.data.long_range.prepared import DATASETS, FOLDER

    values = flags.FlagValues()
    flags.DEFINE_string('data_dir', FOLDER, 'Folder of downloads and prepared data sets.', flag_values=values)
    flags.DEFINE_integer(
        'workers', os.cpu_count() or 1, 'Processes that draw examples.', lower_bound=1, flag_values=values
    )
    usage = f'usage: attnlab data prepare NAME [--flag=value ...], NAME one of {", ".join(DATASETS)}'
    if not argv or argv[0] in ('--help', '-h'):
        print(help_text(usage, values))
        return 0
    words = [word for word in argv if not word.startswith('-')]
    if len(words) != 2 or words[0] != 'prepare':
        raise UserError(usage)
    if not parsed(values, [word for word in argv if word.startswith('-')], 'data prepare NAME'):
        return 0
    from rich.console import Console

    from attnlab.data.long_range.progress import prepare_with_progress

    prepare_with_progress(
        words[1], pathlib.Path(values.data_dir).expanduser(), values.workers, Console(highlight=False)
    )
    return 0
