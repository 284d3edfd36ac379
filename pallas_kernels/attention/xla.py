"""The portable form of `attention`: one dense block, or a scan over the blocks of queries and keys that see each other."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import precision, tiling
from pallas_kernels.attention import blocks, vjp
from pallas_kernels.attention.problem import Operands, Rule
from pallas_kernels.attention.scores import scores


class Running(NamedTuple):
    """What the forward pass knows of every query, `b g r t 1` and `b g r t v`, after some of its keys."""

    pivot: jax.Array
    denominator: jax.Array
    accumulator: jax.Array


class Place(NamedTuple):
    """Positions of the queries and of the keys of a block, and the number of keys that are not padding."""

    rows: jax.Array
    columns: jax.Array
    keys: int


def forward(rule: Rule, operands: Operands) -> tuple[jax.Array, jax.Array]:
    """Returns the output, `b t h v`, and the row statistics, `b g r t 1`."""
    t, s = operands.q.shape[1], operands.k.shape[1]
    tile = tiling.attention(t, s)
    if tile is None:
        block = _cast(operands)
        running = _advance(rule, block, _whole(t, s), None)
    else:
        running = _scan_forward(rule, operands, tile)
    normalizer, statistic = rule.weights.finish(running.pivot, running.denominator)
    return _heads_last(running.accumulator / normalizer)[:, :t].astype(operands.v.dtype), statistic


def backward(rule: Rule, operands: Operands, output: jax.Array, statistic: jax.Array, doutput: jax.Array) -> Operands:
    """Returns the gradients of the operands, `None` for segments."""
    t, s = operands.q.shape[1], operands.k.shape[1]
    tile = tiling.attention(t, s)
    dtype = precision.accumulator(*operands.floating())
    g = operands.k.shape[2]
    doutput = _heads_first(doutput.astype(dtype), g)
    delta = jnp.sum(doutput * _heads_first(output.astype(dtype), g), axis=-1, keepdims=True)
    if tile is None:
        gradients = _pull(rule, _cast(operands), _whole(t, s), statistic, doutput, delta)
    else:
        gradients = _scan_backward(rule, operands, tile, statistic, doutput, delta)
    return jax.tree.map(lambda gradient, operand: gradient.astype(operand.dtype), gradients, _floating(operands))


attention = vjp.differentiable(forward, backward)


def _advance(rule: Rule, block: Operands, place: Place, running: Running | None) -> Running:
    """Takes the keys of one block in; `None` has seen no key."""
    values, visible = scores(rule, block, *place)
    pivot = rule.weights.pivot(values, visible)
    if running is not None:
        pivot = jnp.maximum(running.pivot, pivot)
    numerators, denominators = rule.weights.block(values, visible, pivot)
    denominator = jnp.sum(denominators, axis=-1, keepdims=True)
    accumulator = jnp.einsum('bgrts,bsgv->bgrtv', numerators, block.v)
    if running is not None:
        rescale = rule.weights.rescale(running.pivot, pivot)
        denominator += rescale * running.denominator
        accumulator += rescale * running.accumulator
    return Running(pivot, denominator, accumulator)


def _pull(
    rule: Rule, block: Operands, place: Place, statistic: jax.Array, doutput: jax.Array, delta: jax.Array
) -> Operands:
    """The gradients of the operands of one block, its weights computed again."""

    def of(operands: Operands) -> tuple[jax.Array, jax.Array]:
        return scores(rule, _with_segments(operands, block), *place)

    values, pull, visible = jax.vjp(of, _floating(block), has_aux=True)
    weights = rule.weights.recompute(values, visible, statistic)
    dweights = jnp.einsum('bgrtv,bsgv->bgrts', doutput, block.v)
    dscores = rule.weights.score_gradient(values, weights, statistic, dweights, delta)
    (gradients,) = pull(jnp.where(visible, dscores, 0))
    return dataclasses.replace(gradients, v=jnp.einsum('bgrts,bgrtv->bsgv', weights, doutput))


def _scan_forward(rule: Rule, operands: Operands, tile: tiling.AttentionTile) -> Running:
    t, s, h, g = operands.q.shape[1], operands.k.shape[1], operands.q.shape[2], operands.k.shape[2]
    padded = blocks.pad(operands, tile)
    dtype = precision.accumulator(*operands.floating())
    rows = (operands.q.shape[0], g, h // g, padded.q.shape[1])

    def step(running: Running, pair: jax.Array) -> tuple[Running, None]:
        block = _cast(blocks.take(padded, pair, tile))
        here = jax.tree.map(lambda array: _rows(array, pair, tile), running)
        here = _advance(rule, block, _place(pair, t, s, tile), here)
        return jax.tree.map(lambda array, part: _put_rows(array, part, pair, tile), running, here), None

    empty = Running(
        pivot=jnp.full((*rows, 1), rule.weights.start, dtype),
        denominator=jnp.zeros((*rows, 1), dtype),
        accumulator=jnp.zeros((*rows, operands.v.shape[3]), dtype),
    )
    return jax.lax.scan(step, empty, blocks.pairs(rule, t, s, tile))[0]


def _scan_backward(
    rule: Rule,
    operands: Operands,
    tile: tiling.AttentionTile,
    statistic: jax.Array,
    doutput: jax.Array,
    delta: jax.Array,
) -> Operands:
    t, s = operands.q.shape[1], operands.k.shape[1]
    padded = blocks.pad(operands, tile)
    by_query = (statistic, _pad_rows(doutput, tile), _pad_rows(delta, tile))
    dtype = precision.accumulator(*operands.floating())

    def step(total: Operands, pair: jax.Array) -> tuple[Operands, None]:
        block = _cast(blocks.take(padded, pair, tile))
        here = tuple(_rows(array, pair, tile) for array in by_query)
        return blocks.add(total, _pull(rule, block, _place(pair, t, s, tile), *here), pair, tile), None

    zeros = jax.tree.map(lambda array: jnp.zeros(array.shape, dtype), _floating(padded))
    total = jax.lax.scan(step, zeros, blocks.pairs(rule, t, s, tile))[0]
    return jax.tree.map(
        lambda gradient, operand: jax.lax.slice(gradient, (0,) * operand.ndim, operand.shape),
        total,
        _floating(operands),
    )


def _whole(t: int, s: int) -> Place:
    return Place(jnp.arange(t) + s - t, jnp.arange(s), s)


def _place(pair: jax.Array, t: int, s: int, tile: tiling.AttentionTile) -> Place:
    rows = pair[0] * tile.queries + jnp.arange(tile.queries) + s - t
    return Place(rows, pair[1] * tile.keys + jnp.arange(tile.keys), s)


def _floating(operands: Operands) -> Operands:
    return dataclasses.replace(operands, query_segments=None, key_segments=None)


def _with_segments(operands: Operands, like: Operands) -> Operands:
    return dataclasses.replace(operands, query_segments=like.query_segments, key_segments=like.key_segments)


def _cast(operands: Operands) -> Operands:
    dtype = precision.accumulator(*operands.floating())
    return _with_segments(jax.tree.map(lambda array: array.astype(dtype), _floating(operands)), operands)


def _heads_last(array: jax.Array) -> jax.Array:
    b, g, r, t, v = array.shape
    return jnp.transpose(array, (0, 3, 1, 2, 4)).reshape(b, t, g * r, v)


def _heads_first(array: jax.Array, g: int) -> jax.Array:
    b, t, h, v = array.shape
    return jnp.transpose(array.reshape(b, t, g, h // g, v), (0, 2, 3, 1, 4))


def _pad_rows(array: jax.Array, tile: tiling.AttentionTile) -> jax.Array:
    return jnp.pad(array, ((0, 0),) * 3 + ((0, -array.shape[3] % tile.queries), (0, 0)))


def _rows(array: jax.Array, pair: jax.Array, tile: tiling.AttentionTile) -> jax.Array:
    """The queries of a block, out of an array `b g r t ...`."""
    return jax.lax.dynamic_slice_in_dim(array, pair[0] * tile.queries, tile.queries, axis=3)


def _put_rows(array: jax.Array, part: jax.Array, pair: jax.Array, tile: tiling.AttentionTile) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(array, part, pair[0] * tile.queries, axis=3)
