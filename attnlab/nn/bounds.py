"""Lower bounds of forget gates that rise from layer to layer."""

import math
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jaxtyping import Float

from attnlab.errors import UserError
from attnlab.functional.precision import wide_dtype
from attnlab.module import Module
from attnlab.nn.parameter import buffer, param

BoundKind = Literal['constant', 'learned']
"""Whether a lower bound is a number, or one of every channel that is learned."""

GREATEST = 1 - 2.0**-20
"""Of a learned bound, so that something is always forgotten, whose logarithm has a gradient."""


class RisingBound(Module):
    """The lower bounds of the forget gates of a layer `l` of a stack, `c_l = P_0 + ... + P_{l-1}` of every channel,

        P_j = exp(G_j) / (exp(G_0) + ... + exp(G_{L-1}))      over the layers that have one at the same place.

    `G_l` is learned and starts at zero, where `c_l = l / L`. The stack tells a layer its `c_l`
    (`attnlab.models.stack.Stack.stacked`); alone it is the first layer of its own stack, whose bound is 0.
    Qin et al. 2023, https://arxiv.org/abs/2311.04823.

    Args:
      shape: of the channels.
      axes: their logical names.
      rngs: draws nothing.
    """

    def __init__(self, shape: tuple[int, ...], *, axes: tuple[str | None, ...], rngs: nnx.Rngs):
        self.logits = param(nnx.initializers.zeros, shape, axes=axes, group='vector', rngs=rngs)
        self.bounds = buffer(jnp.zeros(shape), axes=axes)


def rising_bounds(logits: Float[Array, 'l ...']) -> Float[Array, 'l ...']:
    """The bounds of every layer of the logits of all, in float32 or better."""
    parts = jax.nn.softmax(logits.astype(wide_dtype(logits.dtype)), axis=0)
    below = jnp.cumsum(parts[:-1], axis=0)
    return jnp.minimum(jnp.concatenate([jnp.zeros_like(parts[:1]), below]), GREATEST)


def lower_bound(
    name: str, kind: BoundKind, number: float, shape: tuple[int, ...], *, axes: tuple[str | None, ...], rngs: nnx.Rngs
) -> float | RisingBound:
    """Returns the bound of the part called `name`: the number, or one learned for channels of this shape.

    Raises `UserError` for a number that is not from 0 to below 1, and for one beside a bound that is learned.
    """
    if not 0 <= number < 1:
        raise UserError(f'the lower_bound of {name} is {number}; it must be from 0 to below 1')
    if kind == 'constant':
        return number
    if number:
        raise UserError(f'the lower_bound of {name} is {number}, and bound=learned starts at 0; leave it out')
    return RisingBound(shape, axes=axes, rngs=rngs)


def bound_of(bound: float | RisingBound, like: Float[Array, '...']) -> Float[Array, '...'] | float:
    """A bound for gates `... channels`: the number, or those of the channels, in the type of the gates."""
    if not isinstance(bound, RisingBound):
        return bound
    bounds = bound.bounds[...].astype(like.dtype)
    return bounds.reshape((1,) * (like.ndim - bounds.ndim) + bounds.shape)


def bounded_log_sigmoid(logits: Float[Array, '...'], bound: Float[Array, '...'] | float) -> Float[Array, '...']:
    """`log(c + (1 - c) sigmoid(z))`, of bounds `c` one or as `z`; the gradient of those that are 0 is zero."""
    log_sigmoid = jax.nn.log_sigmoid(logits)
    if isinstance(bound, int | float):
        return jnp.logaddexp(math.log(bound), math.log1p(-bound) + log_sigmoid) if bound > 0 else log_sigmoid
    bound = jnp.broadcast_to(bound, logits.shape)
    above = jnp.where(bound > 0, bound, 0.5)
    raised = jnp.logaddexp(jnp.log(above), jnp.log1p(-above) + log_sigmoid)
    return jnp.where(bound > 0, raised, log_sigmoid)
