"""`attnlab report`: studies or runs compared on one HTML page with figures, and as CSV."""

from typing import Any

from absl import flags

from attnlab.commands.arguments import (
    asks_for_help,
    define_studies,
    directory,
    help_text,
    parsed,
    printing,
    start_platform,
)
from attnlab.commands.compare import compare_folders, flags_of_runs, folders_given, hold_runs
from attnlab.errors import UserError

USAGE = 'usage: attnlab report {}... [--flag=value ...]'


def main(argv: list[str]) -> int:
    """Runs the command."""
    folders, options = folders_given(argv)
    runs, values = flags_of_runs('report'), flags.FlagValues()
    flags.DEFINE_string('out', 'report', 'Where the page is written.', flag_values=values)
    flags.DEFINE_bool(
        'measure',
        None,
        'Measure decoding time and memory on this device; --nomeasure never does. By default each study is '
        'measured once.',
        flag_values=values,
    )
    define_studies(values)
    if asks_for_help(options):
        print(help_text(USAGE.format('STUDY'), values), help_text(USAGE.format('RUN'), runs), sep='\n\n')
        return 0
    if not folders:
        raise UserError(f'{USAGE.format("STUDY")}, or RUN... in the place of STUDY...')
    if hold_runs(folders):
        return compare_folders(runs, folders, options)
    parsed(values, options, 'report STUDY...')
    folder = directory(values, 'out')
    start_platform(values)
    from attnlab.compare.report.comparison import print_comparison
    from attnlab.compare.report.contents import gather
    from attnlab.compare.report.page import write_report

    chosen: dict[str, Any] = {name: values[name].value for name in ('by', 'tolerance', 'storage', 'strict', 'measure')}
    contents = gather(folders, folder, **chosen)
    with printing(values) as printer:
        print_comparison(contents.comparison, printer)
        write_report(contents, folder, printer.console)
    return 0
