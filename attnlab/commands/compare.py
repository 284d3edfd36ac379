"""`attnlab compare`: scores beside costs, of runs or of studies."""

import pathlib
from typing import Any

from absl import flags

from attnlab.commands.arguments import (
    asks_for_help,
    define_strictness,
    define_studies,
    directory,
    help_text,
    parsed,
    printing,
    start_platform,
)
from attnlab.errors import UserError

USAGE = 'usage: attnlab compare {}... [--flag=value ...]'


def main(argv: list[str]) -> int:
    """Runs the command."""
    folders, options = folders_given(argv)
    runs, studies = flags_of_runs('comparison'), flags.FlagValues()
    define_studies(studies)
    if asks_for_help(options):
        print(help_text(USAGE.format('RUN'), runs), help_text(USAGE.format('STUDY'), studies), sep='\n\n')
        return 0
    if not folders:
        raise UserError(f'{USAGE.format("RUN")}, or STUDY... in the place of RUN...')
    return (
        compare_folders(runs, folders, options) if hold_runs(folders) else _compare_studies(studies, folders, options)
    )


def folders_given(argv: list[str]) -> tuple[list[pathlib.Path], list[str]]:
    """The runs or studies that are named, and the flags. Raises `UserError` for a folder that is neither."""
    folders = [pathlib.Path(word) for word in argv if not word.startswith('-')]
    for folder in folders:
        if not any((folder / name).exists() for name in ('config.json', 'sweep.json')):
            raise UserError(f'{folder} is neither a run nor a study: it holds no config.json and no sweep.json')
    return folders, [word for word in argv if word.startswith('-')]


def hold_runs(folders: list[pathlib.Path]) -> bool:
    """Whether there are runs among the folders."""
    return any((folder / 'config.json').exists() for folder in folders)


def flags_of_runs(out: str) -> flags.FlagValues:
    """The flags for runs, written into the folder `out` by default."""
    values = flags.FlagValues()
    flags.DEFINE_string(
        'metric',
        None,
        'The score; by default accuracy, bits per byte or loss, the first that all runs of a task have.',
        flag_values=values,
    )
    define_strictness(values)
    flags.DEFINE_string('out', out, 'Where the page, the table and the figure are written.', flag_values=values)
    return values


def compare_folders(values: flags.FlagValues, folders: list[pathlib.Path], options: list[str]) -> int:
    """Parses the flags, and compares runs by them."""
    parsed(values, options, 'compare RUN...')
    out = directory(values, 'out')
    from attnlab.compare.runs_table import compare_runs

    chosen: dict[str, Any] = {name: values[name].value for name in ('metric', 'tolerance', 'strict')}
    with printing(values) as printer:
        compare_runs(folders, out, printer, **chosen)
    return 0


def _compare_studies(values: flags.FlagValues, folders: list[pathlib.Path], options: list[str]) -> int:
    parsed(values, options, 'compare STUDY...')
    start_platform(values)
    from attnlab.compare.report.comparison import compare, print_comparison

    found = compare(folders, values.by, values.tolerance, values.storage)
    with printing(values) as printer:
        print_comparison(found, printer, strict=values.strict)
    return 0
