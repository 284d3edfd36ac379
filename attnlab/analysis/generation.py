"""`attnlab generate`: text from a trained run."""

import pathlib
from collections.abc import Iterator

from attnlab.analysis.loading import load_run
from attnlab.errors import UserError
from attnlab.models.sampling import generate


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
    """Yields the text that goes on from `prompt`, in pieces that are whole characters."""
    if not prompt:
        raise UserError('the prompt is empty; give at least one character')
    loaded = load_run(workdir, step)
    tokenizer = loaded.setup.task.tokenizer
    drawn = generate(
        loaded.model(), tokenizer.encode(prompt.encode()), tokens, temperature=temperature, top_p=top_p, seed=seed
    )
    yield from tokenizer.stream(drawn)
