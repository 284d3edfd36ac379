"""`attnlab analyse --trace`: where a model holds what it answers, by clean values in passes of other prompts."""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from attnlab.analysis.examination import first_rows
from attnlab.analysis.interventions import causal_trace, places
from attnlab.analysis.parts import ablated
from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.files import write_results
from attnlab.models.predictor import Stacked, one_stack
from attnlab.runs.loading import Loaded, load_run
from attnlab.tables import Column, Printer, Table, digits
from attnlab.tasks.task import Batch, context
from attnlab.train.run import check_data

KINDS = ('residual', 'mixer.output', 'mlp.output')
"""Places that clean values are put into, of every layer."""

LEAST = 1e-3
"""The share of the answer's probability that other prompts must take away, so that there is something to come back."""


@dataclasses.dataclass(frozen=True)
class Trace:
    """What comes back of an answer by clean values, in the mean over prompts.

    Attributes:
      clean: the probability of the answer.
      corrupted: the same in passes of other prompts.
      maps: by kind of place, `(p - corrupted) / (clean - corrupted)` by layer and token: 0 where the clean value there
        changes nothing, 1 where it is all that matters; NaN where other prompts take less than a thousandth of the
        probability away, or add to it.
    """

    clean: float
    corrupted: float
    maps: Mapping[str, Float[np.ndarray, 'l t']]


def traced(
    model: Stacked,
    tokens: Int[Array, 'b t'],
    others: Int[Array, 'b t'],
    ctx: Context,
    asked: Int[Array, ' b'],
    answers: Int[Array, ' b'],
    kind: str,
) -> tuple[Float[Array, 'l t'], Float[Array, ''], Float[Array, '']]:
    """Of prompts and as many others of the same lengths: probabilities of the answers, as `causal_trace` returns them.

    A corrupted pass is that of the other prompt (symmetric token replacement: Zhang and Nanda 2024,
    https://arxiv.org/abs/2309.16042), without noise, whose size would have to be chosen.
    """
    rows = jnp.arange(len(tokens))

    def score(hidden: Array) -> Float[Array, '']:
        log = jax.nn.log_softmax(model.logits(hidden[rows, asked]))
        return jnp.mean(jnp.exp(log[rows, answers]))

    return causal_trace(model, tokens, ctx, model.embed(others, ctx), score, place=kind)


def trace(
    loaded: Loaded, tokens: np.ndarray, others: np.ndarray, ctx: Context, asked: np.ndarray, answers: np.ndarray
) -> Trace:
    """The maps of a run, on prompts and the answers predicted at `asked`, of kinds of places that all layers have.

    Raises `UserError` where a prompt is the one it is traced against.
    """
    if (same := np.all(tokens == others, axis=1)).any():
        raise UserError(
            f'prompt {int(np.argmax(same))} and the one it is traced against are the same, so nothing is corrupted; '
            'take other rows'
        )
    setup, known, depth = loaded.setup, places(loaded.model()), one_stack(loaded.model()).depth
    kinds = [kind for kind in KINDS if all(f'layers[{layer}].{kind}' in known for layer in range(depth))]

    def run(kind: str) -> Any:
        def of(variables: nnx.State) -> Any:
            model = nnx.merge(setup.graphdef, variables)
            left, right, where, answer = map(jnp.asarray, (tokens, others, asked, answers))
            return traced(model, left, right, ctx, where, answer, kind)

        return jax.device_get(setup.jit(of)(loaded.variables))

    found = {kind: run(kind) for kind in kinds}
    _, clean, corrupted = (float(each) if np.ndim(each) == 0 else each for each in found[kinds[0]])
    apart = clean - corrupted if clean - corrupted > LEAST * clean else float('nan')
    maps = {kind: (np.asarray(each[0]) - corrupted) / apart for kind, each in found.items()}
    return Trace(clean, corrupted, maps)


