"""What analyses of single answers ask: the last answers of rows of a split, or prompts of a user's own."""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from attnlab.analysis.question import Question
from attnlab.context import Context
from attnlab.data.text.tokenizers import encode_prompt, load_tokenizer
from attnlab.errors import UserError
from attnlab.models.predictor import Stacked
from attnlab.runs.loading import Loaded
from attnlab.tasks.given import context_of
from attnlab.tasks.language import TOKENIZER
from attnlab.tasks.task import Batch, Task, Textual
from attnlab.tasks.thoughts import ContinuousThought
from attnlab.typing import Embedded


@dataclasses.dataclass(frozen=True)
class Prompts:
    """Prompts of a user's own: texts, or of a run without text numbers of tokens between spaces.

    Attributes:
      prompts: what is read, of one length in tokens.
      answers: what is to follow each, of which the first token counts; empty: what the model finds likeliest.
      others: as many other prompts of that length, for what compares two; empty: none.
      against: what is not to follow each, likewise; empty: nothing.
    """

    prompts: tuple[str, ...]
    answers: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    against: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raises `UserError` where there are not as many of each as of prompts."""
        for name in ('answers', 'others', 'against'):
            if (given := getattr(self, name)) and len(given) != len(self.prompts):
                raise UserError(
                    f'there are {len(self.prompts)} prompts and {len(given)} {name}; give one of these for each'
                )


class Query(NamedTuple):
    """Prompts of one length, and the answers that are asked for.

    Attributes:
      tokens: what is read.
      positions: of each, the token at which its answer is predicted.
      answers: the tokens that are the answers.
      ctx: the context of the prompts.
      others: other prompts, as many; `None` where there are none.
      against: tokens that are not the answers; `None` where there are none.
      labels: how the tokens of a single text are shown, by place; empty for rows, and for several texts.
      of: what they are: a split, or prompts of a user's own.
    """

    tokens: Int[np.ndarray, 'b t']
    positions: Int[np.ndarray, ' b']
    answers: Int[np.ndarray, ' b']
    ctx: Context
    others: Int[np.ndarray, 'b t'] | None = None
    against: Int[np.ndarray, ' b'] | None = None
    labels: tuple[str, ...] = ()
    of: str = ''

    def score(self, model: Stacked) -> Callable[[Embedded], Float[Array, '']]:
        """The mean probability of the answers, of hidden states."""
        rows = jnp.arange(len(self.tokens))

        def score(hidden: Embedded) -> Float[Array, '']:
            log = jax.nn.log_softmax(model.logits(hidden[rows, self.positions]))
            return jnp.mean(jnp.exp(log[rows, self.answers]))

        return score

    def at(self, place: int) -> str | int:
        """How a token is shown."""
        return f'{place} {self.labels[place]}' if self.labels else place


def asked_of(question: Question, own: Prompts | None) -> Query:
    """The prompts of a user's own, or without them the last answers of the rows of a question.

    Raises `UserError` for rows without such answers, and for prompts that are no tokens, or of different lengths.
    """
    if own is not None:
        return _own(question.loaded, question.workdir, own)
    task, batch = question.loaded.setup.task, stacked(question.batches())
    tokens, asked, answers = prompts(batch, task)
    ctx = context_of(task, {name: jnp.asarray(value) for name, value in batch.items()})
    return Query(tokens, asked, answers, ctx, of=question.split)


def asked_record(question: Question, asked: Query, own: Prompts | None) -> dict[str, Any]:
    """What a file of results says of what was asked."""
    record = question.record()
    if own is not None:
        del record['split'], record['rows']  # Of data, which were not read.
        record |= dataclasses.asdict(own) | {'tokens': asked.tokens.tolist(), 'labels': list(asked.labels)}
    return record | {'asked': asked.positions.tolist(), 'answer_tokens': asked.answers.tolist()}


def prompts(batch: Batch, task: Task) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens of rows, where their last answer is asked for, and the answer.

    Raises `UserError` for rows of real numbers, of one label a row that is no token, of documents that are packed, for
    a row without an answer, and for answers after thoughts that are no tokens.
    """
    if isinstance(task, ContinuousThought):
        raise UserError('asked for are answers to tokens; this run answers after thoughts, which are none')
    tokens, targets = np.asarray(batch['tokens']), np.asarray(batch.get(task.labels, np.zeros(0)))
    if tokens.ndim != 2 or targets.ndim != 2 or not np.issubdtype(targets.dtype, np.integer):
        raise UserError('asked for are answers that are tokens, such as those of language models and of recall')
    weights = np.asarray(batch['weights']) > 0
    if not weights.any(axis=1).all():
        raise UserError(f'row {int(np.argmin(weights.any(axis=1)))} asks for no token; take rows with an answer each')
    for row, segments in enumerate(np.asarray(batch['segments'])):
        if len(np.unique(segments[segments > 0])) > 1:
            raise UserError(f'row {row} holds several documents; give --prompt, or a run whose rows hold one each')
    last = weights.shape[1] - 1 - np.argmax(weights[:, ::-1], axis=1)
    rows = np.arange(len(tokens))
    asked = np.asarray(batch['at'])[rows, last] if 'at' in batch else last
    return tokens, asked, targets[rows, last]


