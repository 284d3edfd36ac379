"""Linear maps of the last axis."""

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from attnlab.functional import sequence
from attnlab.nn.parameter import Initializer, param

fan_in_normal = nnx.initializers.variance_scaling(1.0, 'fan_in', 'normal')
"""Gaussian with variance one over the number of inputs, which preserves the variance of white noise."""


class Linear(nnx.Module):
    """A learned linear map `y = x W + b` with `W` of shape `dim_in dim_out`.

    Parameters are float32 and cast to the type of `x` where they are used. `axes` names the dimensions of the
    weight; a map to `embed` is the last of a residual branch. `usual` says that it was drawn as maps usually are.
    """

    def __init__(
        self,
        dim_in: int,
        dim_out: int,
        *,
        bias: bool = False,
        initializer: Initializer = fan_in_normal,
        axes: tuple[str | None, str | None] = ('embed', 'heads'),
        group: str = 'matrix',
        rngs: nnx.Rngs,
    ):
        self.axes, self.usual = axes, initializer is fan_in_normal
        self.weight = param(initializer, (dim_in, dim_out), axes=axes, group=group, rngs=rngs)
        zeros = nnx.initializers.zeros
        self.bias = param(zeros, (dim_out,), axes=(axes[1],), group='vector', rngs=rngs) if bias else None

    def __call__(self, x: Float[Array, '*b d']) -> Float[Array, '*b f']:
        return self.apply(self.inputs(x), self.matrix())

    def inputs(self, x: Float[Array, '*b d']) -> Float[Array, '*b d']:
        """The input of the product; subclasses may quantize it."""
        return x

    def matrix(self) -> Float[Array, 'd f']:
        """The weight in the type of `x`; subclasses may quantize it."""
        return self.weight[...]

    def apply(self, x: Float[Array, '*b d'], weight: Float[Array, 'd f']) -> Float[Array, '*b f']:
        """Applies the map with another weight."""
        # Leading axes are merged: the gradient of the weight then contracts one axis, without a transposed copy on CPU.
        # Not where time is divided over devices: merging rows and time would make every device gather all tokens.
        y = jnp.dot(x if sequence.divided() else x.reshape(-1, x.shape[-1]), weight.astype(x.dtype))
        if self.bias is not None:
            y = y + self.bias[...].astype(x.dtype).reshape((1,) * (y.ndim - 1) + (-1,))
        return y.reshape(*x.shape[:-1], y.shape[-1])
