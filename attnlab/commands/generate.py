"""`attnlab generate`: text from a trained model."""

import dataclasses
import pathlib
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from absl import flags

from attnlab.commands.arguments import (
    check_belonging,
    define_ema,
    define_run,
    directory,
    is_first_process,
    lines,
    parsed,
    start_devices,
)
from attnlab.errors import UserError
from attnlab.tables import visible

if TYPE_CHECKING:
    from attnlab.functional.sampling import Sampling
    from attnlab.runs.generation import Writer

WAYS = ('prompts', 'beam', 'contrastive', 'draft', 'regex', 'grammar')
"""Flags of which one is given at most: each is another way to continue."""

DRAWS = ('temperature', 'top_p', 'min_p', 'seed')
"""Flags of what is drawn at random."""

TESTED = ('all', 'drawn')
"""Which tokens are tested against a pattern."""


def main(argv: list[str]) -> int:
    """Runs the command."""
    values = _flags()
    if not parsed(values, argv, 'generate'):
        return 0
    _check(values)
    workdir = directory(values, 'workdir')
    draft = directory(values, 'draft') if values.draft else None
    grammar = _grammar(pathlib.Path(values.grammar).expanduser()) if values.grammar else ''
    prompts = lines(values, 'prompts') if values.prompts else ()
    from attnlab.functional.sampling import Sampling

    sampling = Sampling(values.temperature, values.top_k, values.top_p, values.min_p)
    start_devices(values)
    from attnlab.runs.generation import Writer

    writer = Writer.of(workdir, values.step, values.tokens, ema=values.ema)
    if prompts:
        for prompt, text in zip(prompts, writer.side_by_side(prompts, sampling, values.seed), strict=True):
            _print(f'{prompt}{text}\n---\n')
        return 0
    if values.beam:
        said = _searched(values, writer)
    elif draft is not None:
        said = _proposed(values, writer, Writer.of(draft, None, values.tokens), sampling)
    elif values.regex is not None or grammar:
        said = _matched(values, writer, sampling, grammar)
    elif values.contrastive is not None:
        said = Said(writer.contrastive(values.prompt, values.contrastive, values.top_k or 4))
    else:
        said = Said(writer.sampled(values.prompt, sampling, values.seed, values.thoughts))
    for place, piece in enumerate(said.pieces):
        # An error with the prompt or the runs comes before anything is printed.
        _print(values.prompt + piece if place == 0 else piece)
    _print('\n')
    note = said.note()
    if note and is_first_process():
        print(note, file=sys.stderr)
    return 0


def _print(text: str) -> None:
    """Prints what a model writes: to a file as it is, to a terminal with control characters spelled out.

    Of several processes, which all draw the same, the first prints.
    """
    if is_first_process():
        print(visible(text) if sys.stdout.isatty() else text, end='', flush=True)


def _flags() -> flags.FlagValues:
    """The flags of the command."""
    values = flags.FlagValues()
    define_run(values, several=True)
    define_ema(values)
    flags.DEFINE_string('prompt', '\n', 'The text to go on from.', flag_values=values)
    flags.DEFINE_string('prompts', None, 'A file of prompts, one a line, that go on side by side.', flag_values=values)
    flags.DEFINE_integer('tokens', 256, 'How many tokens to draw.', lower_bound=1, flag_values=values)
    flags.DEFINE_float('temperature', 1.0, '0 takes the likeliest token.', lower_bound=0.0, flag_values=values)
    flags.DEFINE_integer('top_k', None, 'Draw from as many likeliest tokens.', lower_bound=1, flag_values=values)
    flags.DEFINE_float('top_p', 1.0, 'Draw from the likeliest tokens that reach this much.', flag_values=values)
    flags.DEFINE_float('min_p', 0.0, 'Draw from tokens with this share of the likeliest one.', flag_values=values)
    flags.DEFINE_integer(
        'seed', 0, 'The same seed draws the same text.', lower_bound=0, upper_bound=2**32 - 1, flag_values=values
    )
    flags.DEFINE_integer('beam', None, 'Search with a beam of this width instead.', lower_bound=1, flag_values=values)
    flags.DEFINE_float(
        'contrastive',
        None,
        'Contrastive search instead, with this penalty on repeated hidden states, from 0 to 1, among --top_k '
        'candidates, 4 if left out.',
        flag_values=values,
    )
    flags.DEFINE_string(
        'draft', None, 'A smaller run with the same tokenizer, which proposes tokens; the text is drawn as without it.',
        flag_values=values,
    )  # fmt: skip
    flags.DEFINE_integer(
        'thoughts',
        0,
        'Before the first token read so many mixtures of what might be said, which are not said.',
        lower_bound=0,
        flag_values=values,
    )
    flags.DEFINE_integer('ahead', 4, 'With --draft: how many tokens it proposes.', lower_bound=1, flag_values=values)
    flags.DEFINE_string(
        'regex', None, 'A regular expression that the continuation, all of it, is to match.', flag_values=values
    )
    flags.DEFINE_string(
        'grammar', None, "A file with a grammar in Lark's notation, whose rule start the continuation is to be.",
        flag_values=values,
    )  # fmt: skip
    flags.DEFINE_enum(
        'tested', 'all', TESTED, 'With --regex or --grammar: test all tokens, or what is drawn until one is accepted.',
        flag_values=values,
    )  # fmt: skip
    return values


