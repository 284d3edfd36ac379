"""The portable form of `attention`.

One dense block, or a scan over the blocks of queries and keys that see each other.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import tiling
from pallas_kernels.attention import blocks, sweep, vjp
from pallas_kernels.attention.maps import Statistics
from pallas_kernels.attention.problem import Operands, Rule
from pallas_kernels.attention.products import over_channels, over_keys, over_queries
from pallas_kernels.attention.scores import scores

ADDED = ('bias', 'slopes', 'query_forget', 'key_forget')
"""The operands added to the products of queries and keys."""


class Running(NamedTuple):
    """The running statistics of every query, `b g r t 1` and `b g r t v`, after some of its keys."""

    pivot: jax.Array
    denominator: jax.Array
    accumulator: jax.Array


class BackwardRows(NamedTuple):
    """The per-query operands of the backward pass: its statistics, the gradient of its output, and `vjp.deltas`."""

    statistics: Statistics
    doutput: jax.Array
    delta: jax.Array
    companion_delta: jax.Array | None


def forward(rule: Rule, operands: Operands, given: Statistics) -> vjp.Residuals:
    """Returns the output and the row statistics; of a small dense block the weights as well."""
    if sweep.tile(operands) is None and tiling.keeps_weights(math.prod(operands.q.shape[:4]) * operands.k.shape[2]):
        kept = _dense(rule, operands, given)
    elif rule.weights.surveys:
        kept = _read(rule, operands, given)
    else:
        kept = _online(rule, operands)
    companion = None if kept.companion is None else kept.companion.astype(operands.v.dtype)
    return kept._replace(output=kept.output.astype(vjp.output_type(rule, operands)), companion=companion)


def backward(rule: Rule, operands: Operands, kept: vjp.Residuals, doutput: jax.Array) -> Operands:
    """Returns the gradients of the operands, `None` for segments."""
    tile = sweep.tile(operands)
    doutput = doutput.astype(operands.dtype())
    rows = BackwardRows(kept.statistics, doutput, *vjp.deltas(kept, doutput))
    if tile is None:
        gradients = _pull(rule, sweep.whole(operands), rows, kept.weights)
    else:
        gradients = _scan_backward(rule, operands, rows, tile)
    return jax.tree.map(lambda gradient, operand: gradient.astype(operand.dtype), gradients, operands.floating())


passes = vjp.Passes(forward, backward)

attention = vjp.differentiable(*passes)


def _dense(rule: Rule, operands: Operands, given: Statistics) -> vjp.Residuals:
    """The whole of a small call in one block, its weights kept."""
    block, v = sweep.block(rule, sweep.whole(operands)), operands.v.astype(operands.dtype())
    if rule.weights.surveys:
        weights, statistics = rule.weights.recompute(block, given), given
    else:
        weights, statistics = rule.weights.dense(block)
    output = _where_seen(block.visible, over_keys(weights, v))
    companion = over_keys(rule.weights.companion(block, given), v) if rule.weights.has_companion else None
    return vjp.Residuals(output, statistics, companion, weights)


def _where_seen(visible: jax.Array, rows: jax.Array) -> jax.Array:
    """Zeros for queries that see no key; their weights in a dense block are arbitrary."""
    return jnp.where(jnp.any(visible, axis=-1, keepdims=True), rows, 0)


def _online(rule: Rule, operands: Operands) -> vjp.Residuals:
    """A map that is computed online."""

    def update(part: sweep.Part, rows: tuple[()], known: Running) -> Running:
        block = sweep.block(rule, part)
        highest = jnp.max(rule.weights.pivot(block), axis=-1, keepdims=True)
        pivot = jnp.maximum(known.pivot, highest)
        numerators, denominators = rule.weights.block(block, pivot)
        rescale = rule.weights.rescale(known.pivot, pivot)
        return Running(
            pivot,
            rescale * known.denominator + jnp.sum(denominators, axis=-1, keepdims=True),
            rescale * known.accumulator + over_keys(numerators, part.operands.v.astype(pivot.dtype)),
        )

    dtype = operands.dtype()
    empty = Running(jnp.full(1, rule.weights.start, dtype), jnp.zeros(1, dtype), jnp.zeros(operands.v.shape[3], dtype))
    running = sweep.over_keys(rule, operands, update, empty)
    normalizer, statistics = rule.weights.finish(running.pivot, running.denominator)
    return vjp.Residuals(running.accumulator / normalizer, statistics)


def _read(rule: Rule, operands: Operands, given: Statistics) -> vjp.Residuals:
    """A map whose statistics are known beforehand."""
    maps = (rule.weights.recompute, *((rule.weights.companion,) if rule.weights.has_companion else ()))

    def update(part: sweep.Part, given: Statistics, known: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        block, v = sweep.block(rule, part), part.operands.v.astype(operands.dtype())
        return tuple(sums + over_keys(weights(block, given), v) for sums, weights in zip(known, maps, strict=True))

    empty = tuple(jnp.zeros(operands.v.shape[3], operands.dtype()) for _ in maps)
    output, *companion = sweep.over_keys(rule, operands, update, empty, given)
    return vjp.Residuals(output, given, *companion)


def _pull(rule: Rule, part: sweep.Part, rows: BackwardRows, weights: jax.Array | None = None) -> Operands:
    """The gradients of the operands of one block, its weights computed again unless given."""
    x = part.operands.accumulating()

    def of(products: jax.Array, added: dict[str, Any]) -> tuple[jax.Array, Any]:
        block = scores(rule, products, dataclasses.replace(x, **added), part.place)
        return block.scores, block

    added = {name: getattr(x, name) for name in ADDED}
    _, pull, block = jax.vjp(of, over_channels(rule.scale * x.q, x.k), added, has_aux=True)
    if weights is not None:
        rows = rows._replace(doutput=_where_seen(block.visible, rows.doutput))
    else:
        # Otherwise the compiler would compute them twice, for the product and for the gradient.
        weights = jax.lax.optimization_barrier(rule.weights.recompute(block, rows.statistics))
    dweights = over_channels(rows.doutput, x.v)
    dscores = rule.weights.score_gradient(block, weights, rows.statistics, dweights, rows.delta, rows.companion_delta)
    dproducts, dadded = pull(dscores)
    return Operands(
        q=rule.scale * over_keys(dproducts, x.k),
        k=over_queries(dproducts, rule.scale * x.q),
        v=over_queries(weights, rows.doutput),
        **dadded,
    )


def _scan_backward(rule: Rule, operands: Operands, rows: BackwardRows, tile: tiling.AttentionTile) -> Operands:
    t, s = operands.q.shape[3], operands.k.shape[2]
    padded = blocks.pad(operands, tile)
    rows = jax.tree.map(lambda array: sweep.pad_rows(array, tile), rows)

    def step(total: Operands, pair: jax.Array) -> tuple[Operands, None]:
        here = jax.tree.map(lambda array: sweep.take_rows(array, pair, tile), rows)
        gradients = _pull(rule, sweep.part(padded, pair, t, s, tile), here)
        return blocks.add(total, gradients, pair, tile), None

    zeros = jax.tree.map(lambda array: jnp.zeros(array.shape, operands.dtype()), padded.floating())
    total, _ = jax.lax.scan(step, zeros, blocks.pairs(rule, t, s, tile))
    return jax.tree.map(
        lambda array, operand: jax.lax.slice(array, (0,) * operand.ndim, operand.shape), total, operands.floating()
    )
