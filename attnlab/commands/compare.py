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
    folders = [pathlib.Path(word) for word in argv if not word.startswith('-')]
    for folder in folders:
        if not any((folder / name).exists() for name in ('config.json', 'sweep.json')):
            raise UserError(f'{folder} is neither a run nor a study: it holds no config.json and no sweep.json')
    options = [word for word in argv if word.startswith('-')]
    runs, studies = flags.FlagValues(), flags.FlagValues()
    flags.DEFINE_string('metric', None, 'The score; accuracy, bits per byte or loss by default.', flag_values=runs)
    define_strictness(runs)
    flags.DEFINE_string('out', 'comparison', 'Where the table and the figure are written.', flag_values=runs)
    define_studies(studies)
    if asks_for_help(options):
        print(help_text(USAGE.format('RUN'), runs), help_text(USAGE.format('STUDY'), studies), sep='\n\n')
        return 0
    if folders and not any((folder / 'config.json').exists() for folder in folders):
        return _compare_studies(studies, folders, options)
    return _compare_runs(runs, folders, options)


def _compare_runs(values: flags.FlagValues, folders: list[pathlib.Path], options: list[str]) -> int:
    parsed(values, options, 'compare RUN...')
    if not folders:
        raise UserError(f'{USAGE.format("RUN")}, or STUDY... in the place of RUN...')
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
