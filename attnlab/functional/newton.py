"""Inverses of matrices by Newton's iteration."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float

from attnlab.errors import UserError


@dataclasses.dataclass(frozen=True)
class FixedStep:
    """Begins at `1.8 P / largest^2`, of the largest sum of a row of `P`; gradients are those of the inverse.

    The sum is of `P` without its ridge, so that the eigenvalue of a block of one, `1 + ridge`, is within reach of the
    steps for ridges of up to 0.054. As the code released with Lu et al. 2021, https://arxiv.org/abs/2110.11945, for
    SOFT.
    """

    def check_ridge(self, name: str, ridge: float) -> None:
        """Raises `UserError` for a ridge with which the iterations may diverge."""
        if not 0 <= ridge <= 0.054:
            raise UserError(
                f'ridge of {name} is {ridge}; it must be from 0 to 0.054, beyond which newton=FixedStep() diverges '
                'where a document has one landmark'
            )

    def __call__(
        self,
        matrix: Float[Array, 'b h n n'],
        largest: Float[Array, 'b h #n'],
        together: Bool[Array, '#b #h n n'] | None,
        iterations: int,
    ) -> Float[Array, 'b h n n']:
        """Returns what is near the inverse of every block of `matrix`; `together` says which rows are of one."""
        del together
        return newton_inverse(matrix, (1.8 / largest**2)[..., None], iterations)


FIXED = FixedStep()


@dataclasses.dataclass(frozen=True)
class BacktrackedStep:
    """Begins at `step P`, `step` first `2 / largest^2`, halved up to ten times while it is too long.

    That is while the largest sum of a column of `|I - step P^2|` is above 1.01. Gradients are those of the iterations.

    As the code released with Lu et al. 2024, https://arxiv.org/abs/2207.03341, for SOFT++, but for every block, where
    it is for the whole batch. Where the largest sum is an eigenvalue, as of a block of one, what it ends at lacks that;
    with a small ridge beside it the first step is too long for it, by less than is noticed.
    """

    def check_ridge(self, name: str, ridge: float) -> None:
        """Raises `UserError` for a ridge with which the iterations may diverge."""
        if ridge != 0 and not ridge >= 0.006:
            raise UserError(
                f'ridge of {name} is {ridge}; with newton=BacktrackedStep() it must be 0 or at least 0.006, since with '
                'smaller ones it diverges where a document has one landmark or two'
            )

    def __call__(
        self,
        matrix: Float[Array, 'b h n n'],
        largest: Float[Array, 'b h #n'],
        together: Bool[Array, '#b #h n n'] | None,
        iterations: int,
    ) -> Float[Array, 'b h n n']:
        """Returns what is near the inverse of every block of `matrix`; `together` says which rows are of one."""
        first = jnp.broadcast_to(2 / largest**2, matrix.shape[:-1])[..., None]
        one, square = jnp.eye(matrix.shape[-1], dtype=matrix.dtype), jax.lax.stop_gradient(_product(matrix, matrix))

        def halved(_: Any, step: Array) -> Array:
            sums = jnp.sum(jnp.abs(one[None, None] - step * square), axis=-2, keepdims=True)
            worst = jnp.max(sums if together is None else jnp.where(together, sums, 0), axis=-1, keepdims=True)
            return jnp.where(worst > 1.01, step / 2, step)

        start = jax.lax.stop_gradient(first)
        return _iterated(matrix, first * (jax.lax.fori_loop(0, 10, halved, start) / start), iterations)


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


def solved(inverse: Float[Array, '*b n n'], y: Float[Array, '*b n v']) -> Float[Array, '*b n v']:
    """Returns the product of an inverse and what it is applied to.

    Where rows of what was inverted are nearly alike its numbers are large and cancel, hence the highest precision.
    """
    return _product(inverse, y)


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
