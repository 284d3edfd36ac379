"""`attnlab eval`: every metric of a trained run, at and beyond the length it was trained on."""

from absl import flags

from attnlab.commands.arguments import define_run, define_split, parsed, required, start_devices, whole


def main(argv: list[str]) -> int:
    """Runs the command."""
    values = flags.FlagValues()
    define_run(values)
    define_split(values)
    flags.DEFINE_list('multiples', ['1', '2', '4', '8'], 'Lengths, in training lengths.', flag_values=values)
    flags.DEFINE_integer(
        'tokens', None, 'Tokens of a text to evaluate, spread over its documents; all by default.', flag_values=values
    )
    flags.DEFINE_integer(
        'stride',
        None,
        'Tokens from one window over a text to the next; below the length they overlap, and what an '
        'earlier one predicted is not counted again.',
        flag_values=values,
    )
    flags.DEFINE_integer('examples', None, 'Examples of each slice of other tasks.', flag_values=values)
    flags.DEFINE_string(
        'attention',
        None,
        'What takes the place of the softmax: adaptive_temperature, ssmax, quantized_8, quantized_8_corrected.',
        flag_values=values,
    )
    if not parsed(values, argv, 'eval'):
        return 0
    workdir = required(values, 'workdir')
    multiples = tuple(whole(text, '--multiples') for text in values.multiples)
    start_devices(values)
    from rich.console import Console

    from attnlab.convert.substitution import substituted
    from attnlab.evals.asked import Asked
    from attnlab.runs.evaluation import evaluate_run
    from attnlab.runs.loading import load_run
    from attnlab.train.run import check_data

    loaded = load_run(workdir, values.step)
    check_data(workdir, loaded.setup.task.describe(), other=values.other_data)
    name = str(loaded.step)
    if values.attention is not None:
        loaded = substituted(loaded, values.attention)
        name = f'{name}-{values.attention}'
    asked = Asked(values.split, multiples, values.tokens, values.examples, values.stride)
    evaluate_run(loaded, asked, workdir, Console(), name, other_data=values.other_data)
    return 0
