"""Convolutions over neighbours on both sides."""

import jax.numpy as jnp
from flax import nnx

from attnlab.errors import UserError
from attnlab.functional.documents import local_sum
from attnlab.functional.recomputed import recomputed_method
from attnlab.functional.recurrences import state_dtype
from attnlab.module import Module
from attnlab.nn.parameter import param
from attnlab.typing import Segments, Sequence


class CentredConv(Module):
    """A depthwise convolution, `y_t = c + sum_i a_i x_{t - w // 2 + i}`, `0 <= i < w`, within the document.

    `width` is `w`; there are `kernels` kernels, each for as many neighbouring channels, `None`: one a channel. Taps
    start uniform with variance `1 / (3 width)`, as those of PyTorch's Conv1d; sums are in float32 or better.

    Raises `UserError` for an even width, and unless `kernels` divides `dim`.
    """

    def __init__(self, dim: int, *, width: int = 3, kernels: int | None = None, bias: bool = False, rngs: nnx.Rngs):
        kernels = dim if kernels is None else kernels
        if width < 1 or width % 2 == 0:
            raise UserError(f'the width of CentredConv is {width}; it must be odd')
        if kernels < 1 or dim % kernels:
            raise UserError(f'kernels of CentredConv is {kernels}; it must divide dim, which is {dim}')
        self.shared = dim // kernels
        start = nnx.initializers.variance_scaling(1 / 3, 'fan_in', 'uniform')
        self.taps = param(start, (width, kernels), axes=(None, 'heads'), group='vector', rngs=rngs)
        zeros = nnx.initializers.zeros
        self.bias = param(zeros, (dim,), axes=('heads',), group='vector', rngs=rngs) if bias else None

    @recomputed_method
    def __call__(self, x: Sequence, segments: Segments | None) -> Sequence:
        wide = state_dtype(x.dtype)
        taps = jnp.repeat(self.taps[...].astype(wide), self.shared, axis=1)
        y = local_sum(x.astype(wide), taps[:, None, None], segments)
        if self.bias is not None:
            y = y + jnp.broadcast_to(self.bias[...].astype(wide), y.shape)
        return y.astype(x.dtype)
