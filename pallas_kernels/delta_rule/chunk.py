"""The mathematics of chunks of `delta_rule`: functions of all chunks at once, or of one in a kernel.

Within a chunk the value that a step writes is `r_i = beta_i (v_i - S^T (k_i exp(G_i)) - sum_{j<i} A_ij r_j)`, with S
the state before the chunk, G the log decays summed, and `A_ij = sum_k k_ik k_jk exp(G_ik - G_jk)`. So `R = X diag(beta)
(V - (K exp(G)) S)` with `X = (I + diag(beta) A)^{-1}`, the WY form of Yang et al., 2024, arXiv 2406.06484.

No exponent is above 0, and none is a difference: log decays are summed over exactly the steps between a read and a
write. States are transposed, `... v k`, so that decays are along their last axis, as for keys.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.delta_rule.products import Form, multiply

EXACT = 'highest'
"""The precision of sums of log decays and of the triangular inverse, independent of other products."""


class Chunk(NamedTuple):
    """The inputs of the steps of a chunk.

    Attributes:
      q: scaled, `... c k`.
      k: `... c k`.
      beta: `... c 1`.
      log_decay: `... c k`, or `... c 1` for all key channels, or `None`.
      runs: the number of document starts in the chunk up to each step, `... c 1`; or `None`.
    """

    q: jax.Array
    k: jax.Array
    beta: jax.Array
    log_decay: jax.Array | None
    runs: jax.Array | None


class Weights(NamedTuple):
    """The weights of the steps of a chunk.

    Attributes:
      among: weight of a step's write in a step's read for its query, `... c c`.
      erased: weight of an earlier step's write in a step's read for its key, times beta, `... c c`.
      q: queries that read the state before the chunk, `... c k`.
      k: keys that read it, `... c k`.
      writes: the keys under which values are in the state after the chunk, `... c k`.
      factor: decay of the state before the chunk over the chunk, `... 1 k` or `... 1 1`.
    """

    among: jax.Array
    erased: jax.Array
    q: jax.Array
    k: jax.Array
    writes: jax.Array
    factor: jax.Array


Products = Callable[[jax.Array, jax.Array, jax.Array, Form], tuple[jax.Array, jax.Array, jax.Array, jax.Array]]
"""From q, k and log decays, `... c k`, to products of queries and of keys with keys, `... c c`, and the log decays
up to each step and after it."""


def weights(chunk: Chunk, form: Form, vector: Products | None = None) -> Weights:
    """Returns the weights of a chunk; its length is a power of two.

    `vector` computes products with a decay for every key channel; `None`: `by_halves`.
    """
    q, k, beta, log_decay, runs = chunk
    q, k = q.astype(form.sums), k.astype(form.sums)
    if log_decay is None:
        since = until = jnp.zeros(beta.shape, form.sums)
        by_q, by_k = _plain(q, k, form)
    elif log_decay.shape[-1] == 1:
        by_q, by_k, since, until = _scalar(q, k, log_decay, form)
    else:
        by_q, by_k, since, until = (vector or by_halves)(q, k, log_decay, form)
    factor = jnp.ones_like(since[..., :1, :]) if log_decay is None else jnp.exp(jnp.sum(log_decay, -2, keepdims=True))
    reach, stays = jnp.exp(since), jnp.exp(until)
    past, seen = steps_before(q), ~steps_after(q)
    if runs is not None:
        last = runs[..., -1:, :]
        here = runs == runs.swapaxes(-1, -2)
        past, seen = past & here, seen & here
        reach, stays = jnp.where(runs == 0, reach, 0), jnp.where(runs == last, stays, 0)
        factor = jnp.where(last == 0, factor, 0)
    return Weights(
        among=jnp.where(seen, by_q, 0),
        erased=jnp.where(past, beta * by_k, 0),
        q=q * reach,
        k=k * reach,
        writes=k * stays,
        factor=factor,
    )


def _plain(q: jax.Array, k: jax.Array, form: Form) -> tuple[jax.Array, jax.Array]:
    return multiply(q, k, 'nt', form), multiply(k, k, 'nt', form)


def _scalar(
    q: jax.Array, k: jax.Array, log_decay: jax.Array, form: Form
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Products of queries and of keys with keys, and the log decays up to each step and after it."""
    # Over the steps after j up to i: a sum for every pair, so that small sums stay exact beside large ones.
    later = jnp.where(steps_before(q), log_decay, 0)
    until_now = jnp.broadcast_to(jnp.where(steps_after(q), 0, 1), later.shape)
    between = multiply(until_now, later, 'nn', _exact(later))
    decay = jnp.exp(between)
    by_q, by_k = _plain(q, k, form)
    row = log_decay.swapaxes(-1, -2)
    since = jnp.sum(jnp.where(steps_after(q), 0, row), axis=-1, keepdims=True)
    until = jnp.sum(jnp.where(steps_after(q), row, 0), axis=-1, keepdims=True)
    return by_q * decay, by_k * decay, since, until