def analyse_trace(
    workdir: pathlib.Path,
    printer: Printer,
    step: int | None,
    split: str | None,
    rows: int,
    *,
    ema: bool = False,
    other_data: bool = False,
) -> Trace:
    """Traces the last answers of the first `rows` rows of a split, each against the next row.

    Also says by how much the probability falls without each head of the mixers that have heads. Writes
    `analysis/<step>-trace.json`. Raises `UserError` for a run without tokens or labels, and for fewer than two rows.
    """
    loaded = load_run(workdir, step, ema=ema)
    task = loaded.setup.task
    check_data(workdir, task.describe(), other=other_data)
    if not isinstance(loaded.setup.model, Stacked):
        raise UserError(f'{workdir} holds a {type(loaded.setup.model).__name__}, which has no layers to look into')
    if rows < 2:
        raise UserError(f'rows is {rows}; every row is traced against another, so there must be two or more')
    split = task.evaluated_split if split is None else split
    batch = stacked(first_rows(loaded, split, rows))
    tokens, asked, answers, ctx = prompts(batch, task.labels)
    found = trace(loaded, tokens, np.roll(tokens, -1, axis=0), ctx, asked, answers)
    heads = without_heads(loaded, tokens, ctx, asked, answers)
    path = workdir / 'analysis' / f'{loaded.name}-trace.json'
    record: dict[str, Any] = {'step': loaded.step, 'ema': ema, 'split': split, 'rows': rows, 'other_data': other_data}
    record |= {'clean': found.clean, 'corrupted': found.corrupted}
    record['maps'] = {kind: each.tolist() for kind, each in found.maps.items()}
    record['without_head'] = {f'{layer}.{head}': value for (layer, head), value in heads.items()}
    write_results(path, record)
    for table in _tables(found, heads, f'{workdir}, step {loaded.name}, {split}'):
        printer.table(table)
    printer.line(f'written: {path}')
    return found


def prompts(batch: Batch, labels: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, Context]:
    """Tokens of rows, where their last answer is asked for, the answer, and their context.

    Raises `UserError` for rows of real numbers, of one label a row that is no token, of documents that are packed, and
    for a row without an answer.
    """
    tokens, targets = np.asarray(batch['tokens']), np.asarray(batch.get(labels, np.zeros(0)))
    if tokens.ndim != 2 or targets.ndim != 2 or not np.issubdtype(targets.dtype, np.integer):
        raise UserError('traced are answers that are tokens, such as those of language models and of recall')
    weights = np.asarray(batch['weights']) > 0
    if not weights.any(axis=1).all():
        raise UserError(f'row {int(np.argmin(weights.any(axis=1)))} asks for no token; take rows with an answer each')
    for row, segments in enumerate(np.asarray(batch['segments'])):
        if len(np.unique(segments[segments > 0])) > 1:
            raise UserError(f'row {row} holds several documents; traced are rows of one, so give a run of such data')
    last = weights.shape[1] - 1 - np.argmax(weights[:, ::-1], axis=1)
    rows = np.arange(len(tokens))
    asked = np.asarray(batch['at'])[rows, last] if 'at' in batch else last
    ctx = context({name: jnp.asarray(value) for name, value in batch.items()})
    return tokens, asked, targets[rows, last], ctx


def without_heads(
    loaded: Loaded, tokens: np.ndarray, ctx: Context, asked: np.ndarray, answers: np.ndarray
) -> dict[tuple[int, int], float]:
    """The probability of the answers without each head, by layer and head."""
    rows = np.arange(len(tokens))

    def of(variables: nnx.State) -> dict[tuple[int, int], Array]:
        model = nnx.merge(loaded.setup.graphdef, variables)

        def score(hidden: Array) -> Float[Array, '']:
            return jnp.mean(jnp.exp(jax.nn.log_softmax(model.logits(hidden[rows, asked]))[rows, answers]))

        return ablated(model, jnp.asarray(tokens), ctx, score)

    return {place: float(value) for place, value in jax.device_get(loaded.setup.jit(of)(loaded.variables)).items()}


def stacked(rows: Sequence[Batch]) -> dict[str, np.ndarray]:
    """Rows as one batch."""
    return {name: np.concatenate([np.asarray(row[name]) for row in rows]) for name in rows[0]}


def _tables(found: Trace, heads: Mapping[tuple[int, int], float], title: str) -> list[Table]:
    three = digits('.3f')
    columns = [Column('layer', right=True)]
    for kind in found.maps:
        columns += [Column(kind, three, right=True), Column(f'at token of {kind}', right=True, rank=1)]
    depth = len(next(iter(found.maps.values())))
    rows = []
    for layer in range(depth):
        cells: list[Any] = [layer]
        for each in found.maps.values():
            cells += [float(each[layer].max()), None if np.isnan(each[layer]).any() else int(each[layer].argmax())]
        rows.append(tuple(cells))
    caption = f'{title}: answers with {found.clean:.3f}, in passes of others {found.corrupted:.3f}; what comes back'
    if any(np.isnan(each).any() for each in found.maps.values()):
        caption += '; nothing is to come back, for others answer as well'
    tables = [Table('trace', columns, rows, caption)]
    if heads:
        columns = [Column('layer', right=True), Column('head', right=True), Column('probability without', three, True)]
        lines = [(layer, head, value) for (layer, head), value in heads.items()]
        tables.append(Table('heads', columns, lines, 'without one head'))
    return tables