def stacked(rows: Sequence[Batch]) -> dict[str, np.ndarray]:
    """Rows as one batch."""
    return {name: np.concatenate([np.asarray(row[name]) for row in rows]) for name in rows[0]}


def _own(loaded: Loaded, workdir: pathlib.Path, own: Prompts) -> Query:
    task, shown = loaded.setup.task, shown_by(loaded, workdir)
    if isinstance(task, Textual):
        tokenizer = load_tokenizer(workdir / TOKENIZER)

        def read(text: str) -> list[int]:
            return encode_prompt(tokenizer, text).tolist()

        def after(prompt: str, answer: str) -> int:
            start, whole = read(prompt), read(prompt + answer)
            if not answer or whole[: len(start)] != start:
                raise UserError(
                    f'{prompt!r} ends within a token of {prompt + answer!r}; move a space from its end to what follows'
                    if answer
                    else f'what is to follow {prompt!r} is empty; give at least one character'
                )
            return whole[len(start)]

    else:
        prompts({name: array[None] for name, array in _row(loaded).items()}, task)

        def read(text: str) -> list[int]:
            return _numbers(text, task.vocab)

        def after(prompt: str, answer: str) -> int:
            return read(answer)[0]

    tokens = _of_one_length([(f'prompt {i}', read(text)) for i, text in enumerate(own.prompts)])
    others = None
    if own.others:
        named = [(f'other prompt {i}', read(text)) for i, text in enumerate(own.others)]
        others = _of_one_length([('prompt 0', tokens[0].tolist()), *named])[1:]
    ctx = Context.full(*tokens.shape)
    asked = np.full(len(tokens), tokens.shape[1] - 1)
    answers, against = (
        np.asarray([after(*pair) for pair in zip(own.prompts, texts, strict=True)]) if texts else None
        for texts in (own.answers, own.against)
    )
    if answers is None:
        answers = _likeliest(loaded, tokens, ctx)
    if len(tokens) > 1:
        return Query(tokens, asked, answers, ctx, others, against, of=f'{len(tokens)} prompts')
    labels = tuple(map(shown, tokens[0].tolist())) if isinstance(task, Textual) else ()
    return Query(tokens, asked, answers, ctx, others, against, labels, f'a prompt, asked for {shown(int(answers[0]))}')


def shown_by(loaded: Loaded, workdir: pathlib.Path) -> Callable[[int], str]:
    """How tokens of a run are shown: by their text, quoted, or by their number."""
    if not isinstance(loaded.setup.task, Textual):
        return str
    tokenizer = load_tokenizer(workdir / TOKENIZER)
    return lambda token: repr(tokenizer.decode([token]).decode(errors='replace'))


def _row(loaded: Loaded) -> Batch:
    task = loaded.setup.task
    return task.source(task.evaluated_split, loaded.setup.length)[0]


def _numbers(text: str, vocab: int) -> list[int]:
    words = text.split()
    if not words or not all(word.isdecimal() and word.isascii() and int(word) < vocab for word in words):
        raise UserError(
            f'{text!r} is no prompt of this run, which reads no text; write tokens as numbers from 0 to {vocab - 1}, '
            'with spaces between them'
        )
    return [int(word) for word in words]


def _of_one_length(named: Sequence[tuple[str, list[int]]]) -> Int[np.ndarray, 'b t']:
    """Prompts as an array. Raises `UserError` for lengths that differ."""
    name, first = named[0]
    for other, tokens in named[1:]:
        if len(tokens) != len(first):
            raise UserError(
                f'{name} has {len(first)} tokens and {other} {len(tokens)}; give prompts of as many tokens each'
            )
    return np.asarray([tokens for _, tokens in named], np.int32)


def _likeliest(loaded: Loaded, tokens: Int[np.ndarray, 'b t'], ctx: Context) -> Int[np.ndarray, ' b']:
    def of(variables: nnx.State) -> Array:
        model: Any = nnx.merge(loaded.setup.graphdef, variables)
        hidden, _ = model.hidden(jnp.asarray(tokens), ctx)
        return jnp.argmax(model.logits(hidden[:, -1]), axis=-1)

    return np.asarray(loaded.setup.jit(of)(loaded.variables))
