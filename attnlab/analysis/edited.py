"""`attnlab edit`: a run that answers one prompt otherwise, by a change of rank one of one map (ROME)."""

import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from attnlab.analysis.asked import prompts, stacked
from attnlab.analysis.editing import Edit, Editor, log_probability
from attnlab.analysis.question import Question
from attnlab.context import Context
from attnlab.data.text.tokenizers import encode_prompt, load_tokenizer
from attnlab.errors import UserError
from attnlab.runs.loading import Loaded
from attnlab.runs.made import check_new, reported, score_table, write_made
from attnlab.tables import Column, Printer, Table, digits
from attnlab.tasks.given import context_of
from attnlab.tasks.language import TOKENIZER
from attnlab.tasks.task import Textual
from attnlab.train.state import joined, split


@dataclasses.dataclass(frozen=True)
class Rewritten:
    """What is asked, and what is to be answered.

    Attributes:
      tokens: the prompt, and behind it the answer but for its last token.
      at: the last token of the subject, whose key is given another value.
      asked: the token at which the first token of the answer is predicted.
      answer: its tokens.
    """

    tokens: tuple[int, ...]
    at: int
    asked: int
    answer: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class TextFact:
    """A prompt, the part of it that names the subject, and the text that is to follow it."""

    prompt: str
    subject: str
    answer: str

    def rewritten(self, loaded: Loaded, workdir: pathlib.Path) -> Rewritten:
        """Its tokens. Raises `UserError` for a run of no text, a subject that the prompt lacks, and within tokens."""
        if not isinstance(loaded.setup.task, Textual):
            raise UserError(
                f'{workdir} was trained for {type(loaded.setup.task).__name__}, not on text: give --row, --at and '
                '--answer, the number of a token'
            )
        end = self.prompt.rfind(self.subject) + len(self.subject)
        if not self.subject or self.subject not in self.prompt or not self.answer:
            raise UserError(
                f'--subject is {self.subject!r}, --answer {self.answer!r}; the first must stand in the prompt, '
                f'{self.prompt!r}, and both must have a character'
            )
        tokenizer = load_tokenizer(workdir / TOKENIZER)
        pieces = (self.prompt[:end], self.prompt, self.prompt + self.answer)
        subject, prompt, whole = (encode_prompt(tokenizer, piece).tolist() for piece in pieces)
        for name, part in (('subject', subject), ('prompt', prompt)):
            if whole[: len(part)] != part:
                raise UserError(
                    f'the {name} ends within a token of {pieces[2]!r}; move a space from its end to what follows'
                )
        return Rewritten(tuple(whole[:-1]), len(subject) - 1, len(prompt) - 1, tuple(whole[len(prompt) :]))


@dataclasses.dataclass(frozen=True)
class RowFact:
    """A row of the evaluated split, the token of it that ends the subject, and the token that is to be the answer."""

    row: int
    at: int
    answer: int

    def rewritten(self, loaded: Loaded, workdir: pathlib.Path) -> Rewritten:
        """Its tokens.

        Raises `UserError` for numbers that are not of the row or of the vocabulary, and for a row of several documents.
        """
        task = loaded.setup.task
        source = task.source(task.evaluated_split, loaded.setup.length)
        if not 0 <= self.row < len(source):
            raise UserError(
                f'--row is {self.row}; the {task.evaluated_split} split of {workdir} has {len(source)} rows'
            )
        batch = {name: value[None] for name, value in source[self.row].items()}
        tokens, asked, _ = prompts(batch, task)
        where = int(asked[0])
        if not 0 <= self.at <= where:
            raise UserError(
                f'--at is {self.at}; it must be a token of the row up to {where}, where the answer is asked'
            )
        if not 0 <= self.answer < task.vocab:
            raise UserError(f'--answer is {self.answer}; it must be a token, from 0 to {task.vocab - 1}')
        return Rewritten(tuple(tokens[0, : where + 1].tolist()), self.at, where, (self.answer,))


def edit_run(
    workdir: pathlib.Path,
    out: pathlib.Path,
    wanted: TextFact | RowFact,
    how: Edit,
    rows: int,
    printer: Printer,
    *,
    step: int | None = None,
    ema: bool = False,
    other_data: bool = False,
) -> tuple[float, float]:
    """Writes a run that answers otherwise, and returns the probability of the answer before and after.

    Keys that should be mapped as before are those of `rows` rows all over training, without padding. What is
    written is evaluated as the run was in training. Raises `UserError` for a model without layers, one that reads no
    tokens, a place without one last map, and a folder that holds a run.
    """
    check_new(workdir, out, '--out')
    question = Question.of(workdir, step, 'train', rows, ema=ema, other_data=other_data)
    question.check_layers()
    loaded = question.loaded
    fact = wanted.rewritten(loaded, workdir)
    model, tokens = loaded.model(), jnp.asarray(fact.tokens, jnp.int32)[None]
    editor = Editor(model, how, at=fact.at, asked=fact.asked, jit=loaded.setup.jit)
    batch = stacked(question.batches())
    ctx = context_of(loaded.setup.task, {name: jnp.asarray(value) for name, value in batch.items()})
    made = _with_model(loaded, editor(tokens, fact.answer, editor.moments(jnp.asarray(batch['tokens']), ctx)))
    before, after = (probability(each, tokens, fact) for each in (loaded, made))
    asked = {**dataclasses.asdict(wanted), **dataclasses.asdict(how), 'rows': rows}
    record = {'from': str(workdir), 'step': loaded.step, 'ema': ema, **asked}
    numbers = write_made(workdir, loaded, made, out, {'edited': record, 'other_data': other_data})
    columns = [Column('answer'), *(Column(name, digits('.4f'), right=True) for name in ('before', 'after'))]
    printer.table(
        Table('edit', columns, [(str(wanted.answer), before, after)], f'its probability; {how.place} changed')
    )
    printer.table(score_table(numbers, reported(workdir, loaded.step, ema)))
    printer.line(f'written: {out}, a run that eval, generate, analyse and compare take')
    return before, after


def probability(loaded: Loaded, tokens: Any, fact: Rewritten) -> float:
    """The probability of the answer."""

    def of(variables: nnx.State, tokens: jax.Array) -> jax.Array:
        model = nnx.merge(loaded.setup.graphdef, variables)
        hidden, _ = model.hidden(tokens, Context.full(*tokens.shape))
        return log_probability(model, hidden, fact.asked, jnp.asarray(fact.answer, jnp.int32))

    return float(np.exp(loaded.setup.jit(of)(loaded.variables, tokens)))


def _with_model(loaded: Loaded, model: Any) -> Loaded:
    _, params, buffers = split(model)
    return dataclasses.replace(loaded, variables=joined(params, buffers))
