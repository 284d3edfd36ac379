"""`attnlab match`: configs of several recipes that agree in size."""

import pathlib

from absl import flags

from attnlab.commands.arguments import (
    define_format,
    define_platform,
    directory,
    parsed,
    printing,
    required,
    start_platform,
)
from attnlab.errors import UserError


def main(argv: list[str]) -> int:
    """Runs the command."""
    values = flags.FlagValues()
    flags.DEFINE_string(
        'config', None, 'NAME[:ARG] or FILE.py[:ARG]; zoo=RECIPE is added to ARG for each recipe.', flag_values=values
    )
    flags.DEFINE_string(
        'by',
        'params',
        'The measure to agree in: params, state_bytes@TOKENS, train_flops or decode_ms.',
        flag_values=values,
    )
    flags.DEFINE_string(
        'target',
        None,
        'The value to reach: a number, or the recipe that the others are matched to.',
        flag_values=values,
    )
    flags.DEFINE_list('recipes', [], 'Recipes to match, by names that attnlab zoo lists.', flag_values=values)
    flags.DEFINE_float(
        'tolerance', 0.01, 'How far from the target, as a fraction.', lower_bound=0.0, flag_values=values
    )
    flags.DEFINE_enum(
        'for',
        'any',
        ['any', 'accelerator'],
        'Choose widths in multiples of 8, or for accelerators of 128 and 64.',
        flag_values=values,
    )
    flags.DEFINE_bool(
        'below_range',
        False,
        "Allow states smaller than any their papers try or, where that is not known, than the recipes' own.",
        flag_values=values,
    )
    flags.DEFINE_string('out', 'matched', 'Where the matched configs are written.', flag_values=values)
    define_format(values)
    define_platform(values)
    if not parsed(values, argv, 'match'):
        return 0
    path, _, arg = str(required(values, 'config')).partition(':')
    target, out = str(required(values, 'target')), directory(values, 'out')
    if not values.recipes:
        raise UserError('--recipes is missing, such as --recipes=gla,mamba2,mha')
    for item in arg.split(','):
        if item.startswith('zoo='):
            raise UserError(f'--config holds {item}, which match gives for each of --recipes; leave it out')
    start_platform(values)
    from attnlab.compare.match import MULTIPLES, match_recipes
    from attnlab.configuration import config_of

    names = {name: ','.join(filter(None, (arg, f'zoo={name}'))) for name in values.recipes}
    configs = {name: config_of(pathlib.Path(path), text) for name, text in names.items()}
    with printing(values) as printer:
        match_recipes(
            configs,
            values.by,
            target,
            values.tolerance,
            out,
            printer,
            multiples=MULTIPLES[str(values['for'].value)],
            below_range=values.below_range,
        )
    return 0
