"""Functions that round, with gradients of functions that do not."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@jax.custom_vjp
def straight_through(hard: Float[Array, '*b'], soft: Float[Array, '*b']) -> Float[Array, '*b']:
    """Returns `hard`, with the gradient of `soft`. Bengio et al. 2013, https://arxiv.org/abs/1308.3432."""
    return hard


straight_through.defvjp(lambda hard, soft: (hard, None), lambda _, gradient: (jnp.zeros_like(gradient), gradient))
