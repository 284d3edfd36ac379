"""`attnlab analyse --inside`: what each layer of a trained model reads, keeps, forgets and would already predict."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from attnlab.analysis import geometry, memory, output_head, statistics
from attnlab.analysis.inside_figure import Drawn, draw
from attnlab.analysis.interventions import hidden_with
from attnlab.analysis.lens import (
    Seen,
    Translator,
    fitted,
    inputs_of,
    logit_lens,
    residuals,
    translated,
    translated_divergence,
)
from attnlab.analysis.memory import ByDistance, Call
from attnlab.analysis.question import Question
from attnlab.context import PADDING, Context
from attnlab.errors import UserError
from attnlab.mixers.mixer import Mixer, ReadsWeights
from attnlab.models.predictor import one_stack
from attnlab.random import key_for
from attnlab.runs.loading import Loaded
from attnlab.tables import Column, Printer, Table, digits
from attnlab.tasks.task import Batch

TARGETS = 8
"""Tokens of a row whose dependence on others is measured."""

MAPPED = 32
"""Tokens of the map of a mixer that has no weights."""

POINTS = 1000
"""The most hidden states of a layer whose geometry is described."""

POSITIONS = 32
"""The most positions at which the size of a state is recorded."""

REPEATED = 4
"""Rows of drawn tokens, each read twice in succession, of which heads are asked."""

FOUR, SHORT = digits('.4f'), digits('.4g')
"""How numbers of tables are written."""


@dataclasses.dataclass(frozen=True)
class Layer:
    """What is said of a layer.

    Attributes:
      mixer: its class.
      lens: of predictions from the stream after it: loss, share that names the class that the last layer names, and
        divergence of these from the last.
      geometry: what it does to the stream: how linear, how far; effective rank and dimension afterwards; the largest
        number, also over the median.
      memory: of its mixer: the mean distance of influence, the distance within which nine tenths lie, and the
        influences by distance.
      heads: statistics of attention by head; empty of other mixers.
      tuned: as `lens`, through the tuned lens, on rows that it was not fitted to, and the divergence of the logit lens
        on these; empty where it was not asked for.
      states: of each array of the state by name, by head: the share of a change that a token leaves, half-lives, and
        norms at some positions; empty where none is kept.
    """

    mixer: str
    lens: Mapping[str, float]
    geometry: Mapping[str, float | None]
    memory: Mapping[str, Any]
    heads: Mapping[str, list[float | None]]
    states: Mapping[str, Mapping[str, Any]]
    tuned: Mapping[str, float]


@dataclasses.dataclass(frozen=True)
class Inside:
    """The results of `analyse_inside`.

    Attributes:
      embedding: the lens on the stream before the first layer.
      tuned_embedding: the tuned one, likewise.
      memory: as of a layer, of the whole model: hidden states by embedded inputs.
      layers: in order.
    """

    embedding: Mapping[str, float]
    tuned_embedding: Mapping[str, float]
    memory: Mapping[str, Any]
    layers: tuple[Layer, ...]


def analyse_inside(question: Question, printer: Printer, *, tuned: bool = False) -> Inside:
    """Looks inside a checkpoint on rows of a split; writes `analysis/<step>-inside.json` and a figure.

    Influences are of the second half of a row on what lies up to half a row back, inside of a document; of a model that
    is bidirectional, of tokens all over the row, to both sides. The tuned lens is fitted to the first half of the rows
    and measured on the others. Raises `UserError` for rows that do not exist, a model without layers or with
    a head that reads more than their output, and one row for the tuned lens.
    """
    question.check_stream()
    one_stack(question.loaded.setup.model)
    if tuned and question.rows < 2:
        raise UserError(
            f'rows is {question.rows}; the tuned lens is fitted to one half of the rows and measured on the other'
        )
    found, drawn = looked_into(question.loaded, question.batches(), tuned=tuned)
    record, tables = question.record() | {'tuned': tuned}, _tables(found, question.title)
    question.report(printer, '-inside', record, dataclasses.asdict(found), tables, functools.partial(draw, drawn))
    return found


def looked_into(loaded: Loaded, rows: Sequence[Batch], *, tuned: bool = False) -> tuple[Inside, Drawn]:
    """The results for rows, each one batch, and what is drawn of them."""
    setup, layers = loaded.setup, memory.mixers(loaded.model())

    def lens(variables: nnx.State, row: Batch) -> Seen:
        return logit_lens(setup.task, nnx.merge(setup.graphdef, variables), row)

    def passed(variables: nnx.State, row: Batch) -> tuple[Array, Array, list[Call]]:
        model = nnx.merge(setup.graphdef, variables)
        inputs, ctx = inputs_of(setup.task, model, row)
        segments = model.layout(ctx).segments_or_ones()
        return residuals(model, inputs, ctx), segments, memory.calls(model, inputs, ctx)

    def depends(variables: nnx.State, row: Batch) -> ByDistance:
        model = nnx.merge(setup.graphdef, variables)
        inputs, ctx = inputs_of(setup.task, model, row)

        def hidden(embedded: Array) -> Array:
            return hidden_with(model, inputs, ctx, {'embedding': lambda x: embedded})

        return _by_distance(hidden, model.embed(inputs, ctx), model.layout(ctx), model.streaming)

    seen, whole = (_sum(map(functools.partial(setup.jit(one), loaded.variables), rows)) for one in (lens, depends))
    lenses = [_lens_numbers(seen, layer) for layer in range(len(layers) + 1)]
    passes = list(map(functools.partial(setup.jit(passed), loaded.variables), rows))
    clouds = _clouds([jax.device_get(one[:2]) for one in passes])
    by_row = [called for _, _, called in passes]
    asking = Asking.of(loaded)
    influences = [
        _sum(asking.influence(mixer, *calls[index]) for calls in by_row) for index, mixer in enumerate(layers)
    ]
    states: list[dict[str, dict[str, Any]]] = [{} for _ in layers]
    if setup.model.streaming:
        states = [_states(asking, mixer, [calls[index] for calls in by_row]) for index, mixer in enumerate(layers)]
    heads_of = _head_statistics(loaded, asking, layers, by_row)
    through = _tuned(loaded, rows, [one[0] for one in passes]) if tuned else [{} for _ in lenses]
    found = Inside(
        embedding=lenses[0],
        tuned_embedding=through[0],
        memory=_memory_numbers(whole),
        layers=tuple(
            Layer(
                mixer=type(mixer).__name__,
                lens=lenses[index + 1],
                geometry=_geometry(*clouds[index : index + 2]),
                memory=_memory_numbers(influences[index]),
                heads=heads_of[index],
                states=states[index],
                tuned=through[index + 1],
            )
            for index, mixer in enumerate(layers)
        ),
    )
    return found, Drawn(
        losses=[one['loss'] for one in lenses],
        tuned=[one['loss'] for one in through] if tuned else [],
        influences=[layer.memory['influence'] for layer in found.layers],
        states=[layer.states for layer in found.layers],
        maps=[_map(asking, mixer, calls) for mixer, calls in zip(layers, by_row[0], strict=True)],
        weighted=[isinstance(mixer, ReadsWeights) for mixer in layers],
    )


class Asking(NamedTuple):
    """What is asked of a mixer and a call, compiled once for all layers that are alike.

    Attributes:
      influence: sums of squared influences by distance.
      carried: what became of its state.
      map: sizes of derivatives of outputs spread over the row by inputs.
      read: statistics of heads of attention.
      weights: of attention.
    """

    influence: Callable[..., ByDistance]
    carried: Callable[..., dict[str, memory.Carried]]
    map: Callable[..., Array]
    read: Callable[..., dict[str, Array]]
    weights: Callable[..., Array]

    @classmethod
    def of(cls, loaded: Loaded) -> 'Asking':
        """With the precision and the mesh of a run."""
        streaming = loaded.setup.model.streaming

        def influence(mixer: Mixer, x: Array, ctx: Context) -> ByDistance:
            return _by_distance(lambda x: mixer(x, ctx)[0], x, ctx, streaming)

        def carried(mixer: Mixer, x: Array, ctx: Context) -> dict[str, memory.Carried]:
            return memory.carried(mixer, x, ctx, key_for(0, 0, 'change of a state'))

        def sizes(mixer: Mixer, x: Array, ctx: Context) -> Array:
            targets = jnp.asarray(np.linspace(0, x.shape[1] - 1, min(MAPPED, x.shape[1])).astype(int))
            return jnp.sqrt(memory.influence(lambda x: mixer(x, ctx)[0], x, targets, key_for(0, 0, 'influence')))

        def weights(mixer: Any, x: Array, ctx: Context) -> Array:
            return mixer.read_weights(x, ctx)[0]

        return cls(*map(loaded.setup.jit, (influence, carried, sizes, _read, weights)))


def _sum(found: Iterable[Any]) -> Any:
    return functools.reduce(lambda one, other: jax.tree.map(jnp.add, one, other), found)


def _lens_numbers(seen: Seen, layer: int) -> dict[str, float]:
    count = float(seen.asked)
    names = ('loss', 'agreement', 'divergence')
    return {name: float(sums[layer]) / count for name, sums in zip(names, seen[:3], strict=True)}


def _tuned(loaded: Loaded, rows: Sequence[Batch], streams: Sequence[Array]) -> list[dict[str, float]]:
    """Numbers of the tuned lens by layer, from the embedding on."""
    setup, half, (count, _, _, width) = loaded.setup, len(rows) // 2, streams[0].shape
    first = jnp.stack(streams[:half])
    batches = {name: np.stack([row[name] for row in rows[:half]]) for name in rows[0]}

    def mean(variables: nnx.State, translator: Translator, of: Array, last: Array, batches: Batch) -> Any:
        def one(each: tuple[Array, Array, Batch]) -> tuple[Array, Array]:
            of, last, batch = each
            model = nnx.merge(setup.graphdef, variables)
            return translated_divergence(setup.task, model, batch, translator, of, last)

        totals, asked = jax.lax.map(one, (of, last, batches))
        return jnp.sum(totals) / jnp.sum(asked)

    def both(variables: nnx.State, row: Batch, translators: Translator, streams: Array) -> tuple[Seen, Seen]:
        model = nnx.merge(setup.graphdef, variables)
        nothing = jax.tree.map(jnp.zeros_like, translators)
        return tuple(translated(setup.task, model, row, each, streams) for each in (translators, nothing))  # type: ignore[return-value]

    slopes, seen = setup.jit(jax.value_and_grad(mean, argnums=1)), setup.jit(both)

    def divergence(translator: Translator, layer: int) -> tuple[Array, Translator]:
        return slopes(loaded.variables, translator, first[:, layer], first[:, -1], batches)

    translators = fitted(divergence, width, count - 1)
    others = zip(rows[half:], streams[half:], strict=True)
    ours, plain = _sum(seen(loaded.variables, row, translators, of) for row, of in others)
    return [
        {**_lens_numbers(ours, layer), 'divergence_of_logit_lens': _lens_numbers(plain, layer)['divergence']}
        for layer in range(count)
    ]


def _clouds(found: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[Float[np.ndarray, 'n d']]:
    """The stream before every layer and after the last at tokens that are no padding, `POINTS` of them at most."""
    streams = np.concatenate([each[:, segments != PADDING] for each, segments in found], axis=1)
    places = np.linspace(0, streams.shape[1] - 1, min(POINTS, streams.shape[1])).astype(int)
    return list(streams[:, places].astype(np.float64))


def _geometry(before: Float[np.ndarray, 'n d'], after: Float[np.ndarray, 'n d']) -> dict[str, float | None]:
    sizes = np.abs(after)
    median = float(np.median(sizes))
    return {
        'linearity': geometry.linearity(before, after),
        'linearity_of_change': geometry.linearity(before, after - before),
        'linearity_of_nothing': min(1.0, before.shape[1] / max(len(before) - 1, 1)),
        'nonlinear_share': _largest_share(geometry.token_nonlinearity(before, after - before)),
        'change': float(np.linalg.norm(after - before) / np.linalg.norm(before)),
        'cosine': geometry.mean_cosine(before, after),
        'effective_rank': output_head.effective_rank(after - after.mean(axis=0)),
        'dimension': None if np.isnan(dimension := geometry.intrinsic_dimension(after)) else dimension,
        'max_abs': float(sizes.max()),
        'max_over_median': float(sizes.max()) / median if median else None,
    }


def _largest_share(errors: Float[np.ndarray, 'n']) -> float | None:
    """The share of what is not linear that the tenth of tokens has which are least so; a tenth where all are alike."""
    squares = np.sort(np.square(errors))[::-1]
    total = float(squares.sum())
    return float(squares[: max(1, len(squares) // 10)].sum()) / total if total else None


def _targets(length: int, streaming: bool) -> tuple[Int[Array, 'n'], int]:
    """The tokens that are asked what they depend on, and the distances that all of them may have."""
    first = length // 2 if streaming else 0
    count = min(TARGETS, length - first)
    return jnp.asarray(np.linspace(first, length - 1, count).astype(int)), max(length // 2, 1) if streaming else length


def _by_distance(function: Any, x: Array, ctx: Context, streaming: bool) -> ByDistance:
    targets, longest = _targets(x.shape[1], streaming)
    squares = memory.influence(function, x, targets, key_for(0, 0, 'influence'))
    return memory.by_distance(squares, targets, ctx.segments_or_ones(), longest=longest, two_sided=not streaming)


def _states(asking: Asking, mixer: Mixer, calls: Sequence[Call]) -> dict[str, dict[str, Any]]:
    found = [jax.device_get(asking.carried(mixer, *call)) for call in calls]
    segments = np.concatenate([call.ctx.segments_or_ones() for call in calls])
    return {name: _state_numbers([each[name] for each in found], segments) for name in found[0]}


def _state_numbers(found: Sequence[memory.Carried], segments: Int[np.ndarray, 'b t']) -> dict[str, Any]:
    norms, kept = (np.concatenate(each).astype(np.float64) for each in zip(*found, strict=True))
    there = (segments != PADDING)[..., None]
    counts = np.maximum(there.sum(axis=0), 1)
    sizes = np.sqrt(np.sum(np.square(norms) * there, axis=0) / counts)
    positions = np.linspace(0, len(sizes) - 1, min(POSITIONS, len(sizes))).astype(int)
    continued = np.asarray(memory.continued(jnp.asarray(segments)))
    shares = kept[continued]
    return {
        'kept': [float(np.mean(each)) for each in shares.T] if len(shares) else [],
        'half_life': [memory.half_life(each) for each in shares.T] if len(shares) else [],
        'positions': positions.tolist(),
        'norms': sizes[positions].T.tolist(),
    }


def _memory_numbers(found: ByDistance) -> dict[str, Any]:
    strengths = found.strengths()
    return {
        'mean_distance': memory.mean_distance(strengths),
        'reach': memory.reach(strengths),
        'influence': strengths.tolist(),
    }


def _head_statistics(
    loaded: Loaded, asking: Asking, layers: Sequence[Mixer], by_row: Sequence[Sequence[Call]]
) -> list[dict[str, list[float | None]]]:
    """By layer, statistics of every head of attention; nothing of another mixer."""
    setup = loaded.setup
    found: list[dict[str, list[float | None]]] = []
    for index, mixer in enumerate(layers):
        rows = [asking.read(mixer, *calls[index]) for calls in by_row] if isinstance(mixer, ReadsWeights) else []
        names = rows[0] if rows else ()
        found.append({name: _mean([row[name] for row in rows]) for name in names})
    half = min(setup.length // 2, setup.task.vocab)
    if not any(found) or not setup.model.decodes or half < 2:
        return found
    tokens = repeated_tokens(half, setup.task.vocab)

    def called(variables: nnx.State, tokens: Array) -> list[Call]:
        return memory.calls(nnx.merge(setup.graphdef, variables), tokens, Context.full(*tokens.shape))

    calls = setup.jit(called)(loaded.variables, tokens)
    for numbers, mixer, call in zip(found, layers, calls, strict=True):
        if numbers:
            weights = np.asarray(asking.weights(mixer, *call), np.float64)
            numbers |= {'induction': induction(weights).tolist(), 'retrieval': retrieval(weights).tolist()}
    return found


def _mean(found: Sequence[Array]) -> list[float | None]:
    """Means of what is not NaN; `None` where all is."""
    values = np.asarray(found, np.float64)
    known = ~np.isnan(values)
    counts = known.sum(axis=0)
    means = np.where(known, values, 0).sum(axis=0) / np.maximum(counts, 1)
    return [float(mean) if count else None for mean, count in zip(means, counts, strict=True)]


def repeated_tokens(half: int, vocab: int) -> Int[Array, 'b t']:
    """Rows of `half` different tokens, drawn, and the same again."""
    keys = jax.random.split(key_for(0, 0, 'repeated tokens'), REPEATED)
    first = jnp.stack([jax.random.permutation(key, vocab)[:half] for key in keys])
    return jnp.concatenate([first, first], axis=1)


def induction(weights: Float[np.ndarray, 'b h t s']) -> Float[np.ndarray, ' h']:
    """The mean weight, in the second half of a row that repeats, on the token after the one that was the same.

    Olsson et al. 2022, https://arxiv.org/abs/2209.11895.
    """
    half = weights.shape[2] // 2
    places = np.arange(half, 2 * half)
    return weights[:, :, places, places - half + 1].mean(axis=(0, 2))


def retrieval(weights: Float[np.ndarray, 'b h t s']) -> Float[np.ndarray, ' h']:
    """How often, in the second half of a row that repeats, a head reads most of the token that is to be copied.

    After Wu et al. 2024, https://arxiv.org/abs/2404.15574, whose rows are texts with a sentence hidden in them, and who
    count the tokens that the model then says.
    """
    half = weights.shape[2] // 2
    places = np.arange(half, 2 * half)
    return np.mean(weights[:, :, places].argmax(axis=-1) == places - half + 1, axis=(0, 2))


def _read(mixer: Any, x: Array, ctx: Context) -> dict[str, Array]:
    """Means over the tokens of a row, by head; of signed weights by their sizes."""
    weights, visible = mixer.read_weights(x, ctx)
    segments = ctx.segments_or_ones()
    real = (segments != PADDING)[:, None]
    sizes = jnp.abs(weights.astype(jnp.float32))
    total = jnp.sum(sizes, axis=-1, keepdims=True)
    shares = sizes / jnp.where(total > 0, total, 1)
    places = jnp.arange(weights.shape[-1])
    distances = jnp.abs(places[:, None] - places[None])
    goes_on = memory.continued(segments)[:, None, 1:]

    def mean(values: Array, where: Array) -> Array:
        return jnp.mean(values, axis=(0, 2), where=jnp.broadcast_to(where, values.shape))

    return {
        'entropy': mean(statistics.entropy(weights), real),
        'distance': mean(jnp.sum(shares * distances[None, None], axis=-1), real),
        'sink': jnp.mean(statistics.sink_mass(weights, visible, segments), axis=0),
        'previous': mean(jnp.diagonal(shares[:, :, 1:], axis1=2, axis2=3), goes_on),
    }


def _map(asking: Asking, mixer: Mixer, call: Call) -> Float[np.ndarray, 'h _ s']:
    """What tokens of the first row read: weights by head, or of a mixer that has none the sizes of derivatives."""
    if isinstance(mixer, ReadsWeights):
        return np.asarray(asking.weights(mixer, *call)[0], np.float32)
    return np.asarray(asking.map(mixer, *call), np.float32)[None, :, 0]


def _tables(found: Inside, title: str) -> list[Table]:
    tables = [_layers_table(found, title)]
    if found.tuned_embedding:
        tables.append(_tuned_table(found))
    if any(layer.states for layer in found.layers):
        tables.append(_states_table(found))
    if any(layer.heads for layer in found.layers):
        tables.append(_heads_table(found))
    return tables


def _layers_table(found: Inside, title: str) -> Table:
    columns = [
        Column('layer', right=True),
        Column('mixer', rank=2),
        Column('loss', FOUR, right=True),
        Column('agreement', SHORT, right=True),
        Column('linearity', FOUR, right=True, rank=4),
        Column('of its change', FOUR, right=True, rank=3),
        Column('rank', SHORT, right=True, rank=5),
        Column('mean distance', SHORT, right=True),
        Column('reach', right=True, rank=1),
    ]
    first = (None, 'embedding', found.embedding['loss'], found.embedding['agreement'], *(None,) * 5)
    rows = [
        (
            index,
            layer.mixer,
            layer.lens['loss'],
            layer.lens['agreement'],
            layer.geometry['linearity'],
            layer.geometry['linearity_of_change'],
            layer.geometry['effective_rank'],
            layer.memory['mean_distance'],
            layer.memory['reach'],
        )
        for index, layer in enumerate(found.layers)
    ]
    last = (None, 'model', *(None,) * 5, found.memory['mean_distance'], found.memory['reach'])
    return Table('layers', columns, [first, *rows, last], f'{title}: predictions from the stream, and memory')


def _tuned_table(found: Inside) -> Table:
    columns = [
        Column('layer', right=True),
        Column('loss', FOUR, right=True),
        Column('agreement', SHORT, right=True, rank=1),
        Column('divergence', FOUR, right=True),
        Column('of the logit lens', FOUR, right=True),
    ]
    names = ('loss', 'agreement', 'divergence', 'divergence_of_logit_lens')
    lenses = [(None, found.tuned_embedding), *((index, layer.tuned) for index, layer in enumerate(found.layers))]
    rows = [(index, *(one[name] for name in names)) for index, one in lenses]
    return Table('tuned', columns, rows, 'the tuned lens, fitted to the first half of the rows')


def _states_table(found: Inside) -> Table:
    columns = [
        Column('layer', right=True),
        Column('state'),
        Column('kept', FOUR, right=True),
        Column('shortest half-life', SHORT, right=True, rank=1),
        Column('longest', SHORT, right=True, rank=2),
        Column('norm', SHORT, right=True),
    ]
    rows = [
        (
            index,
            name,
            float(np.mean(one['kept'])) if one['kept'] else None,
            min((each for each in one['half_life'] if each is not None), default=None),
            max((each for each in one['half_life'] if each is not None), default=None),
            float(np.linalg.norm([norms[-1] for norms in one['norms']])),
        )
        for index, layer in enumerate(found.layers)
        for name, one in layer.states.items()
    ]
    return Table('states', columns, rows, 'states: what a token leaves of them, and their size at the end')


def _heads_table(found: Inside) -> Table:
    kinds = list(dict.fromkeys(name for layer in found.layers for name in layer.heads))
    shown = [Column(name, FOUR, right=True, rank=rank) for rank, name in enumerate(kinds)]
    rows = [
        (index, head, *(layer.heads[name][head] if name in layer.heads else None for name in kinds))
        for index, layer in enumerate(found.layers)
        if layer.heads
        for head in range(len(next(iter(layer.heads.values()))))
    ]
    return Table('heads', [Column('layer', right=True), Column('head', right=True), *shown], rows, 'heads of attention')
