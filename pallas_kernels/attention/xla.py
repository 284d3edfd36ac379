"""The portable form of `attention`.

One dense block, or a scan over the blocks of queries and keys that see each other.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import tiling
from pallas_kernels.attention import blocks, vjp
from pallas_kernels.attention.problem import Operands, Rule
from pallas_kernels.attention.scores import Place, scores

ADDED = ('bias', 'slopes', 'query_forget', 'key_forget')
"""The operands added to the products of queries and keys."""


class Running(NamedTuple):
    """What the forward pass knows of every query, `b g r t 1` and `b g r t v`, after some of its keys."""

    pivot: jax.Array
    denominator: jax.Array
    accumulator: jax.Array


class Rows(NamedTuple):
    """What the backward pass knows of every query: its statistic, the gradient of its output, and `sum_j w_j dw_j`."""

    statistic: jax.Array
    doutput: jax.Array
    delta: jax.Array


def forward(rule: Rule, operands: Operands) -> vjp.Kept:
    """Returns the output and the row statistics; of a small dense block the weights as well."""
    t, s = operands.q.shape[3], operands.k.shape[2]
    tile = tiling.attention(t, s)
    if tile is None and tiling.keeps_weights(math.prod(operands.q.shape[:4]) * s):
        return _dense(rule, operands, _whole(t, s))
    running = _advance(rule, operands, _whole(t, s)) if tile is None else _scan_forward(rule, operands, tile)
    normalizer, statistic = rule.weights.finish(running.pivot, running.denominator)
    return vjp.Kept((running.accumulator / normalizer).astype(operands.v.dtype), statistic)


def backward(rule: Rule, operands: Operands, kept: vjp.Kept, doutput: jax.Array) -> Operands:
    """Returns the gradients of the operands, `None` for segments."""
    t, s = operands.q.shape[3], operands.k.shape[2]
    tile = tiling.attention(t, s)
    doutput = doutput.astype(operands.dtype())
    rows = Rows(kept.statistic, doutput, jnp.sum(kept.output * doutput, axis=-1, keepdims=True))
    if tile is None:
        gradients = _pull(rule, operands, _whole(t, s), rows, kept.weights)
    else:
        gradients = _scan_backward(rule, operands, rows, tile)
    return jax.tree.map(lambda gradient, operand: gradient.astype(operand.dtype), gradients, operands.floating())


attention = vjp.differentiable(forward, backward)


def _dense(rule: Rule, operands: Operands, place: Place) -> vjp.Kept:
    """The whole of a small call in one block, its weights kept."""
    block = operands.accumulating()
    values, visible = scores(rule, _products(rule.scale * block.q, block.k), block, place)
    weights, statistic = rule.weights.dense(values, visible)
    output = _where_seen(visible, _over_keys(weights, block.v))
    return vjp.Kept(output.astype(operands.v.dtype), statistic, weights)


def _where_seen(visible: jax.Array, rows: jax.Array) -> jax.Array:
    """Zeros for queries that see no key; their weights in a dense block are anything."""
    return jnp.where(jnp.any(visible, axis=-1, keepdims=True), rows, 0)


def _advance(rule: Rule, block: Operands, place: Place, running: Running | None = None) -> Running:
    """Takes in the keys of one block; `None` has seen no key."""
    block = block.accumulating()
    values, visible = scores(rule, _products(rule.scale * block.q, block.k), block, place)
    pivot = rule.weights.pivot(values, visible)
    if running is not None:
        pivot = jnp.maximum(running.pivot, pivot)
    numerators, denominators = rule.weights.block(values, visible, pivot)
    denominator = jnp.sum(denominators, axis=-1, keepdims=True)
    accumulator = _over_keys(numerators, block.v)
    if running is not None:
        rescale = rule.weights.rescale(running.pivot, pivot)
        denominator += rescale * running.denominator
        accumulator += rescale * running.accumulator
    return Running(pivot, denominator, accumulator)


def _pull(rule: Rule, block: Operands, place: Place, rows: Rows, weights: jax.Array | None = None) -> Operands:
    """The gradients of the operands of one block, its weights computed again unless given."""
    block = block.accumulating()

    def of(products: jax.Array, added: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
        return scores(rule, products, dataclasses.replace(block, **added), place)

    added = {name: getattr(block, name) for name in ADDED}
    values, pull, visible = jax.vjp(of, _products(rule.scale * block.q, block.k), added, has_aux=True)
    if weights is not None:
        rows = rows._replace(doutput=_where_seen(visible, rows.doutput))
    else:
        weights = rule.weights.recompute(values, visible, rows.statistic)
    dweights = _products(rows.doutput, block.v)
    dproducts, dadded = pull(
        rule.weights.score_gradient(values, visible, weights, rows.statistic, dweights, rows.delta)
    )
    return Operands(
        q=rule.scale * _over_keys(dproducts, block.k),
        k=_over_queries(dproducts, rule.scale * block.q),
        v=_over_queries(weights, rows.doutput),
        **dadded,
    )


# The three matrix products, written for the routines that CPUs have: no batch dimension but the groups, and of two
# factors it is the small one that is transposed.


def _products(left: jax.Array, right: jax.Array) -> jax.Array:
    """`b g r t k, b g s k -> b g r t s`."""
    products = jnp.einsum('bgmk,bgsk->bgms', _merge(left), right)
    return products.reshape(*left.shape[:-1], right.shape[2])


def _over_keys(matrix: jax.Array, vectors: jax.Array) -> jax.Array:
    """`b g r t s, b g s v -> b g r t v`."""
    return jnp.einsum('bgms,bgsv->bgmv', _merge(matrix), vectors).reshape(*matrix.shape[:-1], vectors.shape[3])


def _over_queries(matrix: jax.Array, vectors: jax.Array) -> jax.Array:
    """`b g r t s, b g r t v -> b g s v`."""
    # The barrier keeps the compiler from taking the transposition into the product, for which it has no fast routine.
    transposed = jax.lax.optimization_barrier(_merge(vectors).swapaxes(2, 3))
    return jnp.einsum('bgvm,bgms->bgvs', transposed, _merge(matrix)).swapaxes(2, 3)


def _merge(array: jax.Array) -> jax.Array:
    b, g, r, t, last = array.shape
    return array.reshape(b, g, r * t, last)


def _scan_forward(rule: Rule, operands: Operands, tile: tiling.AttentionTile) -> Running:
    b, g, r, t, _ = operands.q.shape
    s, v = operands.v.shape[2:]
    padded = blocks.pad(operands, tile)

    def step(running: Running, pair: jax.Array) -> tuple[Running, None]:
        here = Running(*(_rows(array, pair, tile) for array in running))
        here = _advance(rule, blocks.take(padded, pair, tile), _place(pair, t, s, tile), here)
        return Running(*(_put_rows(array, part, pair, tile) for array, part in zip(running, here, strict=True))), None

    shape = (b, g, r, padded.q.shape[3])
    empty = Running(
        pivot=jnp.full((*shape, 1), rule.weights.start, operands.dtype()),
        denominator=jnp.zeros((*shape, 1), operands.dtype()),
        accumulator=jnp.zeros((*shape, v), operands.dtype()),
    )
    running, _ = jax.lax.scan(step, empty, blocks.pairs(rule, t, s, tile))
    return Running(*(array[:, :, :, :t] for array in running))


def _scan_backward(rule: Rule, operands: Operands, rows: Rows, tile: tiling.AttentionTile) -> Operands:
    t, s = operands.q.shape[3], operands.k.shape[2]
    padded = blocks.pad(operands, tile)
    rows = Rows(*(_pad_rows(array, tile) for array in rows))

    def step(total: Operands, pair: jax.Array) -> tuple[Operands, None]:
        here = Rows(*(_rows(array, pair, tile) for array in rows))
        part = _pull(rule, blocks.take(padded, pair, tile), _place(pair, t, s, tile), here)
        return blocks.add(total, part, pair, tile), None

    zeros = jax.tree.map(lambda array: jnp.zeros(array.shape, operands.dtype()), padded.floating())
    total, _ = jax.lax.scan(step, zeros, blocks.pairs(rule, t, s, tile))
    return jax.tree.map(
        lambda array, operand: jax.lax.slice(array, (0,) * operand.ndim, operand.shape), total, operands.floating()
    )


def _whole(t: int, s: int) -> Place:
    return Place(jnp.arange(t) + s - t, jnp.arange(s), s)


def _place(pair: jax.Array, t: int, s: int, tile: tiling.AttentionTile) -> Place:
    rows = pair[0] * tile.queries + jnp.arange(tile.queries) + s - t
    return Place(rows, pair[1] * tile.keys + jnp.arange(tile.keys), s)


def _pad_rows(array: jax.Array, tile: tiling.AttentionTile) -> jax.Array:
    return jnp.pad(array, ((0, 0),) * 3 + ((0, -array.shape[3] % tile.queries), (0, 0)))


def _rows(array: jax.Array, pair: jax.Array, tile: tiling.AttentionTile) -> jax.Array:
    """The queries of a block, out of an array `b g r t ...`."""
    return jax.lax.dynamic_slice_in_dim(array, pair[0] * tile.queries, tile.queries, axis=3)


def _put_rows(array: jax.Array, part: jax.Array, pair: jax.Array, tile: tiling.AttentionTile) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(array, part, pair[0] * tile.queries, axis=3)
