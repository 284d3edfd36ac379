"""The inverse of the triangular matrices of chunks, portable and in kernels for TPUs, and its gradient."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.matrix_state.chunks import laid
from pallas_kernels.matrix_state.places import same_block, steps_before
from pallas_kernels.matrix_state.products import Form, Multiply, multiply_exactly, multiply_for

Find = Callable[[jax.Array], jax.Array]


def _by_blocks(multiply: Multiply, strict: jax.Array) -> jax.Array:
    """The inverse in products alone: of the diagonal blocks of 1, 2, 4, ... steps, each from two of the size before.

    This is substitution, block by block, which stays accurate where powers of the matrix would grow.
    """
    found = jnp.where(same_block(strict, 1), 1, jnp.where(same_block(strict, 2), -strict, 0))
    size = 2
    while size < strict.shape[-1]:
        corner = jnp.where(same_block(strict, 2 * size) & ~same_block(strict, size), strict, 0)
        found -= multiply(found, multiply(corner, found, 'nn'), 'nn')
        size *= 2
    return found


def _by_rows(strict: jax.Array) -> jax.Array:
    """By substitution of one row after the other, in all matrices at once: products as small are mostly calls."""
    c = strict.shape[-1]
    lower = laid(jnp.moveaxis(strict.reshape(-1, c, c), 0, -1))
    unit = jnp.eye(c, dtype=strict.dtype)[..., None]
    rows = [jnp.broadcast_to(unit[0], lower.shape[1:])]
    for i in range(1, c):
        row = unit[i] - functools.reduce(jnp.add, [lower[i, j][None] * rows[j] for j in range(i)])
        # The compiler would compute a row again for each that needs it.
        rows.append(jax.lax.optimization_barrier(row))
    return jnp.moveaxis(jnp.stack(rows), -1, 0).reshape(strict.shape)


def _by_halves(strict: jax.Array) -> jax.Array:
    """The same with the smallest possible products, which a kernel could not slice."""
    middle = strict.shape[-1] // 2
    if middle < 8:
        return _by_rows(strict)
    halves = jnp.stack([strict[..., :middle, :middle], strict[..., middle:, middle:]], axis=-3)
    found = _by_halves(halves)
    first, second = found[..., 0, :, :], found[..., 1, :, :]
    corner = -multiply_exactly(second, multiply_exactly(strict[..., middle:, :middle], first, 'nn'), 'nn')
    upper = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
    return jnp.concatenate([upper, jnp.concatenate([corner, second], axis=-1)], axis=-2)


def _gradient(multiply: Multiply, found: jax.Array, dfound: jax.Array) -> tuple[jax.Array]:
    dstrict = -multiply(found, multiply(dfound, found, 'nt'), 'tn')
    return (jnp.where(steps_before(found), dstrict, 0),)


def _differentiable(find: Find, multiply: Multiply) -> Find:
    inverse = jax.custom_vjp(find)
    inverse.defvjp(lambda strict: (find(strict),) * 2, functools.partial(_gradient, multiply))
    return inverse


def inverse(strict: jax.Array, platform: str) -> jax.Array:
    """Returns `(I + strict)^{-1}`, `... c c`, of matrices that are zero on the diagonal and above.

    On a CPU the time is proportional to the operations; other devices multiply whole matrices at once.
    """
    find = _by_halves if platform == 'cpu' else functools.partial(_by_blocks, multiply_exactly)
    return _differentiable(find, multiply_exactly)(strict)


def inverse_again(strict: jax.Array, solved: jax.Array | None, form: Form) -> jax.Array:
    """The inverse, by products of whole matrices for what is multiplied in a form, or `solved`, found before."""
    multiply = multiply_for(form)
    if solved is None:
        return _differentiable(functools.partial(_by_blocks, multiply), multiply)(strict)
    return _recalled(multiply)(strict, solved)


def _recalled(multiply: Multiply) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """The inverse found before, of its matrix and itself, with its gradient."""
    recalled = jax.custom_vjp(lambda strict, found: found)
    recalled.defvjp(
        lambda strict, found: (found, found), lambda found, dfound: (*_gradient(multiply, found, dfound), None)
    )
    return recalled
