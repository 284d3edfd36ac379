"""Losses, one number a token, or a prediction."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from attnlab.functional import cores
from attnlab.functional.indices import check_indices


def check_targets(targets: Int[Array, '*b'], classes: int) -> None:
    """Raises `UserError` for a target outside of the classes; inside of `jax.jit` its loss is NaN instead."""
    check_indices('targets', targets, classes, 'classes')


def nan_outside(losses: Float[Array, '*b'], targets: Int[Array, '*b'], classes: int) -> Float[Array, '*b']:
    """The losses, NaN where a target is outside of the classes."""
    return jnp.where((targets >= 0) & (targets < classes), losses, jnp.nan)


def next_token_loss(
    hidden: Float[Array, '*b d'],
    embedding: Float[Array, 'o d'],
    targets: Int[Array, '*b'],
    *,
    soft_cap: float | None = None,
) -> Float[Array, '*b']:
    """Cross-entropy in nats, `-log softmax(embedding hidden)[target]`, without storing all logits at once.

    `soft_cap` bounds the logits, see `capped`. Raises `UserError` for targets that are no classes; under `jax.jit`
    their loss is NaN instead.
    """
    check_targets(targets, embedding.shape[0])
    losses = cores.cross_entropy(hidden, embedding.astype(hidden.dtype), targets, soft_cap=soft_cap)
    # The core counts negative ones from the last class.
    return nan_outside(losses, targets, embedding.shape[0])


def capped(logits: Float[Array, '*b'], cap: float | None) -> Float[Array, '*b']:
    """`cap tanh(logits / cap)`; `None`: the logits."""
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def softmax_loss(logits: Float[Array, '*b o'], targets: Int[Array, '*b']) -> Float[Array, '*b']:
    """Cross-entropy in nats, `-log softmax(logits)[target]`.

    Where the target's logit is beyond the others by 17 in float32, the sum of the exponentials rounds to the target's
    own, and the loss and its derivative by that logit are zero exactly. Prieto et al. 2025,
    https://arxiv.org/abs/2501.04697, call it softmax collapse.

    Raises `UserError` for targets that are no classes; under `jax.jit` their loss is NaN instead.
    """
    check_targets(targets, logits.shape[-1])
    found = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]
    return nan_outside(-found, targets, logits.shape[-1])


def stablemax_logits(logits: Float[Array, '*b o']) -> Float[Array, '*b o']:
    """Logits whose softmax is the StableMax of `logits`: `log g(x) = sign(x) log(1 + |x|)`.

    `g(x) = x + 1` from 0 up and `1 / (1 - x)` below. A sum of them absorbs its other terms where one is 2^24 times as
    large in float32, for logits in the thousands. Adding a constant to the logits changes the probabilities. Computed
    in the type of the logits; the released code computes in float64. Prieto et al. 2025,
    https://arxiv.org/abs/2501.04697.
    """
    positive = logits >= 0
    # Each branch sees 0 where it is not taken: its derivative there is finite, and at 0 the result's is 1.
    above = jnp.log1p(jnp.where(positive, logits, 0))
    below = jnp.log1p(jnp.where(positive, 0, -logits))
    return jnp.where(positive, above, -below)


def squared_error(predictions: Float[Array, '*b o'], targets: Float[Array, '*b o']) -> Float[Array, '*b']:
    """The mean over outputs of `(y - target)^2`."""
    return jnp.mean((predictions - targets) ** 2, axis=-1)


def absolute_error(predictions: Float[Array, '*b o'], targets: Float[Array, '*b o']) -> Float[Array, '*b']:
    """The mean over outputs of `|y - target|`."""
    return jnp.mean(jnp.abs(predictions - targets), axis=-1)
