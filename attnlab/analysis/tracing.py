"""`attnlab analyse --trace`: where a model holds what it answers, by clean values in passes of other prompts."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from attnlab.analysis.asked import Prompts, Query, asked_of, asked_record
from attnlab.analysis.interventions import causal_trace, places
from attnlab.analysis.parts import ablated
from attnlab.analysis.question import Question
from attnlab.errors import UserError, nearest
from attnlab.models.predictor import one_stack
from attnlab.runs.loading import Loaded
from attnlab.tables import Column, Printer, Table, digits

KINDS = ('residual', 'mixer.output', 'mlp.output')
"""Places that clean values are put into, of every layer."""

LEAST = 1e-3
"""The share of the answer's probability that other prompts must take away, so that there is something to come back."""


@dataclasses.dataclass(frozen=True)
class Trace:
    """What comes back of an answer by clean values, on average over prompts.

    Attributes:
      clean: the probability of the answer.
      corrupted: the same in passes of other prompts, without noise, whose size would have to be chosen (symmetric token
        replacement: Zhang and Nanda 2024, https://arxiv.org/abs/2309.16042).
      maps: by kind of place, `(p - corrupted) / (clean - corrupted)` by layer and token: 0 where the clean value there
        changes nothing, 1 where it is all that matters; NaN where other prompts take less than a thousandth of the
        probability away, or add to it.
    """

    clean: float
    corrupted: float
    maps: Mapping[str, Float[np.ndarray, 'l t']]


def trace(
    loaded: Loaded,
    asked: Query,
    others: Int[np.ndarray, 'b t'],
    *,
    kinds: tuple[str, ...] = (),
    window: int = 1,
) -> Trace:
    """The maps of a run, on prompts and as many others, of kinds of places that all layers have; by default of `KINDS`.

    Raises `UserError` where a prompt is the one it is traced against, and for a kind that some layer lacks.
    """
    if (same := np.all(asked.tokens == others, axis=1)).any():
        raise UserError(
            f'prompt {int(np.argmax(same))} and the one it is traced against are the same, so nothing is corrupted; '
            'take other ones'
        )
    setup = loaded.setup
    kinds = chosen_kinds(loaded.model(), kinds)

    def run(kind: str) -> Any:
        def of(variables: nnx.State) -> Any:
            model: Any = nnx.merge(setup.graphdef, variables)
            corrupted = model.embed(jnp.asarray(others), asked.ctx)
            score = asked.score(model)
            return causal_trace(
                model, jnp.asarray(asked.tokens), asked.ctx, corrupted, score, place=kind, window=window
            )

        return jax.device_get(setup.jit(of)(loaded.variables))

    found = {kind: run(kind) for kind in kinds}
    _, clean, corrupted = (float(each) if np.ndim(each) == 0 else each for each in found[kinds[0]])
    apart = clean - corrupted if clean - corrupted > LEAST * clean else float('nan')
    maps = {kind: (np.asarray(each[0]) - corrupted) / apart for kind, each in found.items()}
    return Trace(clean, corrupted, maps)


def chosen_kinds(model: Any, wanted: tuple[str, ...]) -> tuple[str, ...]:
    """Kinds of places that every layer has: those wanted, or without any `KINDS`. Raises `UserError` for another."""
    known, depth = places(model), one_stack(model).depth
    kinds = dict.fromkeys(place.partition('.')[2] for place in known if place.startswith('layers['))
    shared = [kind for kind in kinds if all(f'layers[{layer}].{kind}' in known for layer in range(depth))]
    for kind in wanted:
        if kind not in shared:
            raise UserError(f'there is no place {kind!r} in every layer{nearest(kind, shared)}')
    return wanted or tuple(kind for kind in KINDS if kind in shared)


def analyse_trace(
    question: Question,
    printer: Printer,
    *,
    own: Prompts | None = None,
    kinds: tuple[str, ...] = (),
    window: int = 1,
) -> Trace:
    """Traces the last answers of rows of a split, each against the next row; or prompts of one's own.

    Also says by how much the probability falls without each head of the mixers that have heads. Writes
    `analysis/<step>-trace.json`. Raises `UserError` for a run without tokens or labels, fewer than two rows, and
    prompts without others.
    """
    loaded = question.loaded
    question.check_layers()
    if own is None and question.rows < 2:
        raise UserError(f'rows is {question.rows}; every row is traced against another, so there must be two or more')
    if own is not None and not own.others:
        raise UserError('prompts are traced against others: give --other too, or --others')
    asked = asked_of(question, own)
    others = np.roll(asked.tokens, -1, axis=0) if asked.others is None else asked.others
    found = trace(loaded, asked, others, kinds=kinds, window=window)
    heads = without_heads(loaded, asked)
    record = asked_record(question, asked, own) | {'window': window, 'places': list(found.maps)}
    numbers = {
        'clean': found.clean,
        'corrupted': found.corrupted,
        'maps': {kind: each.tolist() for kind, each in found.maps.items()},
        'without_head': {f'{layer}.{head}': value for (layer, head), value in heads.items()},
    }
    tables = _tables(found, heads, asked, f'{question.checkpoint}, {asked.of}')
    question.report(printer, '-trace', record, numbers, tables)
    return found


def without_heads(loaded: Loaded, asked: Query) -> dict[tuple[int, int], float]:
    """The probability of the answers without each head, by layer and head."""

    def of(variables: nnx.State) -> dict[tuple[int, int], Array]:
        model: Any = nnx.merge(loaded.setup.graphdef, variables)
        return ablated(model, jnp.asarray(asked.tokens), asked.ctx, asked.score(model))

    return {place: float(value) for place, value in jax.device_get(loaded.setup.jit(of)(loaded.variables)).items()}


def _tables(found: Trace, heads: Mapping[tuple[int, int], float], asked: Query, title: str) -> list[Table]:
    three = digits('.3f')
    columns = [Column('layer', right=True)]
    for kind in found.maps:
        columns += [Column(kind, three, right=True), Column(f'at token of {kind}', right=True, rank=1)]
    depth = len(next(iter(found.maps.values())))
    rows = []
    for layer in range(depth):
        cells: list[Any] = [layer]
        for each in found.maps.values():
            cells += [
                float(each[layer].max()),
                None if np.isnan(each[layer]).any() else asked.at(int(each[layer].argmax())),
            ]
        rows.append(tuple(cells))
    caption = f'{title}: answers with {found.clean:.3f}, in passes of others {found.corrupted:.3f}; what comes back'
    if any(np.isnan(each).any() for each in found.maps.values()):
        caption += '; no recovery to measure: the other prompts give the answer as well'
    tables = [Table('trace', columns, rows, caption)]
    if heads:
        columns = [Column('layer', right=True), Column('head', right=True), Column('probability without', three, True)]
        lines = [(layer, head, value) for (layer, head), value in heads.items()]
        tables.append(Table('heads', columns, lines, 'without one head'))
    return tables
