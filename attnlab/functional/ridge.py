"""Regression of values on keys with a penalty, solved anew at every token."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from attnlab.functional import cores
from attnlab.functional.precision import wide_dtype
from attnlab.typing import Heads, Keys, Queries, Segments, Values


class Regression(NamedTuple):
    """What keys have in common with each other, and with values; float32 or float64."""

    keys: Float[Array, 'b h k k']
    values: Float[Array, 'b h k v']


class _Keys(NamedTuple):
    """What the matrices `P_t` are made of."""

    k: Keys
    weighted: Keys
    log_decay: Float[Array, 'b t h']
    before: Float[Array, 'b h k k'] | None
    segments: Segments | None


class _How(NamedTuple):
    """How equations are solved; with `guess` those of a single token begin near the solution."""

    steps: int
    offset: float
    guess: bool
    implementation: str | None


def ridge_regression(
    q: Queries,
    k: Keys,
    v: Values,
    strength: Float[Array, 'b t h'],
    log_decay: Float[Array, 'b t h'],
    ridge: Float[Array, 'h k'],
    *,
    steps: int,
    offset: float = 0.0,
    guess: bool = False,
    state: Regression | None = None,
    segments: Segments | None = None,
    implementation: str | None = None,
) -> tuple[Heads, Regression]:
    """Returns `S_t^T (P_t + diag(ridge))^-1 q_t` and the last `P` and `S`, in float32 or wider, of

        P_t = a_t P_{t-1} + b_t k_t k_t^T        S_t = a_t S_{t-1} + b_t k_t v_t^T

    with `a = exp(log_decay)` and `b` the strength: the prediction for `q_t` of a linear map of keys to values that is
    fitted by least squares, weighted by `b` and by decay, with the penalty `ridge` on the map.

    The inverse is applied by `steps` conjugate gradients from zero, exact from as many steps as keys have channels but
    for rounding; products with all `P_t` at once are reads of linear attention. Gradients are those of the inverse, by
    another solution, not of the steps. As many heads of all. von Oswald et al. 2025, https://arxiv.org/abs/2506.05233.
    The code released with it adds an `offset` of 1e-5 to what steps divide by, which ends them short of the solution;
    here the solution of gradients has none. It begins for a single token after a `state` at a `guess`,
    `x_i = q_i / (P_ii + ridge_i)`.
    """
    wide = wide_dtype(q.dtype)
    q, k, v = (each.astype(wide) for each in (q, k, v))
    weight = strength.astype(wide)[..., None]
    keys, values = (None, None) if state is None else state
    matrices = _Keys(k, weight * k, log_decay, keys, segments)
    solution = _solve(_How(steps, offset, guess, implementation), q, matrices, ridge.astype(wide))
    core = {'scale': 1.0, 'segments': segments, 'implementation': implementation}
    read, values = cores.linear_attention(solution, k, weight * v, log_decay, state=values, **core)
    _, keys = cores.linear_attention(k, k, weight * k, log_decay, state=keys, **core)
    return read, Regression(keys, values)


def _product(implementation: str | None, x: Heads, matrices: _Keys, ridge: Float[Array, 'h k']) -> Heads:
    """`(P_t + diag(ridge)) x_t`; the matrices are symmetric."""
    k, weighted, log_decay, before, segments = matrices
    read, _ = cores.linear_attention(
        x, k, weighted, log_decay, scale=1.0, state=before, segments=segments, implementation=implementation
    )
    return read + ridge[None, None] * x


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _solve(how: _How, q: Heads, matrices: _Keys, ridge: Float[Array, 'h k']) -> Heads:
    """`(P_t + diag(ridge))^-1 q_t`, by conjugate gradients; what is solved changes no more."""

    def dot(x: Heads, y: Heads) -> Float[Array, 'b t h 1']:
        return jnp.sum(x * y, axis=-1, keepdims=True)

    def over(x: Array, y: Array) -> Array:
        y = y + how.offset
        return jnp.where(y > 0, x / jnp.where(y > 0, y, 1), 0)

    def step(_: Any, carry: tuple[Heads, Heads, Heads, Array]) -> tuple[Heads, Heads, Heads, Array]:
        x, residual, direction, size = carry
        product = _product(how.implementation, direction, matrices, ridge)
        length = over(size, dot(direction, product))
        residual = residual - length * product
        after = dot(residual, residual)
        return x + length * direction, residual, residual + over(after, size) * direction, after

    x, residual = jnp.zeros_like(q), q
    if how.guess and matrices.before is not None and q.shape[1] == 1:
        diagonal = jnp.exp(matrices.log_decay)[..., None] * jnp.diagonal(matrices.before, 0, -2, -1)[:, None]
        x = q / (diagonal + matrices.k * matrices.weighted + ridge[None, None])
        residual = q - _product(how.implementation, x, matrices, ridge)
    return jax.lax.fori_loop(0, how.steps, step, (x, residual, residual, dot(residual, residual)))[0]


def _forward(how: _How, q: Heads, matrices: _Keys, ridge: Array) -> tuple[Heads, tuple]:
    x = _solve(how, q, matrices, ridge)
    return x, (x, matrices, ridge)


def _backward(how: _How, kept: tuple, gradient: Heads) -> tuple[Heads, _Keys, Array]:
    x, matrices, ridge = kept
    # Without the offset, next to which the sizes of gradients are nothing: as a mean over tokens they would vanish.
    y = _solve(how._replace(offset=0.0), gradient, matrices, ridge)

    def product(k: Keys, weighted: Keys, log_decay: Array, before: Array | None, ridge: Array) -> Heads:
        return _product(how.implementation, x, _Keys(k, weighted, log_decay, before, matrices.segments), ridge)

    _, pull = jax.vjp(product, matrices.k, matrices.weighted, matrices.log_decay, matrices.before, ridge)
    k, weighted, log_decay, before, of_ridge = pull(-y)
    return y, _Keys(k, weighted, log_decay, before, None), of_ridge


_solve.defvjp(_forward, _backward)
