"""Parts that gated attention units share: queries and keys of one head from the same channels, and their gates."""

import math
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from attnlab.context import Context
from attnlab.functional.precision import wide_dtype
from attnlab.functional.recomputed import recomputed
from attnlab.functional.rotary import rotated_channels
from attnlab.module import Module
from attnlab.nn.parameter import param
from attnlab.nn.positions import Rope
from attnlab.typing import Queries
from pallas_kernels import Softmax

ROPE = Rope()
SOFTMAX = Softmax()


@recomputed
def wide_silu(x: Float[Array, '*b d']) -> Float[Array, '*b d']:
    """`silu(x)`, in float32 or better."""
    return jax.nn.silu(x.astype(wide_dtype(x.dtype)))


def rounded_silu(x: Float[Array, '*b d']) -> Float[Array, '*b d']:
    """`silu(x)`, rounded once, to the type of `x`."""
    return wide_silu(x).astype(x.dtype)


@recomputed
def gated_by_silu(y: Float[Array, '*b d'], logits: Float[Array, '*b d']) -> Float[Array, '*b d']:
    """`y silu(logits)`, rounded once, to the type of the logits."""
    return (wide_silu(logits) * y).astype(logits.dtype)


@recomputed
def averaged(
    average: Float[Array, 'b t d'], x: Float[Array, 'b t d'], direct: Float[Array, ' d']
) -> Float[Array, 'b t d']:
    """`silu(average + direct x)`, in the type of the average."""
    return jax.nn.silu(average + direct.astype(average.dtype)[None, None] * x.astype(average.dtype))


def offset_deviation(length: int) -> float:
    """The standard deviation of offsets whose products over `length` start as the relative bias of the paper.

    That is `R_i a . R_j b`, `a` and `b` drawn with 0.02, beside `q . k / length`: here `c_q . c_k / length`, rotated.
    """
    return 0.02 * math.sqrt(length)


class QueriesAndKeys(Module):
    """Queries and keys of one head from the same channels, each by a gain and an offset: `q = g x + c`.

    Gains start with a standard deviation of 0.02, offsets with one of `offset`; both are rotated by `position`. Offsets
    are drawn such that `c_q . c_k`, the product of a token with itself, is not negative: a squared ReLU may else
    be zero for all pairs of a short row, without a gradient. Hua et al. 2022, https://arxiv.org/abs/2202.10447.
    """

    def __init__(self, channels: int, *, position: Rope | None, offset: float = 0.0, rngs: nnx.Rngs):
        if position is not None:
            rotated_channels(channels, position.fraction)
        self.position = position
        axes = (None, None)
        small = nnx.initializers.normal(0.02)
        self.gain = param(small, (2, channels), axes=axes, group='vector', rngs=rngs)
        start = partial(_agreeing, offset) if offset else nnx.initializers.zeros
        self.offset = param(start, (2, channels), axes=axes, group='vector', rngs=rngs)

    def __call__(self, x: Float[Array, 'b t k'], ctx: Context) -> tuple[Queries, Queries]:
        """Returns both in the type of `x`, which is float32 or better: squared weights double an error of rounding."""
        gain, offset = (each[...].astype(x.dtype)[:, None, None, None] for each in (self.gain, self.offset))
        q, k = x[None, :, :, None] * gain + offset
        if self.position is None:
            return q, k
        return self.position.rotate(q, ctx.positions), self.position.rotate(k, ctx.positions)


def _agreeing(deviation: float, key: Array, shape: tuple[int, int], dtype: DTypeLike) -> Float[Array, '2 k']:
    """Two normal vectors, the second with the sign of their product."""
    q, k = deviation * jax.random.normal(key, shape, dtype)
    return jnp.stack([q, jnp.where(q @ k < 0, -k, k)])
