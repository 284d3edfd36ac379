"""Nonlinearities as small trees of functions, to be searched."""

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Optional

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from attnlab.config import check_choice
from attnlab.nn.activations import ACTIVATIONS, gelu_exact, normal_below
from attnlab.signature import checked_fields

UNARY: Mapping[str, Callable[[Array], Array]] = MappingProxyType(
    {
        'identity': lambda x: x,
        'negative': lambda x: -x,
        'absolute': jnp.abs,
        'square': jnp.square,
        'cube': lambda x: x * jnp.square(x),
        'signed_log': lambda x: jnp.sign(x) * jnp.log1p(jnp.abs(x)),
        'sine': jnp.sin,
        'cosine': jnp.cos,
        'bell': lambda x: jnp.exp(-jnp.square(x)),
        'arctangent': jnp.arctan,
        'normal': normal_below,
        'gelu': gelu_exact,
        **{name: ACTIVATIONS[name] for name in ('relu', 'sigmoid', 'softplus', 'tanh')},
        'below': lambda x: jnp.minimum(x, 0),
        'one': jnp.ones_like,
    }
)
"""Functions of one number, none of which has a pole; `signed_log` is `sign(x) log(1 + |x|)`."""

BINARY: Mapping[str, Callable[[Array, Array], Array]] = MappingProxyType(
    {
        'sum': lambda a, b: a + b,
        'difference': lambda a, b: a - b,
        'product': lambda a, b: a * b,
        'greatest': jnp.maximum,
        'least': jnp.minimum,
        'gated': lambda a, b: jax.nn.sigmoid(a) * b,
        'left': lambda a, b: a,
    }
)
"""Functions of two numbers."""


@checked_fields
@dataclasses.dataclass(frozen=True)
class CoreUnit:
    """`f(x) = b(u_1(z), u_2(z))`, with z the input, or what another unit makes of it.

    Ramachandran, Zoph and Le 2017, https://arxiv.org/abs/1710.05941, who search such trees and find
    `product(identity, sigmoid)`, the swish. Theirs have quotients too, which have poles.

    Attributes:
      combine: b, one of `BINARY`.
      first: u_1, one of `UNARY`.
      second: u_2, likewise.
      inner: the unit below; `None`: none.

    Raises `UserError` for another name.
    """

    combine: str = 'product'
    first: str = 'identity'
    second: str = 'sigmoid'
    inner: Optional['CoreUnit'] = None

    def __post_init__(self) -> None:
        check_choice(BINARY, 'combine', self.combine)
        for name in ('first', 'second'):
            check_choice(UNARY, name, getattr(self, name))

    def __call__(self, x: Float[Array, '*b']) -> Float[Array, '*b']:
        """The value, in the type of `x`."""
        z = x if self.inner is None else self.inner(x)
        return BINARY[self.combine](UNARY[self.first](z), UNARY[self.second](z))
