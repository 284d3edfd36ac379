"""What attention weights and activations are like: sinks, entropy, sparsity, outliers."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

SINK = 0.3
"""The mean weight above which a head counts as sinking (Gu et al. 2025, https://arxiv.org/abs/2410.10781)."""


def sink_mass(weights: Float[Array, 'b h t s'], segments: Int[Array, 'b t']) -> Float[Array, 'b h']:
    """Returns the mean weight that queries give the first token of their document, that token's own query included.

    With one document a row it is `1/t sum_i p_i0`. Gu et al. 2025, https://arxiv.org/abs/2410.10781.
    """
    first = jnp.argmax(segments[:, :, None] == segments[:, None, :], axis=-1)
    on_first = jnp.take_along_axis(weights, first[:, None, :, None], axis=-1)[..., 0]
    return jnp.mean(on_first, axis=-1)


def sink_rate(mass: Float[Array, '*b'], threshold: float = SINK) -> Float[Array, '']:
    """Returns the share of heads whose `sink_mass` exceeds the threshold."""
    return jnp.mean((mass > threshold).astype(jnp.float32))


def entropy(weights: Float[Array, '*b s']) -> Float[Array, '*b']:
    """Returns `-sum_j p_j log p_j`, in nats, of the weights' sizes divided by their sum; 0 where all are zero."""
    sizes = jnp.abs(weights)
    total = jnp.sum(sizes, axis=-1, keepdims=True)
    shares = sizes / jnp.where(total > 0, total, 1)
    return -jnp.sum(shares * jnp.log(jnp.where(shares > 0, shares, 1)), axis=-1)


def sparsity(weights: Float[Array, '*b s'], visible: Bool[Array, '*b s']) -> Float[Array, '']:
    """Returns the share of visible keys whose weight is exactly zero."""
    return jnp.sum((weights == 0) & visible) / jnp.sum(visible)


def kurtosis(x: Float[Array, '*b d']) -> Float[Array, '*b']:
    """Returns the fourth central moment over the unbiased variance squared, of each token's channels; 3 if Gaussian.

    Bondarenko et al. 2023, https://arxiv.org/abs/2306.12929.
    """
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.sum(centred**2, axis=-1) / (x.shape[-1] - 1)
    return jnp.mean(centred**4, axis=-1) / (variance**2 + 1e-6)
