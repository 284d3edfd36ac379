"""Hyper-connections: several residual streams, mixed by every branch."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from attnlab.blocks.residual import Connection, Residual
from attnlab.functional.precision import wide_dtype
from attnlab.module import Module
from attnlab.nn.norms import RMSNorm
from attnlab.nn.parameter import param
from attnlab.typing import Sequence


class HyperConnections(Residual):
    """`n` residual streams, each initialised with the embedding; their sum is the input of the final norm.

    A branch `f` with the coefficients `m` (`n`), `A` (`n n`) and `b` (`n`) reads `x` and updates the streams to `X'`:

        x = sum_s m_s X_s,    X'_i = sum_s A_si X_s + b_i f(norm(x)).

    Initially `A` is the identity, `b` is 1, and `m` selects stream `index mod n`, so that the streams
    equal those of a plain residual stack. Zhu et al. 2024, https://arxiv.org/abs/2409.19606; unlike there, output maps
    are not initially scaled by the square root of `n`.

    Args:
      dim: model width.
      streams: number of streams.
      dynamic: whether coefficients depend on the token, or are the same for all.
      branches: number of branches of the stack.
      rngs: draws the parameters.

    Raises `UserError` for fewer than one stream.
    """

    def __init__(self, dim: int, *, streams: int = 4, dynamic: bool = True, branches: int, rngs: nnx.Rngs):
        del branches, rngs
        self.dim, self.streams, self.dynamic = dim, streams, dynamic

    def open(self, x: Sequence) -> Float[Array, 'b t n d']:
        return jnp.broadcast_to(x[:, :, None], (*x.shape[:2], self.streams, x.shape[-1]))

    def connection(self, index: Any, *, rngs: nnx.Rngs) -> 'HyperConnection':
        return HyperConnection(self.dim, streams=self.streams, index=index, dynamic=self.dynamic, rngs=rngs)

    def close(self, streams: Float[Array, 'b t n d']) -> Sequence:
        return jnp.sum(streams, axis=2)


class HyperConnection(Connection):
    """The coefficients of one branch: learned numbers, plus those of `TokenCoefficients` for every token."""

    def __init__(self, dim: int, *, streams: int, index: Any, dynamic: bool, rngs: nnx.Rngs):
        reads = jax.nn.one_hot(index % streams, streams)[:, None]

        def start(key: Array, shape: tuple[int, int], dtype: Any) -> Array:
            del key, shape
            return jnp.concatenate([reads, jnp.eye(streams)], axis=1).astype(dtype)

        self.mixing = param(start, (streams, streams + 1), axes=(None, None), group='vector', rngs=rngs)
        self.writing = param(nnx.initializers.ones, (streams,), axes=(None,), group='vector', rngs=rngs)
        self.token: Any = TokenCoefficients(dim, streams=streams, rngs=rngs) if dynamic else None

    def read(self, streams: Float[Array, 'b t n d']) -> tuple[Sequence, tuple[Array, Array]]:
        mixing, writing = self.mixing[...][None, None], self.writing[...][None, None]
        if self.token is not None:
            more_mixing, more_writing = self.token(streams)
            mixing, writing = mixing + more_mixing, writing + more_writing
        mixing = jnp.broadcast_to(mixing, (*streams.shape[:3], streams.shape[2] + 1)).astype(streams.dtype)
        mixed = jnp.einsum('b t n m, b t n d -> b t m d', mixing, streams)
        return mixed[:, :, 0], (mixed[:, :, 1:], jnp.broadcast_to(writing, streams.shape[:3]).astype(streams.dtype))

    def add(self, kept: tuple[Array, Array], y: Sequence) -> Float[Array, 'b t n d']:
        mixed, writing = kept
        return mixed + writing[..., None] * y[:, :, None]


class TokenCoefficients(Module):
    """Token-dependent terms of the coefficients: `s_a tanh(z W_a)` for `m` and `A`, `s_b tanh(z W_b)` for `b`.

    `z = norm(X)`, stream by stream. The maps start at zero, the scales `s` at 0.01. Computed in float32.
    """

    def __init__(self, dim: int, *, streams: int, rngs: nnx.Rngs):
        zeros, scale = nnx.initializers.zeros, nnx.initializers.constant(0.01)
        self.norm = RMSNorm(dim, rngs=rngs)
        self.mixing = param(zeros, (dim, streams + 1), axes=('embed', None), rngs=rngs)
        self.writing = param(zeros, (dim, 1), axes=('embed', None), rngs=rngs)
        self.mixing_scale, self.writing_scale = (param(scale, (), axes=(), group='vector', rngs=rngs) for _ in range(2))

    def __call__(self, streams: Float[Array, 'b t n d']) -> tuple[Float[Array, 'b t n m'], Float[Array, 'b t n']]:
        normed = self.norm(streams)

        def projected(weight: nnx.Param) -> Array:
            return jnp.einsum(
                'b t n d, d m -> b t n m',
                normed,
                weight[...].astype(normed.dtype),
                preferred_element_type=wide_dtype(normed.dtype),
            )

        mixing = self.mixing_scale[...] * jnp.tanh(projected(self.mixing))
        writing = self.writing_scale[...] * jnp.tanh(projected(self.writing))
        return mixing, writing[..., 0]