def by_halves(
    q: jax.Array, k: jax.Array, log_decay: jax.Array, form: Form
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The same, with decays for every key channel: halves of blocks of 2, 4, 8, ... steps."""
    ((by_q,), (by_k,)), sums = earlier_by_halves((q, k), (), (k,), log_decay, form)
    return with_own(by_q, q, k), by_k, sums.until_now, sums.later


class Summed(NamedTuple):
    """Log decays summed up to each step, up to the step before it, and after it to the end of the chunk."""

    until_now: jax.Array
    before: jax.Array
    later: jax.Array


def earlier_by_halves(
    now: tuple[jax.Array, ...],
    before: tuple[jax.Array, ...],
    keys: tuple[jax.Array, ...],
    log_decay: jax.Array,
    form: Form,
) -> tuple[list[list[jax.Array]], Summed]:
    """Products with the keys of earlier steps, with decays for every key channel, by halves of blocks of steps.

    The second half of a block reads the first through the decay since the block's middle, times the decay until
    then (the secondary chunking of Yang et al., 2024, arXiv 2312.06635, all the way down).

    Args:
      now: what reads the state after it has decayed in its step, `... c k`.
      before: what reads it before.
      keys: the keys, `... c k`.
      log_decay: `... c k`.
      form: of the products.

    Returns:
      For everything that reads, the products with each of the keys, `... c c`, zero for its own step and later ones;
      and the sums.
    """
    c = log_decay.shape[-2]
    place = _count((1,) * (log_decay.ndim - 2) + (c, 1), -2)
    found = [[jnp.zeros((*x.shape[:-1], c), form.sums) for _ in keys] for x in (*now, *before)]
    zero = jnp.zeros_like(log_decay)
    sums, total = Summed(log_decay, zero, zero), log_decay
    size = 1
    while size < c:
        second = (place & size) != 0
        reads = [x * jnp.where(second, jnp.exp(sums.until_now), 0) for x in now]
        reads += [x * jnp.where(second, jnp.exp(sums.before), 0) for x in before]
        held = [jnp.where(second, 0, jnp.exp(sums.later)) * key for key in keys]
        here = _same(log_decay, 2 * size)
        for x, products in zip(reads, found, strict=True):
            products[:] = [
                product + jnp.where(here, multiply(x, key, 'nt', form), 0)
                for product, key in zip(products, held, strict=True)
            ]
        other = _halves_swapped(total, size)
        until_now, until_before = (decay + jnp.where(second, other, 0) for decay in sums[:2])
        sums = Summed(until_now, until_before, sums.later + jnp.where(second, 0, other))
        total += other
        size *= 2
    return found, sums


def with_own(products: jax.Array, reads: jax.Array, key: jax.Array) -> jax.Array:
    """Products with the keys of earlier steps and, as nothing decays in between, with that of the step itself."""
    return products + jnp.where(_same(reads, 1), jnp.sum(reads * key, axis=-1, keepdims=True), 0)


def step(
    chunk: Chunk, v: jax.Array, state: jax.Array, form: Form, solved: jax.Array | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns what one chunk reads, `c v`, the state after it, `v k` as that before, and the computed inverse.

    `solved` is that inverse, if it was kept.
    """
    does = weights(chunk, form)
    solved = inverse_again(does.erased, solved)
    missing = v.astype(form.sums) - multiply(does.k, state, 'nt', form)
    values = multiply(solved, chunk.beta * missing, 'nn', form)
    o = multiply(does.q, state, 'nt', form) + multiply(does.among, values, 'nn', form)
    return o, does.factor * state + multiply(values, does.writes, 'tn', form), solved


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _halves_swapped(array: jax.Array, size: int) -> jax.Array:
    """Exchanges the halves, of so many steps, of each block; its own gradient."""
    place = _count((1,) * (array.ndim - 2) + (array.shape[-2], 1), -2)
    return jnp.where((place & size) != 0, jnp.roll(array, size, axis=-2), jnp.roll(array, -size, axis=-2))


_halves_swapped.defvjp(
    lambda array, size: (_halves_swapped(array, size), None),
    lambda size, _, dswapped: (_halves_swapped(dswapped, size),),
)


def _by_blocks(strict: jax.Array) -> jax.Array:
    """The inverse in products alone: of the diagonal blocks of 1, 2, 4, ... steps, each from two of the size before.

    This is substitution, block by block, which stays accurate where powers of the matrix would grow.
    """
    found = jnp.where(_same(strict, 1), 1, jnp.where(_same(strict, 2), -strict, 0))
    form, size = _exact(strict), 2
    while size < strict.shape[-1]:
        corner = jnp.where(_same(strict, 2 * size) & ~_same(strict, size), strict, 0)
        found -= multiply(found, multiply(corner, found, 'nn', form), 'nn', form)
        size *= 2
    return found


def _by_halves(strict: jax.Array) -> jax.Array:
    """The same with the smallest possible products, which a kernel could not slice."""
    middle = strict.shape[-1] // 2
    if middle < 8:
        return _by_blocks(strict)
    halves = jnp.stack([strict[..., :middle, :middle], strict[..., middle:, middle:]], axis=-3)
    found, form = _by_halves(halves), _exact(strict)
    first, second = found[..., 0, :, :], found[..., 1, :, :]
    corner = -multiply(second, multiply(strict[..., middle:, :middle], first, 'nn', form), 'nn', form)
    upper = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
    return jnp.concatenate([upper, jnp.concatenate([corner, second], axis=-1)], axis=-2)


def _pull_inverse(found: jax.Array, dfound: jax.Array) -> tuple[jax.Array]:
    form = _exact(found)
    dstrict = -multiply(found, multiply(dfound, found, 'nt', form), 'tn', form)
    return (jnp.where(steps_before(found), dstrict, 0),)


def inverse(strict: jax.Array, platform: str) -> jax.Array:
    """Returns `(I + strict)^{-1}`, `... c c`, of matrices that are zero on the diagonal and above.

    On a CPU the time is proportional to the operations; other devices multiply whole matrices at once.
    """
    return (_inverse_by_halves if platform == 'cpu' else _inverse_by_blocks)(strict)


def _differentiable(find: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    inverse = jax.custom_vjp(find)
    inverse.defvjp(lambda strict: (find(strict),) * 2, _pull_inverse)
    return inverse


_inverse_by_halves, _inverse_by_blocks = _differentiable(_by_halves), _differentiable(_by_blocks)


@jax.custom_vjp
def recalled(strict: jax.Array, found: jax.Array) -> jax.Array:
    """Returns the inverse `found` before, with its gradient."""
    return found


recalled.defvjp(lambda strict, found: (found, found), lambda found, dfound: (*_pull_inverse(found, dfound), None))


def inverse_again(strict: jax.Array, solved: jax.Array | None) -> jax.Array:
    """The inverse, by products of whole matrices, or that found before."""
    return _inverse_by_blocks(strict) if solved is None else recalled(strict, solved)


def _exact(like: jax.Array) -> Form:
    return Form(like.dtype, like.dtype, EXACT)


def steps_before(like: jax.Array) -> jax.Array:
    """A mask, bool `c c`, of the steps before each; dimensions are those of `like`, `... c k`."""
    row, column = _places(like)
    return column < row


def steps_after(like: jax.Array) -> jax.Array:
    """Marks the steps after each."""
    row, column = _places(like)
    return column > row


def _same(like: jax.Array, size: int) -> jax.Array:
    """Marks the steps in the same block of so many, a power of two."""
    row, column = _places(like)
    return (row ^ column) < size


def _places(like: jax.Array) -> tuple[jax.Array, jax.Array]:
    shape = (1,) * (like.ndim - 2) + (like.shape[-2],) * 2
    return _count(shape, -2), _count(shape, -1)


def _count(shape: tuple[int, ...], axis: int) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis % len(shape))
