"""How near separated sources are to the true ones, whatever their scale and their order."""

import itertools

import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from attnlab.functional.precision import wide_dtype

EPS = 1e-8
"""Added to powers before they divide, and to ratios before their logarithm."""


def si_snr(estimates: Float[Array, '*b t'], sources: Float[Array, '*b t']) -> Float[Array, '*b']:
    """The scale-invariant signal-to-noise ratio of estimates of sources, in dB, over time.

        s' = <e, s> s / |s|^2                       e and s less their means
        SI-SNR = 10 log10(|s'|^2 / |e - s'|^2)

    In float32 or better. No factor of the estimate or of the source changes it, and no constant added to them; of
    silence it is -80 dB. Luo and Mesgarani 2019, https://arxiv.org/abs/1809.07454.
    """
    wide = wide_dtype(estimates.dtype)
    e, s = (x.astype(wide) - jnp.mean(x.astype(wide), axis=-1, keepdims=True) for x in (estimates, sources))
    scale = jnp.sum(e * s, axis=-1, keepdims=True) / (jnp.sum(s * s, axis=-1, keepdims=True) + EPS)
    found = scale * s
    ratio = jnp.sum(jnp.square(found), axis=-1) / (jnp.sum(jnp.square(e - found), axis=-1) + EPS)
    return 10 * jnp.log10(ratio + EPS)


def every_pair(estimates: Float[Array, 'b n t'], sources: Float[Array, 'b n t']) -> Float[Array, 'b n n']:
    """`si_snr` of every estimate, the second axis, of every source, the third."""
    shape = (*estimates.shape[:2], *sources.shape[1:])
    return si_snr(jnp.broadcast_to(estimates[:, :, None], shape), jnp.broadcast_to(sources[:, None], shape))


def best_order(scores: Float[Array, 'b n n']) -> Int[Array, 'b n']:
    """The source of every estimate, each source once, for which the sum of the scores is greatest.

    Of `n!` orders the first where several are best: for few sources, from `every_pair`. Yu et al. 2017,
    https://arxiv.org/abs/1607.00325.
    """
    count = scores.shape[1]
    orders = np.array(list(itertools.permutations(range(count))), np.int32)
    totals = jnp.sum(scores[:, np.arange(count)[None], orders], axis=2)
    return jnp.asarray(orders)[jnp.argmax(totals, axis=1)]


def matched(scores: Float[Array, 'b n n'], order: Int[Array, 'b n']) -> Float[Array, 'b n']:
    """The score of every estimate with its source."""
    return jnp.take_along_axis(scores, order[:, :, None], axis=2)[..., 0]
