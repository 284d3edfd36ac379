"""What networks make of rows, each of one network: block by block, where no product of sorted rows is at hand."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from attnlab.functional.precision import wide_dtype
from pallas_kernels import target

Network = Callable[..., Array]
"""What one network makes of rows `m d`, given its own parameters."""


def in_blocks(
    network: Network,
    rows: Float[Array, 'm d'],
    groups: Int[Array, ' m'],
    parameters: tuple[Array, ...],
    *,
    size: int,
    whole: bool,
) -> Float[Array, 'm d']:
    """`y_i = f(x_i; p_{g_i})` for parameters `e ...` of e networks; rows with `g_i = e` have none and give zero.

    Rows are placed in blocks of `size`, each of one network, with room for every way they may fall: less than e blocks
    more than rows fill. Of those, all are computed if every row has a network (`whole`), so that nothing waits for a
    count, and else those that have rows. A block is computed again in the backward pass, which adds up gradients of
    parameters in float32, in the order of rows.
    """
    place, owner, used = _places(groups, len(parameters[0]), size)
    room = jnp.zeros((len(owner) * size, rows.shape[1]), rows.dtype)
    blocks = room.at[place].set(rows, mode='drop', unique_indices=True).reshape(len(owner), size, -1)
    found = _each(network, blocks, owner, None if whole else used, parameters)
    return found.reshape(room.shape).at[place].get(mode='fill', fill_value=0, unique_indices=True)


def rows_of_a_block(rows: int, networks: int) -> int:
    """A size of blocks, a power of two, for a number of rows that fall on networks evenly.

    Small blocks have little room that stays empty, large ones read a network's parameters less often: about
    `4 sqrt(rows of a network)` take least time on a CPU, from 16 to 256. On GPUs, where a block must fill the device
    and every one is a few launches, the largest that leave four fifths of the room to rows, from 64 to 1,024.
    """
    share = max(rows // networks, 1)
    if target.current().platform == 'gpu':
        return min(1024, max(64, 1 << (share // 4).bit_length() >> 1))
    return max(16, min(256, 1 << round(math.log2(4 * math.sqrt(share)))))


def number_of_blocks(rows: int, networks: int, size: int) -> int:
    """How many blocks the rows can at most need, however they fall on networks."""
    return (rows + min(rows, networks) * (size - 1)) // size


def _places(
    groups: Int[Array, ' m'], networks: int, size: int
) -> tuple[Int[Array, ' m'], Int[Array, ' c'], Int[Array, '']]:
    """Where each row comes in the blocks, beyond them if it has no network; whose each block is; how many are used."""
    order = jnp.argsort(groups, stable=True)
    load = jnp.sum(jax.nn.one_hot(groups, networks, dtype=jnp.int32), axis=0)
    ends = jnp.cumsum(-(-load // size))
    # Rows in the order of networks: a row's place in its network's blocks is what it is behind the first of them.
    sorted_groups, ranks = groups[order], jnp.arange(len(groups))
    behind = ranks - (jnp.cumsum(load) - load).at[sorted_groups].get(mode='clip')
    first = (ends + load // -size).at[sorted_groups].get(mode='clip') * size
    blocks = number_of_blocks(len(groups), networks, size)
    beyond = blocks * size + ranks
    places = jnp.where(sorted_groups < networks, first + behind, beyond)
    owner = jnp.searchsorted(ends, jnp.arange(blocks), side='right')
    return (
        jnp.zeros_like(groups).at[order].set(places.astype(groups.dtype), unique_indices=True),
        jnp.minimum(owner, networks - 1),
        ends[-1],
    )


def _each(
    network: Network,
    blocks: Float[Array, 'c r d'],
    owner: Int[Array, ' c'],
    used: Int[Array, ''] | None,
    parameters: tuple[Array, ...],
) -> Float[Array, 'c r d']:
    """What its owner makes of every block, or of the first `used`; the rest is zero."""
    room = len(owner)

    def steps(used: Array | None) -> int | Array:
        return room if used is None else used

    def own(parameters: tuple[Array, ...], owner: Array) -> tuple[Array, ...]:
        return tuple(jax.lax.dynamic_index_in_dim(each, owner, keepdims=False) for each in parameters)

    @jax.custom_vjp
    def run(blocks: Array, owner: Array, used: Array | None, parameters: tuple[Array, ...]) -> Array:
        def step(i: Array, found: Array) -> Array:
            return found.at[i].set(network(blocks[i], *own(parameters, owner[i])))

        return jax.lax.fori_loop(0, steps(used), step, jnp.zeros_like(blocks))

    def save(*given: Any) -> tuple[Array, tuple[Any, ...]]:
        return run(*given), given

    def pull(given: tuple[Any, ...], upstream: Array) -> tuple[Any, ...]:
        blocks, owner, used, parameters = given

        def step(i: Array, found: tuple[Array, tuple[Array, ...]]) -> tuple[Array, tuple[Array, ...]]:
            gradients, totals = found
            _, back = jax.vjp(network, blocks[i], *own(parameters, owner[i]))
            of_block, *parts = back(upstream[i])
            sums = (total.at[owner[i]].add(part.astype(total.dtype)) for total, part in zip(totals, parts, strict=True))
            return gradients.at[i].set(of_block), tuple(sums)

        totals = tuple(jnp.zeros(each.shape, wide_dtype(each.dtype)) for each in parameters)
        gradients, totals = jax.lax.fori_loop(0, steps(used), step, (jnp.zeros_like(blocks), totals))
        typed = tuple(total.astype(each.dtype) for total, each in zip(totals, parameters, strict=True))
        return gradients, None, None, typed

    run.defvjp(save, pull)
    return run(blocks, owner, used, parameters)
