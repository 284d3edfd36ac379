"""`attnlab analyse --propagate`: which branches make an answer's logit, and which directions would change it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float

from attnlab.analysis.asked import Prompts, Query, asked_of, asked_record
from attnlab.analysis.interventions import places
from attnlab.analysis.parts import NOT_LINEAR, propagated
from attnlab.analysis.question import Question
from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.runs.loading import Loaded
from attnlab.tables import Column, Printer, Table, digits


@dataclasses.dataclass(frozen=True)
class Propagation:
    """Of an observable, the logit of an answer, less that of what it is held against: means over prompts.

    Attributes:
      value: of the observable.
      adds: what every place adds to it, which is all of it together.
      directions: the norms of its derivatives by the value at every place, by token.
    """

    value: float
    adds: Mapping[str, float]
    directions: Mapping[str, Float[np.ndarray, 't']]


def propagation(loaded: Loaded, asked: Query) -> Propagation:
    """Of the answers of a run. Raises `UserError` where what branches add does not add up; see `propagated`."""
    setup = loaded.setup

    def of(variables: nnx.State, tokens: Array, ctx: Context, token: Array, answer: Array, sign: Array) -> Any:
        model: Any = nnx.merge(setup.graphdef, variables)
        count = model.logits(jnp.zeros((1, model.dim), model.dtype)).shape[-1]
        observable = jnp.zeros(count).at[answer].add(sign)
        adds, directions = propagated(model, tokens, ctx, observable, token)
        norms = {place: jnp.linalg.norm(each.astype(jnp.float32), axis=-1)[0] for place, each in directions.items()}
        return {place: each[0] for place, each in adds.items()}, norms

    run, found = setup.jit(of), []
    for row, tokens in enumerate(asked.tokens):
        ctx = jax.tree.map(lambda each, row=row: each[row : row + 1], asked.ctx)
        pair = [asked.answers[row], *([] if asked.against is None else [asked.against[row]])]
        signs = jnp.asarray([1.0, -1.0][: len(pair)])
        found.append(run(loaded.variables, tokens[None], ctx, asked.positions[row], jnp.asarray(pair), signs))
    adds, norms = jax.tree.map(lambda *each: np.mean(np.stack(each), axis=0), *jax.device_get(found))
    if any(np.isnan(each) for each in adds.values()):
        raise UserError(NOT_LINEAR)
    order = [place for place in (*places(loaded.model()), 'head') if place in adds]
    return Propagation(
        value=float(sum(adds.values())),
        adds={place: float(adds[place]) for place in order},
        directions={place: norms[place] for place in order if place in norms},
    )


def analyse_propagation(question: Question, printer: Printer, *, own: Prompts | None = None) -> Propagation:
    """Propagates the logits of the answers of rows of a split, or of prompts of one's own, back through a checkpoint.

    Writes `analysis/<step>-propagate.json`. Raises `UserError` for a run without tokens or labels, and for a model
    whose branches do not simply add to what the head reads.
    """
    question.check_layers()
    asked = asked_of(question, own)
    found = propagation(question.loaded, asked)
    record = asked_record(question, asked, own)
    numbers = {'value': found.value, 'adds': dict(found.adds)}
    numbers['directions'] = {place: each.tolist() for place, each in found.directions.items()}
    table = _table(found, asked, f'{question.checkpoint}, {asked.of}')
    question.report(printer, '-propagate', record, numbers, (table,))
    return found


def _table(found: Propagation, asked: Query, title: str) -> Table:
    four = digits('+.4f')
    columns = [
        Column('place'),
        Column('adds', four, right=True),
        Column('largest derivative', digits('.4g'), right=True),
        Column('at token', right=True, rank=1),
    ]
    rows: list[tuple[Any, ...]] = []
    for place, adds in found.adds.items():
        largest: tuple[Any, Any] = (None, None)
        if place in found.directions:  # The head's own part is of no place.
            norms = found.directions[place]
            largest = float(norms.max()), asked.at(int(norms.argmax()))
        rows.append((place, adds, *largest))
    of = 'the logit of the answer' if asked.against is None else 'the logit of the answer less that of the other'
    return Table('propagate', columns, rows, f'{title}: {of} is {found.value:.4f}; what is added, and what moves it')
