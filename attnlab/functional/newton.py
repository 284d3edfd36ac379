"""Inverses of matrices by Newton's iteration."""

import functools
from typing import Any

import jax
from jax import Array
from jaxtyping import Float


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def newton_inverse(
    matrix: Float[Array, '*b n n'], step: Float[Array, '*b #n 1'], iterations: int
) -> Float[Array, '*b n n']:
    """Returns what `iterations` of `A <- 2 A - A P A` make of `A = step P`: near the inverse of a symmetric `P`.

    They converge, by squaring the residual `I - A P`, where the eigenvalues of `step P P` are above 0 and below 2.
    Gradients are those of the inverse, without the iterations: `dP = -A^T dA A^T`, and none by `step`. Products are of
    the highest precision.
    """
    return _iterated(matrix, step, iterations)


def _iterated(matrix: Array, step: Array, iterations: int) -> Array:
    def improved(_: Any, inverse: Array) -> Array:
        return 2 * inverse - _product(_product(inverse, matrix), inverse)

    return jax.lax.fori_loop(0, iterations, improved, step * matrix)


def _product(a: Array, b: Array) -> Array:
    return jax.lax.dot_general(
        a,
        b,
        (((a.ndim - 1,), (b.ndim - 2,)), (tuple(range(a.ndim - 2)),) * 2),
        precision=jax.lax.Precision.HIGHEST,
    )


def _forward(matrix: Array, step: Array, iterations: int) -> tuple[Array, tuple[Array, Array]]:
    inverse = _iterated(matrix, step, iterations)
    return inverse, (inverse, step)


def _backward(iterations: int, saved: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    inverse, step = saved
    transposed = inverse.swapaxes(-1, -2)
    return -_product(_product(transposed, gradient), transposed), jax.numpy.zeros_like(step)


newton_inverse.defvjp(_forward, _backward)
