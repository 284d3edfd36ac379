"""Statistics of attention weights and activations: sinks, entropy, sparsity, outliers."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

SINK = 0.3
"""The `sink_mass` above which a head counts as an attention sink (Gu et al. 2025, https://arxiv.org/abs/2410.10781)."""


def sink_mass(
    weights: Float[Array, 'b h t s'], visible: Bool[Array, 'b t s'], segments: Int[Array, 'b t']
) -> Float[Array, 'b h']:
    """Returns the excess over uniform of the weight on the first token of a document: 0 if uniform, 1 if all weight.

        m = mean over documents of  sum_i (p_if - u_if) / sum_i (1 - u_if)

    where `f` is the first token of the document of query `i`, and `u_if` is one over the number of keys that `i` sees,
    or 0 where it does not see `f`. In one long document `m` is about the `1/t sum_i p_i0` of Gu et al. 2025,
    https://arxiv.org/abs/2410.10781, which in short documents is large even for uniform weights. Padding, segment 0, is
    not counted, nor are documents in which every query sees the first token only; NaN where none remains.
    """
    same = (segments[:, :, None] == segments[:, None, :]) & (segments > 0)[:, :, None]
    first = jax.nn.one_hot(jnp.argmax(same, axis=-1), weights.shape[-1]) * (segments > 0)[..., None]
    sees_first = jnp.sum(first * visible, axis=-1)
    uniform = sees_first / jnp.maximum(jnp.sum(visible, axis=-1), 1)
    on_first = jnp.einsum('bhts,bts->bht', weights.astype(jnp.float32), first)
    above = jnp.einsum('bht,btf->bhf', on_first - uniform[:, None], first)
    most = jnp.einsum('bt,btf->bf', 1 - uniform, first)
    counted = most > 1e-6
    masses = above / jnp.where(counted, most, 1)[:, None]
    return jnp.sum(masses * counted[:, None], axis=-1) / jnp.sum(counted, axis=-1)[:, None]


def sink_rate(mass: Float[Array, '*b']) -> Float[Array, '']:
    """Returns the fraction of heads whose `sink_mass` exceeds `SINK`, among those where it is not NaN."""
    known = ~jnp.isnan(mass)
    return jnp.sum(mass > SINK) / jnp.sum(known)


def entropy(weights: Float[Array, '*b s']) -> Float[Array, '*b']:
    """Returns `-sum_j p_j log p_j`, in nats, of the normalised absolute values of the weights; 0 where all are zero."""
    sizes = jnp.abs(weights)
    total = jnp.sum(sizes, axis=-1, keepdims=True)
    shares = sizes / jnp.where(total > 0, total, 1)
    return -jnp.sum(shares * jnp.log(jnp.where(shares > 0, shares, 1)), axis=-1)


def sparsity(weights: Float[Array, '*b s'], visible: Bool[Array, '*b s']) -> Float[Array, '']:
    """Returns the fraction of visible keys whose weight is exactly zero."""
    return jnp.sum((weights == 0) & visible) / jnp.sum(visible)


def kurtosis(x: Float[Array, '*b d']) -> Float[Array, '*b']:
    """Returns the fourth central moment over the unbiased variance squared, of each token's channels; 3 if Gaussian.

    Of channels whose deviation is below about 0.05 it is less, as 1e-6 is added to the square.
    Bondarenko et al. 2023, https://arxiv.org/abs/2306.12929.
    """
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.sum(centred**2, axis=-1) / (x.shape[-1] - 1)
    return jnp.mean(centred**4, axis=-1) / (variance**2 + 1e-6)
