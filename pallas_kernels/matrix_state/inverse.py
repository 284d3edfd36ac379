"""The inverse of the triangular matrices of chunks, portable and in kernels for TPUs, and its gradient."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.matrix_state.places import same_block, steps_before
from pallas_kernels.matrix_state.products import exact, multiply


def _by_blocks(strict: jax.Array) -> jax.Array:
    """The inverse in products alone: of the diagonal blocks of 1, 2, 4, ... steps, each from two of the size before.

    This is substitution, block by block, which stays accurate where powers of the matrix would grow.
    """
    found = jnp.where(same_block(strict, 1), 1, jnp.where(same_block(strict, 2), -strict, 0))
    form, size = exact(strict), 2
    while size < strict.shape[-1]:
        corner = jnp.where(same_block(strict, 2 * size) & ~same_block(strict, size), strict, 0)
        found -= multiply(found, multiply(corner, found, 'nn', form), 'nn', form)
        size *= 2
    return found


def _by_halves(strict: jax.Array) -> jax.Array:
    """The same with the smallest possible products, which a kernel could not slice."""
    middle = strict.shape[-1] // 2
    if middle < 8:
        return _by_blocks(strict)
    halves = jnp.stack([strict[..., :middle, :middle], strict[..., middle:, middle:]], axis=-3)
    found, form = _by_halves(halves), exact(strict)
    first, second = found[..., 0, :, :], found[..., 1, :, :]
    corner = -multiply(second, multiply(strict[..., middle:, :middle], first, 'nn', form), 'nn', form)
    upper = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
    return jnp.concatenate([upper, jnp.concatenate([corner, second], axis=-1)], axis=-2)


def _pull_inverse(found: jax.Array, dfound: jax.Array) -> tuple[jax.Array]:
    form = exact(found)
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
