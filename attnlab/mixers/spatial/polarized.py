"""Polarized self-attention: a gate of channels that sums over space, and a gate of places that sums over channels."""

from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float

from attnlab.context import Context
from attnlab.functional.precision import wide_dtype
from attnlab.mixers.mixer import TwoSided
from attnlab.module import Module
from attnlab.nn.norms import LayerNorm
from attnlab.nn.projections import Linear
from attnlab.typing import Segments, Sequence


class PolarizedChannelGate(Module):
    """One number a document and channel, `sigmoid(norm(W_z sum_t p_t (x_t W_v)))`, `p = softmax_t(x_t w_q)`.

    `W_v` halves the channels; `W_z` restores them, with a bias.
    """

    def __init__(self, dim: int, *, rngs: nnx.Rngs):
        half = max(1, dim // 2)
        self.query = Linear(dim, 1, axes=('embed', None), rngs=rngs)
        self.value = Linear(dim, half, axes=('embed', None), rngs=rngs)
        self.up = Linear(half, dim, bias=True, axes=(None, None), rngs=rngs)
        self.norm = LayerNorm(dim, rngs=rngs)

    def __call__(self, x: Sequence, same: Bool[Array, 'b t s'] | None) -> Float[Array, 'b #t d']:
        """The gate of the document of every token; `same` tells which tokens share one, `None` that all do."""
        scores, values = self.query(x)[..., 0].astype(wide_dtype(x.dtype)), self.value(x)
        if same is None:
            weights = jax.nn.softmax(scores, axis=-1)[:, None]
        else:
            weights = jax.nn.softmax(jnp.where(same, scores[:, None], -jnp.inf), axis=-1)
        read = jnp.einsum('b t s, b s f -> b t f', weights.astype(x.dtype), values)
        return sigmoid(self.norm(self.up(read)))


class PlaceGate(Module):
    """One number a token, `sigmoid(softmax(mean_t(x_t W_q)) . (x_t W_v))`; both maps halve the channels."""

    def __init__(self, dim: int, *, rngs: nnx.Rngs):
        half = max(1, dim // 2)
        self.query = Linear(dim, half, axes=('embed', None), rngs=rngs)
        self.value = Linear(dim, half, axes=('embed', None), rngs=rngs)

    def __call__(self, x: Sequence, same: Bool[Array, 'b t s'] | None) -> Float[Array, 'b t 1']:
        """The gate of every token; see `PolarizedChannelGate`."""
        wide = wide_dtype(x.dtype)
        queries, values = self.query(x).astype(wide), self.value(x)
        if same is None:
            means = jnp.mean(queries, axis=1, keepdims=True)
        else:
            share = same.astype(wide)
            share = share / jnp.sum(share, axis=-1, keepdims=True)
            means = jnp.einsum('b t s, b s f -> b t f', share, queries)
        weights = jnp.broadcast_to(jax.nn.softmax(means, axis=-1), values.shape)
        return sigmoid(jnp.sum(weights * values.astype(wide), axis=-1, keepdims=True)).astype(x.dtype)


class PolarizedAttention(TwoSided):
    """A gate of channels and a gate of places, each computed from all tokens of the document.

        parallel:    y = A(x) x + B(x) x
        sequential:  y = B(z) z,  z = A(x) x

    `A` is `PolarizedChannelGate`, `B` is `PlaceGate`, in the form of the paper: the released code takes the softmax of
    `B` over places. It needs no grid: nothing depends on where a token is. Liu et al. 2021,
    https://arxiv.org/abs/2107.00782.

    Args:
      dim: model width.
      join: 'parallel' or 'sequential'.
      rngs: draws the parameters.
    """

    def __init__(self, dim: int, *, join: Literal['parallel', 'sequential'] = 'parallel', rngs: nnx.Rngs):
        self.join = join
        self.channels = PolarizedChannelGate(dim, rngs=rngs)
        self.places = PlaceGate(dim, rngs=rngs)

    def __call__(self, x: Sequence, ctx: Context, state: None = None) -> tuple[Sequence, None]:
        same = _same(ctx.segments)
        z = self.channels(x, same) * x
        return (z + self.places(x, same) * x if self.join == 'parallel' else self.places(z, same) * z), None


def sigmoid(x: Float[Array, '*b d']) -> Float[Array, '*b d']:
    """The logistic function, computed in float32 or better."""
    return jax.nn.sigmoid(x.astype(wide_dtype(x.dtype))).astype(x.dtype)


def _same(segments: Segments | None) -> Bool[Array, 'b t s'] | None:
    """Which tokens share a document."""
    return None if segments is None else segments[:, :, None] == segments[:, None, :]
