"""Linear maps of the last axis."""

from typing import ClassVar

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from attnlab.errors import UserError
from attnlab.functional import sequence
from attnlab.functional.precision import wide_dtype
from attnlab.module import Module
from attnlab.nn.activations import activation as activation_called
from attnlab.nn.parameter import Initializer, param
from pallas_kernels import target

fan_in_normal = nnx.initializers.variance_scaling(1.0, 'fan_in', 'normal')
"""Gaussian with variance one over the number of inputs, which preserves the variance of white noise."""


small_orthogonal = nnx.initializers.orthogonal(0.1)
"""A tenth of a matrix with orthogonal rows or columns."""


class Linear(Module):
    """A learned linear map `y = x W + b` with `W` of shape `dim_in dim_out`.

    Parameters are float32 and cast to the type of `x` where they are used. `axes` names the dimensions of the
    weight; a map to `embed` is the last of a residual branch. `usual` says that it was drawn as maps usually are.
    `group` is that of the weight; biases are of the group `vector`, or with their weight of `dynamics`, and start as
    `bias_initializer` draws them.

    Attributes:
      absorbs: whether it computes the product of `inputs` and `matrix`, which callers then may take in another order.
    """

    absorbs: ClassVar[bool] = True

    def __init__(
        self,
        dim_in: int,
        dim_out: int,
        *,
        bias: bool = False,
        initializer: Initializer = fan_in_normal,
        axes: tuple[str | None, str | None] = ('embed', 'heads'),
        group: str = 'matrix',
        bias_initializer: Initializer = nnx.initializers.zeros,
        rngs: nnx.Rngs,
    ):
        self.axes, self.usual = axes, initializer is fan_in_normal
        self.weight = param(initializer, (dim_in, dim_out), axes=axes, group=group, rngs=rngs)
        beside = 'dynamics' if group == 'dynamics' else 'vector'
        self.bias = param(bias_initializer, (dim_out,), axes=(axes[1],), group=beside, rngs=rngs) if bias else None

    def share(self, other: 'Linear') -> None:
        """Has the parameters of another map, which are then those of both."""
        self.axes, self.usual, self.weight, self.bias = other.axes, other.usual, other.weight, other.bias

    def __call__(self, x: Float[Array, '*b d']) -> Float[Array, '*b f']:
        return self.apply(self.inputs(x), self.matrix())

    def inputs(self, x: Float[Array, '*b d']) -> Float[Array, '*b d']:
        """The input of the product; subclasses may quantize it."""
        return x

    def matrix(self) -> Float[Array, 'd f']:
        """The weight, in the type it is stored in (`apply` casts it to that of `x`); subclasses may quantize it."""
        return self.weight[...]

    @property
    def rows_apart(self) -> bool:
        """Whether a row of the output depends on that row of the input alone; subclasses may round rows together."""
        return True

    def apply(self, x: Float[Array, '*b d'], weight: Float[Array, 'd f']) -> Float[Array, '*b f']:
        """Applies the map with another weight. Raises `UserError` for `x` of another width than the map's."""
        self.check_width(x, weight.shape[0])
        # On a CPU leading axes are merged: the gradient of the weight then contracts one axis, without a copy.
        # On a TPU merged ones would be copied to other layouts. Nor where time is sharded over devices: every one of
        # them would gather all tokens.
        merged = target.current().platform == 'cpu' and not sequence.divided()
        y = jnp.dot(x.reshape(-1, x.shape[-1]) if merged else x, weight.astype(x.dtype))
        if self.bias is not None:
            # Cast after it is spread over tokens, so that its gradient is summed over them in its own type.
            y = y + jnp.broadcast_to(self.bias[...], y.shape).astype(x.dtype)
        return y.reshape(*x.shape[:-1], y.shape[-1])


def check_plain(linear: Linear) -> None:
    """Raises `UserError` for a linear map that does not compute with its parameters as they are."""
    if type(linear) is not Linear:
        raise UserError(
            f'a linear map of this model is a {type(linear).__name__}, not a Linear that computes with its weights as '
            'they are, and is neither changed nor looked into; of a run of few bits give the one that it was made '
            'from, or one trained without rounding'
        )


class BlockDiagonal(Module):
    """A linear map of each of `blocks` equal groups of channels on its own, to as many of `features`.

    A bias is added unless `bias` is false. `features` is `dim` when `None`. Raises `UserError` unless `blocks` divides
    both.
    """

    def __init__(self, dim: int, *, blocks: int, features: int | None = None, bias: bool = True, rngs: nnx.Rngs):
        features = dim if features is None else features
        for width in (dim, features):
            if width % blocks:
                raise UserError(f'{blocks} blocks do not divide a width of {width}; blocks must divide it')
        weight = nnx.initializers.variance_scaling(1.0, 'fan_in', 'normal', batch_axis=0)
        shape = (blocks, dim // blocks, features // blocks)
        self.weight = param(weight, shape, axes=('mlp', None, None), rngs=rngs)
        zeros = nnx.initializers.zeros
        self.bias = param(zeros, (features,), axes=('mlp',), group='vector', rngs=rngs) if bias else None

    def __call__(self, x: Float[Array, 'b t d']) -> Float[Array, 'b t f']:
        groups = x.reshape(*x.shape[:2], self.weight.shape[0], -1)
        # Sums in float32, also in gradients: a CPU would accumulate tokens in the type of the activations.
        wide = wide_dtype(x.dtype)
        # The weights first: XLA for CPUs has no product of bfloat16 with such sums for the other order.
        y = jnp.einsum('hfv,bthf->bthv', self.weight[...].astype(x.dtype), groups, preferred_element_type=wide)
        y = y.reshape(*x.shape[:2], -1)
        if self.bias is not None:
            y = y + jnp.broadcast_to(self.bias[...].astype(wide), y.shape)
        return y.astype(x.dtype)


def default_rank(dim: int, given: int | None = None) -> int:
    """The width of a bottleneck as it is `given`; `None`: a sixteenth of the width, rounded up."""
    return -(-dim // 16) if given is None else given


class LowRank(Module):
    """`c + f(x A) B` with `A` of `rank` columns; `A` starts at zero, so that the start is `c`.

    `activation` names f; without a `start` there is no `c`; with one `y` is in float32 or better. As the bottlenecks of
    RWKV (Peng et al. 2024, https://arxiv.org/abs/2404.05892). Raises `UserError` for an unknown activation.
    """

    def __init__(
        self,
        dim: int,
        features: int,
        *,
        rank: int,
        activation: str,
        up: Initializer = small_orthogonal,
        start: Initializer | None = None,
        rngs: nnx.Rngs,
    ):
        activation_called(activation)
        self.activation = activation
        self.down = Linear(dim, rank, initializer=nnx.initializers.zeros, axes=('embed', None), rngs=rngs)
        self.up = Linear(rank, features, initializer=up, axes=(None, 'heads'), rngs=rngs)
        self.start = None if start is None else param(start, (features,), axes=('heads',), group='dynamics', rngs=rngs)

    def __call__(self, x: Float[Array, 'b t d']) -> Float[Array, 'b t f']:
        y = self.up(activation_called(self.activation)(self.down(x)))
        if self.start is None:
            return y
        wide = y.astype(wide_dtype(y.dtype))
        return wide + jnp.broadcast_to(self.start[...].astype(wide.dtype), wide.shape)
