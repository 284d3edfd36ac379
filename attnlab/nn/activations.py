"""Elementwise nonlinearities by name."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from attnlab.errors import UserError, nearest

Activation = Callable[[jax.Array], jax.Array]

ACTIVATIONS: dict[str, Activation] = {
    'gelu': jax.nn.gelu,
    'identity': lambda x: x,
    'relu': jax.nn.relu,
    'relu_squared': lambda x: jnp.square(jax.nn.relu(x)),
    'sigmoid': jax.nn.sigmoid,
    'silu': jax.nn.silu,
    'tanh': jnp.tanh,
}
"""`gelu` is the tanh approximation; `relu_squared` is of So et al. 2021, https://arxiv.org/abs/2109.08668."""


def activation(name: str) -> Activation:
    """Returns the nonlinearity called `name`. Raises `UserError` naming the closest one for an unknown name."""
    if name not in ACTIVATIONS:
        raise UserError(f'there is no activation {name!r}{nearest(name, ACTIVATIONS)}')
    return ACTIVATIONS[name]
