"""Normalisation of the last axis."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from attnlab.nn.parameter import param


class RMSNorm(nnx.Module):
    """Divides by the root mean square of the last axis: `y = g x / sqrt(mean(x^2) + eps)`, `g` learned, of size `dim`.

    Applied to `b t h k` it is the norm per head, its gain shared by the heads. The mean and the division are in float32
    or better; `y` has the type of `x`. Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467.
    """

    def __init__(self, dim: int, *, eps: float = 1e-6, rngs: nnx.Rngs):
        self.eps = eps
        self.scale = param(nnx.initializers.ones, (dim,), axes=(None,), group='vector', rngs=rngs)

    def __call__(self, x: Float[Array, '*b d']) -> Float[Array, '*b d']:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        inverse = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        scale = jnp.broadcast_to(self.scale[...].astype(wide.dtype), x.shape)
        return (wide * inverse * scale).astype(x.dtype)
