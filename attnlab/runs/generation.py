"""`attnlab generate`: text from a trained run."""

import dataclasses
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from attnlab.data.text.grammar import Derivable, Grammar
from attnlab.data.text.pattern import Matching, Pattern
from attnlab.data.text.tokenizers import StreamDecoder, Tokenizer, encode_prompt, load_tokenizer
from attnlab.errors import UserError
from attnlab.functional.constrained import Choice, Drawn
from attnlab.functional.sampling import Sampling
from attnlab.models import decoding
from attnlab.models.sampling import generate
from attnlab.runs.loading import Loaded, load_run
from attnlab.tasks.language import TOKENIZER
from attnlab.tasks.task import Textual


@dataclasses.dataclass(frozen=True)
class Writer:
    """A run that continues texts by `tokens` tokens."""

    loaded: Loaded
    tokenizer: Tokenizer
    tokens: int

    @classmethod
    def of(cls, workdir: pathlib.Path, step: int | None, tokens: int, *, ema: bool = False) -> 'Writer':
        """Loads a run. Raises `UserError` for one that was not trained on text."""
        loaded = load_run(workdir, step, ema=ema)
        if not isinstance(loaded.setup.task, Textual):
            raise UserError(
                f'{workdir} was trained for {type(loaded.setup.task).__name__}, not on text; try attnlab eval'
            )
        return cls(loaded, load_tokenizer(workdir / TOKENIZER), tokens)

    def sampled(self, prompt: str, sampling: Sampling, seed: int, thoughts: int = 0) -> Iterator[str]:
        """The continuation of a prompt, one token after the other, after `thoughts` continuous thoughts."""
        model, ids = self.loaded.model(), self._ids(prompt)
        drawn = generate(model, ids, self.tokens, sampling, thoughts=thoughts, seed=seed, jit=self._jit)
        return self._text([token] for token in drawn)

    def side_by_side(self, prompts: Sequence[str], sampling: Sampling, seed: int) -> list[str]:
        """The continuations of several prompts."""
        ids = [self._ids(prompt) for prompt in prompts]
        drawn = decoding.generate_many(self.loaded.model(), ids, self.tokens, sampling, seed=seed, jit=self._jit)
        return [''.join(self._text([row.tolist()])) for row in drawn]

    def beam(self, prompt: str, width: int) -> tuple[str, float]:
        """The likeliest continuation that a beam finds, and its log-probability in nats."""
        found, total = decoding.beam_search(self.loaded.model(), self._ids(prompt), self.tokens, width, jit=self._jit)
        return ''.join(self._text([found.tolist()])), total

    def contrastive(self, prompt: str, penalty: float, candidates: int) -> Iterator[str]:
        """The continuation of contrastive search."""
        drawn = decoding.contrastive_search(
            self.loaded.model(),
            self._ids(prompt),
            self.tokens,
            penalty=penalty,
            candidates=candidates,
            jit=self._jit,
        )
        return self._text([token] for token in drawn)

    def speculative(
        self, prompt: str, draft: 'Writer', sampling: Sampling, ahead: int, seed: int, counts: list[int]
    ) -> Iterator[str]:
        """A sampled continuation that a smaller run drafts; appends to `counts` how many tokens each piece has.

        Raises `UserError` for a draft with another tokenizer.
        """
        if draft.tokenizer.hash != self.tokenizer.hash:
            raise UserError('the run of --draft has another tokenizer; a draft needs the same one')
        pieces = decoding.speculate(
            self.loaded.model(),
            draft.loaded.model(),
            self._ids(prompt),
            self.tokens,
            sampling,
            ahead=ahead,
            seed=seed,
            jit=self._jit,
        )

        def counted() -> Iterator[list[int]]:
            for piece in pieces:
                counts.append(len(piece))
                yield piece

        return self._text(counted())

    def matching(self, prompt: str, expression: str, choice: Choice, seed: int, tokens: list[Drawn]) -> Iterator[str]:
        """A continuation that matches a regular expression; appends to `tokens` each that is drawn.

        Raises `UserError` for an expression that cannot be matched.
        """
        return self._constrained(prompt, Matching(Pattern(expression), self.tokenizer), choice, seed, tokens)

    def derived(self, prompt: str, grammar: str, choice: Choice, seed: int, tokens: list[Drawn]) -> Iterator[str]:
        """A continuation that is a text of a grammar; appends to `tokens` each that is drawn.

        Raises `UserError` for a text that is no grammar.
        """
        return self._constrained(prompt, Derivable(Grammar(grammar), self.tokenizer), choice, seed, tokens)

    def _constrained(
        self, prompt: str, constraint: decoding.Constraint, choice: Choice, seed: int, tokens: list[Drawn]
    ) -> Iterator[str]:
        drawn = decoding.constrained(
            self.loaded.model(), self._ids(prompt), self.tokens, constraint, choice, seed=seed, jit=self._jit
        )

        def noted() -> Iterator[list[int]]:
            for each in drawn:
                tokens.append(each)
                yield [each.token]

        return self._text(noted())

    @property
    def _jit(self) -> Any:
        return self.loaded.setup.jit

    def _ids(self, prompt: str) -> np.ndarray:
        return encode_prompt(self.tokenizer, prompt)

    def _text(self, pieces: Iterable[Sequence[int]]) -> Iterator[str]:
        """Text, in pieces of whole characters."""
        stream = StreamDecoder(self.tokenizer)
        for piece in pieces:
            yield stream.feed(list(piece))
        yield stream.finish()
