"""`attnlab edit`: a run that answers one prompt otherwise, made of a trained one."""

from absl import flags

from attnlab.commands.arguments import (
    define_ema,
    define_format,
    define_other_data,
    define_run,
    directory,
    parsed,
    printing,
    start_platform,
    whole,
)
from attnlab.errors import UserError

TEXT, ROW = ('prompt', 'subject'), ('row', 'at')
"""Flags that say what is asked: of a run of text, and of others."""


def main(argv: list[str]) -> int:
    """Runs the command."""
    values = flags.FlagValues()
    define_run(values)
    flags.DEFINE_string('out', None, 'The directory of the run that is made, a new one.', flag_values=values)
    flags.DEFINE_string('prompt', None, 'The text that is to be answered otherwise.', flag_values=values)
    flags.DEFINE_string('subject', None, 'What it is about, a part of it; all of it by default.', flag_values=values)
    flags.DEFINE_integer(
        'row', None, 'Of a run without text: the row whose last answer is changed.', flag_values=values
    )
    flags.DEFINE_integer('at', None, 'With --row: the last token of the subject, from 0.', flag_values=values)
    flags.DEFINE_string('answer', None, 'What is to follow: a text, or with --row a token.', flag_values=values)
    flags.DEFINE_integer('layer', None, 'The layer that is changed, from 0.', lower_bound=0, flag_values=values)
    flags.DEFINE_enum('branch', 'mlp', ['mlp', 'mixer'], 'Whose last map is changed.', flag_values=values)
    flags.DEFINE_integer(
        'rows', 64, 'Rows of training whose keys should be mapped as before.', lower_bound=1, flag_values=values
    )
    flags.DEFINE_integer('steps', 60, 'By which the new value is found.', lower_bound=1, flag_values=values)
    define_ema(values)
    define_other_data(values)
    define_format(values)
    if not parsed(values, argv, 'edit'):
        return 0
    for name in ('answer', 'layer'):
        if values[name].value is None:
            raise UserError(f'--{name} is missing; give --prompt, --subject, --answer and --layer')
    _check_asked(values)
    workdir, out = directory(values, 'workdir'), directory(values, 'out')
    token = 0 if values.row is None else whole(values.answer, '--answer', 0)
    start_platform(values)
    from attnlab.analysis.edited import RowFact, TextFact, edit_run
    from attnlab.analysis.editing import Edit

    wanted: RowFact | TextFact
    if values.row is None:
        subject = values.prompt if values.subject is None else values.subject
        wanted = TextFact(values.prompt, subject, values.answer)
    else:
        wanted = RowFact(values.row, values.at, token)
    how = Edit(layer=values.layer, branch=values.branch, steps=values.steps)
    with printing(values) as printer:
        options = {'step': values.step, 'ema': values.ema, 'other_data': values.other_data}
        edit_run(workdir, out, wanted, how, values.rows, printer, **options)
    return 0


def _check_asked(values: flags.FlagValues) -> None:
    """Raises `UserError` where what is asked is not given, or is given in two ways."""
    text, row = ([f'--{name}' for name in names if values[name].value is not None] for names in (TEXT, ROW))
    if bool(text) == bool(row):
        raise UserError('give --prompt and --subject, of a run of text, or --row and --at, of another')
    if row and len(row) < len(ROW):
        raise UserError(f'{row[0]} is not enough; give --row and --at')
    if text and values.prompt is None:
        raise UserError(f'{text[0]} is not enough; give --prompt')
