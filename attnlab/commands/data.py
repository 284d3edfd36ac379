"""`attnlab data`: lists data sets; makes or converts one, once, and verifies it."""

import os
import pathlib

from absl import flags

from attnlab.commands.arguments import asks_for_help, define_format, help_text, parsed, printing
from attnlab.errors import UserError


def main(argv: list[str]) -> int:
    """Runs the command."""
    from attnlab.data.long_range.preparable import DATASETS
    from attnlab.data.long_range.prepared import FOLDER

    values = flags.FlagValues()
    flags.DEFINE_string('data_dir', FOLDER, 'Folder of downloads and prepared data sets.', flag_values=values)
    flags.DEFINE_integer(
        'workers', os.cpu_count() or 1, 'How many processes generate examples.', lower_bound=1, flag_values=values
    )
    define_format(values)
    usage = f'usage: attnlab data prepare NAME [--flag=value ...], NAME one of {", ".join(DATASETS)}; attnlab data list'
    if not argv or asks_for_help(argv):
        print(help_text(usage, values))
        return 0
    words = [word for word in argv if not word.startswith('-')]
    if words != ['list'] and (len(words) != 2 or words[0] != 'prepare'):
        raise UserError(usage)
    parsed(values, [word for word in argv if word.startswith('-')], f'data {words[0]}')
    folder = pathlib.Path(values.data_dir).expanduser()
    from attnlab.data.long_range.progress import prepare_with_progress, print_datasets

    with printing(values) as printer:
        if words == ['list']:
            print_datasets(folder, printer)
        else:
            prepare_with_progress(words[1], folder, values.workers, printer)
    return 0
