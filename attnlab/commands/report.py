"""`attnlab report`: studies compared on one HTML page with figures, and as CSV."""

import pathlib
from typing import Any

from absl import flags

from attnlab.commands.arguments import define_studies, directory, parsed, printing, start_platform
from attnlab.errors import UserError


def main(argv: list[str]) -> int:
    """Runs the command."""
    values = flags.FlagValues()
    flags.DEFINE_string('out', 'report', 'Where the page is written.', flag_values=values)
    flags.DEFINE_bool(
        'measure',
        None,
        'Measure decoding time and memory on the device at hand; --nomeasure never does. By default, once a study.',
        flag_values=values,
    )
    define_studies(values)
    studies = [word for word in argv if not word.startswith('-')]
    if not parsed(values, [word for word in argv if word.startswith('-')], 'report STUDY...'):
        return 0
    if not studies:
        raise UserError('usage: attnlab report STUDY... [--flag=value ...]')
    folder = directory(values, 'out')
    start_platform(values)
    from attnlab.compare.report.comparison import print_comparison
    from attnlab.compare.report.contents import gather
    from attnlab.compare.report.page import write_report

    chosen: dict[str, Any] = {name: values[name].value for name in ('by', 'tolerance', 'storage', 'strict', 'measure')}
    contents = gather([pathlib.Path(study) for study in studies], folder, **chosen)
    with printing(values) as printer:
        print_comparison(contents.comparison, printer)
        write_report(contents, folder, printer.console)
    return 0
