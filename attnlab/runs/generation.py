"""`attnlab generate`: text from a trained run."""

import pathlib
from collections.abc import Iterator

from attnlab.data.text.tokenizers import StreamDecoder, load_tokenizer
from attnlab.errors import UserError
from attnlab.models.sampling import generate
from attnlab.runs.loading import load_run
from attnlab.tasks.language import TOKENIZER
from attnlab.tasks.task import Textual


def generate_text(
    workdir: pathlib.Path,
    prompt: str,
    *,
    step: int | None = None,
    tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
) -> Iterator[str]:
    """Yields the continuation of `prompt`, in pieces of whole characters."""
    try:
        encoded = prompt.encode()
    except UnicodeEncodeError as error:
        raise UserError(f'the prompt is not UTF-8: {prompt!r}; give it in the encoding of the terminal') from error
    if not prompt:
        raise UserError('the prompt is empty; give at least one character')
    loaded = load_run(workdir, step)
    if not isinstance(loaded.setup.task, Textual):
        raise UserError(f'{workdir} was trained for {type(loaded.setup.task).__name__}, not on text; try attnlab eval')
    tokenizer = load_tokenizer(workdir / TOKENIZER)
    (ids,) = tokenizer.encode([encoded])
    stream = StreamDecoder(tokenizer)
    drawn = generate(
        loaded.model(), ids, tokens, temperature=temperature, top_p=top_p, seed=seed, jit=loaded.setup.precision.jit
    )
    for token in drawn:
        yield stream.feed([token])
    yield stream.finish()