class Said(NamedTuple):
    """A text, piece by piece as it is written, and what there is to say of it once it is whole."""

    pieces: Iterable[str]
    note: Callable[[], str] = str


def _searched(values: flags.FlagValues, writer: 'Writer') -> Said:
    text, total = writer.beam(values.prompt, values.beam)
    return Said([text], lambda: f'log-probability {total:.4f} nats')


def _proposed(values: flags.FlagValues, writer: 'Writer', small: 'Writer', sampling: 'Sampling') -> Said:
    """What a smaller model proposes and the model accepts, and how many tokens it accepted at once."""
    counts: list[int] = []

    def note() -> str:
        if not counts:
            return ''
        return (
            f'{sum(counts)} tokens in {len(counts)} readings of the model, each with up to {values.ahead} of the draft'
        )

    return Said(writer.speculative(values.prompt, small, sampling, values.ahead, values.seed, counts), note)


def _matched(values: flags.FlagValues, writer: 'Writer', sampling: 'Sampling', grammar: str) -> Said:
    """What matches a pattern or a grammar, and what it says of the probability of such texts where it is drawn."""
    from attnlab.functional.constrained import Choice, Drawn, Masked, Rejected

    matched: list[Drawn] = []
    choice: Choice = Masked(sampling) if values.tested == 'all' else Rejected(values.temperature)
    draw, pattern = (writer.derived, grammar) if grammar else (writer.matching, values.regex)

    def note() -> str:
        if not matched or not values.temperature:
            return ''
        return (
            f'log-weight {sum(each.log_weight for each in matched):.4f} nats, the mean of whose exponential over seeds '
            f'{_estimated(sampling)}; {sum(each.tested for each in matched):,} tokens tested'
        )

    return Said(draw(values.prompt, pattern, choice, values.seed, matched), note)


def _estimated(sampling: 'Sampling') -> str:
    """What the weights of texts that are drawn so are on average."""
    from attnlab.functional.sampling import UNRESTRICTED

    heated = '' if sampling.temperature == 1 else f', at temperature {sampling.temperature:g},'
    if dataclasses.replace(sampling, temperature=1.0) == UNRESTRICTED:
        return f'is{heated} the probability of such texts'
    return f'is{heated} the probability of those of such texts that --top_k, --top_p and --min_p leave'


def _check(values: flags.FlagValues) -> None:
    """Raises `UserError` for flags that do not go together."""
    ways = [f'--{name}' for name in WAYS if values[name].present]
    if len(ways) > 1:
        raise UserError(f'{" and ".join(ways)} are ways to continue; choose one')
    if values['prompts'].present and values['prompt'].present:
        raise UserError('--prompt is one text and --prompts a file of them; give one of the two')
    searched = ways and ways[0] in ('--beam', '--contrastive')
    drawn = [f'--{name}' for name in (*DRAWS, *(('top_k',) if values.beam else ())) if values[name].present]
    if searched and drawn:
        raise UserError(f'{drawn[0]} is for what is drawn; {ways[0]} searches')
    if values['tested'].present and values.regex is None and values.grammar is None:
        raise UserError('--tested is for --regex or --grammar, neither of which is given')
    if values.tested == 'drawn':
        restricted = [f'--{name}' for name in ('top_k', 'top_p', 'min_p') if values[name].present]
        if restricted:
            raise UserError(f'{restricted[0]} needs --tested=all: --tested=drawn does not know all that is allowed')
        if values.temperature == 0:
            raise UserError('--temperature=0 takes the likeliest; --tested=drawn draws')
    if values.thoughts and ways:
        raise UserError(f'--thoughts is for what is drawn token by token; leave out {ways[0]}')
    check_belonging(values, {'ahead': ('draft',)}, [name for name in WAYS if values[name].value])
    if values.contrastive is not None and not 0 <= values.contrastive <= 1:
        raise UserError(f'--contrastive is {values.contrastive}; it must be from 0 to 1')
    if not 0.0 < values.top_p <= 1.0:
        raise UserError(f'--top_p is {values.top_p}; it must be a probability above 0, up to 1')
    if not 0.0 <= values.min_p <= 1.0:
        raise UserError(f'--min_p is {values.min_p}; it must be a share from 0 to 1')


def _grammar(path: pathlib.Path) -> str:
    """The text of a file; raises `UserError` where there is none."""
    try:
        text = path.read_text(encoding='utf-8')
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f'--grammar is {path}, which cannot be read: {error}') from error
    if not text.strip():
        raise UserError(f'--grammar is {path}, which is empty; write a rule, such as start: "a"+')
    return text
