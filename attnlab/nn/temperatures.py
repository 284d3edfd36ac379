"""Temperatures: factors of a query's products with its keys that depend on how many keys it sees."""

import math

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from attnlab.module import Module
from attnlab.nn.parameter import param
from attnlab.typing import Sequence


def log_length_scale(length: int) -> float:
    """Returns one over the mean of `log n` for `n` from 1 to `length`, at most `length`.

    The factors `log n` times this value average to one over a row of that length.
    """
    return length / max(math.lgamma(length + 1), 1.0)


class LogLength(Module):
    """The factor `s log(n_i) + c` of scalable softmax, `s` and, with `bias`, `c` learned for every head.

    `n_i` is the number of keys that query `i` sees. With `c = 0` the weights are `n^(s z_j) / sum_l n^(s z_l)` for
    scores `z`: the largest weight does not vanish as keys are added. `s` starts at `log_length_scale(length)`, so that
    the factors of a row of that length average to one; `c` starts at 0. Neither has weight decay.
    Nakanishi 2025, https://arxiv.org/abs/2501.19399.
    """

    def __init__(self, dim: int, *, heads: int, length: int = 1024, bias: bool = False, rngs: nnx.Rngs):
        del dim
        start = nnx.initializers.constant(log_length_scale(length))
        self.scale = param(start, (heads,), axes=('heads',), group='vector', rngs=rngs)
        zeros = nnx.initializers.zeros
        self.bias = param(zeros, (heads,), axes=('heads',), group='vector', rngs=rngs) if bias else None

    def __call__(self, x: Sequence, counts: Float[Array, 'b t']) -> Float[Array, 'b t h']:
        factor = jnp.log(jnp.maximum(counts, 1))[..., None] * _per_head(self.scale, counts)
        return factor if self.bias is None else factor + _per_head(self.bias, counts)


class RootLength(Module):
    """The factor `sqrt(2 n_i) / gamma` that divides a ReLU over `n_i` keys by `gamma sqrt(n_i / 2)`.

    Its weights `max(s, 0) / (gamma sqrt(n / 2))` keep the variance of their sum over Gaussian scores. `gamma` is the
    exponential of a learned number for every head, which starts at 0.
    Shen et al. 2023, https://arxiv.org/abs/2302.06461.
    """

    def __init__(self, dim: int, *, heads: int, rngs: nnx.Rngs):
        del dim
        self.log_gamma = param(nnx.initializers.zeros, (heads,), axes=('heads',), group='vector', rngs=rngs)

    def __call__(self, x: Sequence, counts: Float[Array, 'b t']) -> Float[Array, 'b t h']:
        return jnp.sqrt(2 * counts)[..., None] * jnp.exp(-_per_head(self.log_gamma, counts))


def _per_head(parameter: nnx.Param, like: Array) -> Float[Array, '1 1 h']:
    return parameter[...].astype(like.dtype)[None, None]
