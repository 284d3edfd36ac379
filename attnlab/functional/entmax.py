"""The entmax of full rows, with a gradient for its exponent."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float

STEPS = 64
"""The most bisections of the interval of the threshold; iteration stops early when it no longer changes."""


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
    wide = scores.astype(jnp.promote_types(scores.dtype, jnp.float32))
    rate = (alpha.astype(wide.dtype) - 1)[None, :, None, None]
    hidden = jnp.finfo(wide.dtype).min
    highest = jnp.max(jnp.where(visible, wide, hidden), axis=-1, keepdims=True)
    x = jnp.where(visible, rate * (wide - highest), -2)  # The threshold lies in [-1, 0), and -2 below it.

    def weights(threshold: Array) -> Array:
        excess = jnp.maximum(x - threshold, 0)
        positive = excess > 0
        return jnp.where(positive, jnp.exp(jnp.log(jnp.where(positive, excess, 1)) / rate), 0)

    def halve(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        count, low, high = state
        middle = (low + high) / 2
        above = jnp.sum(weights(middle), axis=-1, keepdims=True) >= 1
        return count + 1, jnp.where(above, middle, low), jnp.where(above, high, middle)

    def unfinished(state: tuple[Array, Array, Array]) -> Array:
        count, low, high = state
        middle = (low + high) / 2
        return (count < STEPS) & jnp.any((middle > low) & (middle < high))

    low = jnp.full_like(highest, -1)
    _, low, _ = jax.lax.while_loop(unfinished, halve, (jnp.int32(0), low, jnp.zeros_like(low)))
    found = weights(low)
    total = jnp.sum(found, axis=-1, keepdims=True)
    return jnp.where(total > 0, found / jnp.where(total > 0, total, 1), 0).astype(scores.dtype)


def _forward(scores: Array, alpha: Array, visible: Array) -> tuple[Array, tuple[Array, Array]]:
    weights = _weights(scores, alpha, visible)
    return weights, (weights, alpha)


def _backward(saved: tuple[Array, Array], dweights: Array) -> tuple[Array, Array, None]:
    weights, alpha = saved
    wide = jnp.promote_types(weights.dtype, jnp.float32)
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
