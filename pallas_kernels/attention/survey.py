"""The statistics of weight maps that must know their rows before their weights, in the portable form."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.attention import sweep
from pallas_kernels.attention.maps import Block, Statistics
from pallas_kernels.attention.problem import Operands, Rule

EMPTY: dict[str, tuple[float, ...]] = {
    'max': (-math.inf,),
    'min': (math.inf,),
    'sum': (0.0,),
    'argmax': (-math.inf, -1.0),
    'argmin': (math.inf, -1.0),
}
"""The reductions over no keys."""


def statistics(rule: Rule, operands: Operands, *, exact: bool) -> Statistics:
    """Returns the statistics of every row, `b g r t 1` each; none for a map that does not survey.

    Every reduction goes over the keys again, and holds nothing larger than a block; the scores of a single block are
    computed once. They are `exact` for passes whose own scores are: weights of statistics of others do not add up.
    """
    if not rule.weights.surveys:
        return ()
    dtype = operands.dtype()
    single = sweep.block(rule, sweep.whole(operands), exact) if sweep.tile(operands) is None else None

    def reduce(function: Any, kind: str | tuple[str, ...], *rows: jax.Array) -> Any:
        kinds = (kind,) if isinstance(kind, str) else kind

        def update(part: sweep.Part, rows: tuple[jax.Array, ...], known: Any) -> Any:
            block = sweep.block(rule, part, exact) if single is None else single
            found = function(block, *rows)
            values = (found,) if isinstance(kind, str) else found
            return tuple(_take(*each, block) for each in zip(kinds, known, values, strict=True))

        empty = tuple(tuple(jnp.full(1, number, dtype) for number in EMPTY[kind]) for kind in kinds)
        known = sweep.over_keys(rule, operands, update, empty, rows)
        reduced = tuple(pair if len(pair) > 1 else pair[0] for pair in known)
        return reduced[0] if isinstance(kind, str) else reduced

    return rule.weights.survey(reduce)


def _take(kind: str, known: tuple[jax.Array, ...], values: jax.Array, block: Block) -> tuple[jax.Array, ...]:
    """Updates the reduction of rows with the values of a block."""
    seen = jnp.where(block.visible, values, EMPTY[kind][0])
    seen = jnp.broadcast_to(seen, block.scores.shape)
    if kind == 'sum':
        return (known[0] + jnp.sum(seen, axis=-1, keepdims=True),)
    if kind == 'max':
        return (jnp.maximum(known[0], jnp.max(seen, axis=-1, keepdims=True)),)
    if kind == 'min':
        return (jnp.minimum(known[0], jnp.min(seen, axis=-1, keepdims=True)),)
    extreme, place = (jnp.max, jnp.argmax) if kind == 'argmax' else (jnp.min, jnp.argmin)
    value, first = extreme(seen, axis=-1, keepdims=True), place(seen, axis=-1, keepdims=True)
    column = block.columns.reshape(-1)[first].astype(value.dtype)
    better = value > known[0] if kind == 'argmax' else value < known[0]
    return jnp.where(better, value, known[0]), jnp.where(better, column, known[1])
