"""`attnlab generate`: text from a trained model."""

from absl import flags

from attnlab.commands.arguments import define_run, directory, parsed, start_devices
from attnlab.errors import UserError


def main(argv: list[str]) -> int:
    """Runs the command."""
    values = flags.FlagValues()
    define_run(values)
    flags.DEFINE_string('prompt', '\n', 'The text to go on from.', flag_values=values)
    flags.DEFINE_integer('tokens', 256, 'How many tokens to draw.', lower_bound=1, flag_values=values)
    flags.DEFINE_float('temperature', 1.0, '0 takes the likeliest token.', lower_bound=0.0, flag_values=values)
    flags.DEFINE_float('top_p', 1.0, 'Draw from the likeliest tokens that reach this much.', flag_values=values)
    flags.DEFINE_integer(
        'seed', 0, 'The same seed draws the same text.', lower_bound=0, upper_bound=2**63 - 1, flag_values=values
    )
    if not parsed(values, argv, 'generate'):
        return 0
    if not 0.0 < values.top_p <= 1.0:
        raise UserError(f'--top_p is {values.top_p}; it must be a probability above 0, up to 1')
    workdir = directory(values, 'workdir')
    start_devices(values)
    from attnlab.runs.generation import generate_text

    pieces = generate_text(
        workdir,
        values.prompt,
        step=values.step,
        tokens=values.tokens,
        temperature=values.temperature,
        top_p=values.top_p,
        seed=values.seed,
    )
    print(values.prompt, end='', flush=True)
    for piece in pieces:
        print(piece, end='', flush=True)
    print()
    return 0
