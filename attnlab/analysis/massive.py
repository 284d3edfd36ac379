"""`attnlab analyse --massive`: the few largest activations of the stream, where they stand, and what they are for."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float, Int

from attnlab.analysis.asked import shown_by
from attnlab.analysis.interventions import Change, hidden_with, values_at, with_methods
from attnlab.analysis.lens import inputs_of
from attnlab.analysis.question import Question
from attnlab.errors import UserError
from attnlab.models.predictor import one_stack
from attnlab.runs.loading import Loaded
from attnlab.tables import Column, Printer, Table, digits
from attnlab.tasks.task import Batch

LEAST = 100.0
"""The magnitude that a massive activation exceeds."""

MEDIANS = 1000.0
"""How many times the median magnitude it has at least."""

COUNT = 3
"""How many of the largest are told."""

CHANGES = ('massive_zero', 'massive_mean', 'largest_zero', 'largest_mean')
"""What is set to what: massive activations, or the three largest of every row, to zero or to their mean by channel."""


def massive(x: Float[Array, 'b t d'], real: Bool[Array, 'b t']) -> Bool[Array, 'b t d']:
    """Which activations are massive: above 100, and at least 1000 times the median magnitude of their row.

    Of tokens that are no padding. Sun et al. 2024, https://arxiv.org/abs/2402.17762.
    """
    sizes = jnp.abs(x)
    return (sizes > LEAST) & (sizes >= MEDIANS * medians(x, real)[:, None, None]) & real[..., None]


def medians(x: Float[Array, 'b t d'], real: Bool[Array, 'b t']) -> Float[Array, ' b']:
    """The median magnitude of every row, of tokens that are no padding."""
    return jnp.nanmedian(jnp.where(real[..., None], jnp.abs(x), jnp.nan), axis=(1, 2))


def largest(x: Float[Array, 'b t d'], real: Bool[Array, 'b t']) -> Bool[Array, 'b t d']:
    """The three largest activations of every row, and such as are as large as the third."""
    sizes = jnp.abs(x) * real[..., None]
    least = jax.lax.top_k(sizes.reshape(len(x), -1), COUNT)[0][:, -1]
    return (sizes >= least[:, None, None]) & real[..., None]


@dataclasses.dataclass(frozen=True)
class Place:
    """Where an activation stands: of which row of those looked at, token and channel, and how large it is."""

    row: int
    token: int
    channel: int
    value: float


@dataclasses.dataclass(frozen=True)
class Level:
    """The stream before the first layer or after one.

    Attributes:
      median: the median over rows of the median magnitude of a row.
      largest: the three largest, in order.
      massive: how many are, of all rows.
      channels: how many of these stand in which channel.
      tokens: how many at which token.
      losses: by `CHANGES`, the loss where what is named is set in this place; those of massive ones only if there are.
    """

    median: float
    largest: tuple[Place, ...]
    massive: int
    channels: Mapping[int, int]
    tokens: Mapping[int, int]
    losses: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Massive:
    """The loss as it is, how many tokens a row has in the stream, and this before the first layer and after each."""

    loss: float
    length: int
    levels: tuple[Level, ...]


class _Row(NamedTuple):
    """What is said of the stream of a row in every place, `l`; sums and counts are of what `CHANGES` set."""

    median: Float[Array, ' l']
    values: Float[Array, 'l n']
    places: Int[Array, 'l n']
    channels: Int[Array, 'l d']
    tokens: Int[Array, 'l t']
    sums: Float[Array, 'l 2 d']
    counts: Int[Array, 'l 2 d']


def looked_at(loaded: Loaded, rows: Sequence[Batch]) -> Massive:
    """The results for rows, each one batch. Raises `UserError` for a residual with several streams."""
    setup = loaded.setup
    depth = one_stack(loaded.model()).depth
    places = ['embedding', *(f'layers[{layer}].residual' for layer in range(depth))]

    def described(variables: nnx.State, row: Batch) -> _Row:
        model = nnx.merge(setup.graphdef, variables)
        inputs, ctx = inputs_of(setup.task, model, row)
        found = values_at(model, inputs, ctx, places)
        real = model.layout(ctx).segments_or_ones() > 0
        return jax.tree.map(lambda *each: jnp.stack(each), *(_described(found[place], real) for place in places))

    def measured(variables: nnx.State, row: Batch, means: Array, at: Array, kind: Array) -> Any:
        model = nnx.merge(setup.graphdef, variables)

        def hidden(own: Any, inputs: Array, ctx: Any, state: Any = None) -> Any:
            real = model.layout(ctx).segments_or_ones() > 0
            changes = {place: _set(index, at, kind, means, real) for index, place in enumerate(places)}
            return hidden_with(model, inputs, ctx, changes), state

        found = setup.task.measure(with_methods(model, hidden=hidden), row, None)['loss']
        return found.total, found.count

    describe, measure = setup.jit(described), setup.jit(measured)
    found = [jax.device_get(describe(loaded.variables, row)) for row in rows]
    sums, counts = sum(each.sums for each in found), sum(each.counts for each in found)
    means = sums / np.maximum(counts, 1)

    def loss(at: int, kind: int) -> float:
        here = np.int32(at), np.int32(kind)
        totals = [jax.device_get(measure(loaded.variables, row, means, *here)) for row in rows]
        return float(sum(total for total, _ in totals) / sum(count for _, count in totals))

    levels = []
    for at in range(len(places)):
        count = int(counts[at, 0].sum())
        kinds = range(len(CHANGES)) if count else range(2, len(CHANGES))
        levels.append(_level(found, at, count, {CHANGES[kind]: loss(at, kind) for kind in kinds}))
    return Massive(loss(-1, 0), found[0].tokens.shape[1], tuple(levels))


def _described(x: Array, real: Array) -> _Row:
    if x.ndim != 3:
        raise UserError('the residual has several streams; activations are looked for in one')
    x = x.astype(jnp.float32)
    sizes = (jnp.abs(x) * real[..., None]).reshape(-1)
    _, places = jax.lax.top_k(sizes, COUNT)
    picked = jnp.stack([massive(x, real), largest(x, real)])
    return _Row(
        median=medians(x, real)[0],
        values=x.reshape(-1)[places],
        places=places,
        channels=jnp.sum(picked[0], axis=(0, 1)),
        tokens=jnp.sum(picked[0], axis=(0, 2)),
        sums=jnp.sum(picked * x[None], axis=(1, 2)),
        counts=jnp.sum(picked, axis=(1, 2)),
    )


def _set(index: int, at: Array, kind: Array, means: Array, real: Array) -> Change:
    """A change of the place `index` where it is the one that is set, by the number of one of `CHANGES`."""

    def change(x: Array) -> Array:
        wide = x.astype(jnp.float32)
        picked = jnp.where(kind < 2, massive(wide, real), largest(wide, real))
        value = jnp.where(kind % 2 == 0, 0, means[index, kind // 2])
        return jnp.where((index == at) & picked, value.astype(x.dtype)[None, None], x)

    return change


def _level(found: Sequence[_Row], at: int, count: int, losses: Mapping[str, float]) -> Level:
    width = found[0].channels.shape[1]
    known = [
        Place(row, int(place) // width, int(place) % width, float(value))
        for row, each in enumerate(found)
        for place, value in zip(each.places[at], each.values[at], strict=True)
    ]
    known.sort(key=lambda place: -abs(place.value))
    channels, tokens = (sum(getattr(each, name)[at] for each in found) for name in ('channels', 'tokens'))
    return Level(
        median=float(np.median([each.median[at] for each in found])),
        largest=tuple(known[:COUNT]),
        massive=count,
        channels={int(index): int(channels[index]) for index in np.flatnonzero(channels)},
        tokens={int(index): int(tokens[index]) for index in np.flatnonzero(tokens)},
        losses=losses,
    )


def analyse_massive(question: Question, printer: Printer) -> Massive:
    """Looks for massive activations of a checkpoint on rows of a split, and sets them otherwise.

    Writes `analysis/<step>-massive.json`. Raises `UserError` for rows that do not exist, a model without layers or
    with a head that reads more than their output, and a residual with several streams.
    """
    question.check_stream()
    batches = question.batches()
    found = looked_at(question.loaded, batches)
    tables = _tables(found, batches, shown_by(question.loaded, question.workdir), question.title)
    question.report(printer, '-massive', question.record(), dataclasses.asdict(found), tables)
    return found


def _tables(found: Massive, batches: Sequence[Batch], shown: Any, title: str) -> list[Table]:
    short, four = digits('.4g'), digits('+.4f')
    names = [None, *range(len(found.levels) - 1)]
    layer = Column('layer', right=True)
    columns = [layer, Column('median', short, right=True)]
    columns += [Column(name, short, right=True) for name in ('largest', 'second', 'third')]
    columns += [Column('massive', right=True)]
    sizes = [
        (name, level.median, *(abs(place.value) for place in level.largest), level.massive)
        for name, level in zip(names, found.levels, strict=True)
    ]
    caption = f'{title}: magnitudes in the stream; massive are those above {LEAST:g} and {MEDIANS:g} medians'
    caption += '' if any(level.massive for level in found.levels) else ', of which there are none'
    tables = [Table('magnitudes', columns, sizes, caption)]

    def token(place: Place) -> Any:
        """The token, of rows of tokens to which the model adds none."""
        row = np.asarray(batches[place.row]['tokens'])[0]
        known = row.ndim == 1 and np.issubdtype(row.dtype, np.integer) and len(row) == found.length
        return shown(int(row[place.token])) if known else None

    columns = [layer, Column('row', right=True, rank=2), Column('at', right=True), Column('token', rank=1)]
    columns += [Column('channel', right=True), Column('value', short, right=True)]
    where = [
        (name, place.row, place.token, token(place), place.channel, place.value)
        for name, level in zip(names, found.levels, strict=True)
        for place in level.largest
    ]
    tables.append(Table('largest', columns, where, 'where the largest stand'))
    titles = ('massive zero', 'massive mean', 'largest zero', 'largest mean')
    columns = [layer, *(Column(each, four, right=True) for each in titles)]
    losses = [
        (name, *(level.losses[kind] - found.loss if kind in level.losses else None for kind in CHANGES))
        for name, level in zip(names, found.levels, strict=True)
    ]
    caption = f'the loss, {found.loss:.4f}, rises by so much where massive ones, or the three largest of a row, are set'
    tables.append(Table('loss', columns, losses, caption))
    return tables
