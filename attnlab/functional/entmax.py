"""The entmax of full rows, with a gradient for its exponent."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float

from attnlab.functional.precision import wide_dtype

STEPS = 64
"""The maximum number of steps towards the threshold: far more than float64 needs."""


@jax.custom_vjp
def entmax(
    scores: Float[Array, 'b h t s'], alpha: Float[Array, 'h'], visible: Bool[Array, 'b h t s']
) -> Float[Array, 'b h t s']:
    """Returns `w_j = max((alpha - 1) s_j - tau, 0)^(1 / (alpha - 1))`, `tau` such that the row of weights adds up to 1.

    `alpha`, one per head, is above 1 and at most 2; the weights and the gradient by `alpha` are exact; the gradient is
    that of Correia et al. 2019, https://arxiv.org/abs/1909.00015. A row without visible keys is zero. In float32 or
    better.
    """
    return _weights(scores, alpha, visible)


def _weights(scores: Array, alpha: Array, visible: Array) -> Array:
    wide = scores.astype(wide_dtype(scores.dtype))
    rate = (alpha.astype(wide.dtype) - 1)[None, :, None, None]
    hidden = jnp.finfo(wide.dtype).min
    highest = jnp.max(jnp.where(visible, wide, hidden), axis=-1, keepdims=True)
    x = jnp.where(visible, rate * (wide - highest), -2)  # The threshold lies in [-1, 0), and -2 below it.

    def weights(threshold: Array) -> tuple[Array, Array]:
        """The weights, and their slopes by the threshold, `excess^(1 / rate - 1)`."""
        excess = jnp.maximum(x - threshold, 0)
        positive = excess > 0
        found = jnp.where(positive, jnp.exp(jnp.log(jnp.where(positive, excess, 1)) / rate), 0)
        return found, found / jnp.where(positive, excess, 1)

    # Newton's method for the norm `(sum_j x_j^p)^(1 / p) = 1` with `p = 1 / rate`, which is convex in the threshold:
    # from the left it never steps too far, and where the scores above the threshold are equal a step is exact.
    def step(threshold: Array) -> Array:
        found, slopes = weights(threshold)
        total, slope = (jnp.sum(terms, axis=-1, keepdims=True) for terms in (found, slopes))
        size = (total - total ** (1 - rate)) / jnp.where(slope > 0, slope, 1)
        # A row that has arrived stays, whatever others in the batch still need.
        return jnp.where(size > jnp.finfo(size.dtype).eps, size, 0)

    def unfinished(state: tuple[Array, Array, Array]) -> Array:
        count, _, size = state
        return (count < STEPS) & jnp.any(size > 0)

    def advance(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        count, threshold, size = state
        threshold = threshold + size
        return count + 1, threshold, step(threshold)

    low = jnp.full_like(highest, -1)
    _, threshold, _ = jax.lax.while_loop(unfinished, advance, (jnp.int32(0), low, step(low)))
    found, _ = weights(threshold)
    total = jnp.sum(found, axis=-1, keepdims=True)
    return jnp.where(total > 0, found / jnp.where(total > 0, total, 1), 0).astype(scores.dtype)


def _forward(scores: Array, alpha: Array, visible: Array) -> tuple[Array, tuple[Array, Array]]:
    weights = _weights(scores, alpha, visible)
    return weights, (weights, alpha)


def _backward(saved: tuple[Array, Array], dweights: Array) -> tuple[Array, Array, None]:
    weights, alpha = saved
    wide = wide_dtype(weights.dtype)
    p, dp = weights.astype(wide), dweights.astype(wide)
    exponent = alpha.astype(wide)[None, :, None, None]
    log = jnp.log(jnp.where(p > 0, p, 1))
    slopes = jnp.where(p > 0, jnp.exp((2 - exponent) * log), 0)
    total = jnp.sum(slopes, axis=-1, keepdims=True)
    shares = slopes / jnp.where(total > 0, total, 1)
    mean = jnp.sum(shares * dp, axis=-1, keepdims=True)
    entropy = jnp.sum(p * log, axis=-1, keepdims=True)
    by_alpha = (p - shares) / (exponent - 1) ** 2 - (p * log - shares * entropy) / (exponent - 1)
    dalpha = jnp.sum(dp * by_alpha, axis=(0, 2, 3)).astype(alpha.dtype)
    return (slopes * (dp - mean)).astype(weights.dtype), dalpha, None


entmax.defvjp(_forward, _backward)
