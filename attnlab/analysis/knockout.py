"""`attnlab analyse --knockout`: which tokens an answer reads, in which layers, by cutting what is read of them."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Bool, Float

from attnlab.analysis.asked import Prompts, Query, asked_of, asked_record
from attnlab.analysis.cuts import cuts, knockouts, layers_with
from attnlab.analysis.question import Question
from attnlab.errors import UserError
from attnlab.runs.loading import Loaded
from attnlab.tables import Column, Printer, Table, digits


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What is cut.

    Attributes:
      part: of mixers; see `attnlab.analysis.cuts.Cut`.
      sources: tokens of which nothing is read, together; empty: every token in turn.
      targets: tokens that read nothing of them; empty: the one at which the answer is predicted.
      layers: whose mixers are cut; empty: all that have the part.
      window: of so many layers about each, all are cut at once.
    """

    part: str
    sources: tuple[int, ...] = ()
    targets: tuple[int, ...] = ()
    layers: tuple[int, ...] = ()
    window: int = 1


@dataclasses.dataclass(frozen=True)
class Knockout:
    """The probability of an answer, on average over prompts, without what was cut.

    Attributes:
      clean: with nothing cut.
      layers: that were cut.
      sources: groups of tokens, each cut by itself.
      by_layer: by layer and group.
      everywhere: by group, cut in all layers at once.
    """

    clean: float
    layers: tuple[int, ...]
    sources: tuple[tuple[int, ...], ...]
    by_layer: Float[np.ndarray, 'n g']
    everywhere: Float[np.ndarray, 'g']


def knockout(loaded: Loaded, asked: Query, wanted: Wanted) -> Knockout:
    """What is left of answers of a run. Raises `UserError` for an unknown part, layer or token."""
    setup, length = loaded.setup, asked.tokens.shape[1]
    layers = wanted.layers or layers_with(loaded.model(), wanted.part)
    cuts(loaded.model(), wanted.part, layers, jnp.zeros(length, bool), jnp.zeros(length, bool))
    for name in ('sources', 'targets'):
        if beyond := [token for token in getattr(wanted, name) if token >= length]:
            raise UserError(f'{name} holds {beyond[0]}; the prompts have tokens 0 to {length - 1}')
    last = int(asked.positions.max()) + 1 if setup.model.streaming else length
    sources = (wanted.sources,) if wanted.sources else tuple((token,) for token in range(last))
    targets = np.arange(length)[None] == asked.positions[:, None]
    if wanted.targets:
        targets = np.broadcast_to(_mask(wanted.targets, length), targets.shape)
    groups = np.stack([np.broadcast_to(_mask(group, length), targets.shape) for group in sources])

    def of(variables: nnx.State) -> Any:
        model: Any = nnx.merge(setup.graphdef, variables)
        return knockouts(
            model,
            jnp.asarray(asked.tokens),
            asked.ctx,
            wanted.part,
            layers,
            asked.score(model),
            groups=jnp.asarray(groups),
            targets=jnp.asarray(targets),
            window=wanted.window,
        )

    by_layer, everywhere, clean = jax.device_get(setup.jit(of)(loaded.variables))
    return Knockout(float(clean), layers, sources, np.asarray(by_layer), np.asarray(everywhere))


def analyse_knockout(question: Question, printer: Printer, wanted: Wanted, *, own: Prompts | None = None) -> Knockout:
    """Cuts what the answers of rows of a split, or of prompts of one's own, read of other tokens.

    Writes `analysis/<step>-knockout-<part>.json`. Raises `UserError` for a run without tokens or labels, and for an
    unknown part, layer or token.
    """
    question.check_layers()
    asked = asked_of(question, own)
    found = knockout(question.loaded, asked, wanted)
    record = asked_record(question, asked, own)
    record |= dataclasses.asdict(wanted) | {'layers': found.layers, 'sources': found.sources}
    numbers = {'clean': found.clean, 'by_layer': found.by_layer.tolist(), 'everywhere': found.everywhere.tolist()}
    table = _table(found, asked, wanted, f'{question.checkpoint}, {asked.of}')
    question.report(printer, f'-knockout-{wanted.part}', record, numbers, (table,))
    return found


def _mask(tokens: Sequence[int], length: int) -> Bool[np.ndarray, 't']:
    return np.isin(np.arange(length), tokens)


def _named(tokens: Sequence[int]) -> str:
    return f'token{"s" * (len(tokens) > 1)} {", ".join(map(str, tokens))}'


def _table(found: Knockout, asked: Query, wanted: Wanted, title: str) -> Table:
    four, columns = digits('.4f'), [Column('layer', right=True)]
    lines = [*zip(found.layers, found.by_layer, strict=True), ('all', found.everywhere)]
    rows: list[tuple[Any, ...]]
    if wanted.sources:
        of = (
            f'tokens {", ".join(map(str, wanted.sources))}' if len(wanted.sources) > 1 else f'token {wanted.sources[0]}'
        )
        columns += [Column('probability', four, right=True)]
        rows = [(layer, float(values[0])) for layer, values in lines]
    else:
        of = 'one token'
        columns += [Column('lowest', four, right=True), Column('without token', right=True)]
        columns += [Column('highest', four, right=True, rank=1), Column('without that', right=True, rank=1)]
        rows = [
            (
                layer,
                float(values.min()),
                asked.at(found.sources[int(values.argmin())][0]),
                float(values.max()),
                asked.at(found.sources[int(values.argmax())][0]),
            )
            for layer, values in lines
        ]
    readers = _named(wanted.targets) if wanted.targets else 'the asking token'
    about = f', in {wanted.window} layers about each' if wanted.window > 1 else ''
    caption = f'{title}: answers with {found.clean:.4f}; with {wanted.part} cut from {of} to {readers}{about}'
    return Table('knockout', columns, rows, caption)
