"""What follows a linear system: a nonlinearity, and a map that mixes channels, gated."""

from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from attnlab.functional.recomputed import gated
from attnlab.module import Module
from attnlab.nn.activations import activation as activation_called
from attnlab.nn.projections import Linear
from attnlab.typing import Sequence


class GatedReadout(Module):
    """`(W_1 x + c_1) * sigmoid(W_2 x + c_2)` of `x = f(y)`; `activation` names f, by default `gelu`.

    Dauphin et al. 2017, https://arxiv.org/abs/1612.08083. Raises `UserError` for an unknown activation.
    """

    goes_on = True

    def __init__(self, dim: int, *, activation: str = 'gelu', rngs: nnx.Rngs):
        activation_called(activation)
        self.activation = activation
        self.linear = Linear(dim, 2 * dim, bias=True, axes=('mlp', 'embed'), rngs=rngs)

    def __call__(self, y: Sequence) -> Sequence:
        values, gate = jnp.split(self.linear(activation_called(self.activation)(y)), 2, axis=-1)
        return gated(values, gate, jax.nn.sigmoid)


class SelfGate(Module):
    """`x * sigmoid(W x + c)` of `x = gelu(y)`, or `y * sigmoid(W x + c)`.

    Smith et al. 2023, https://arxiv.org/abs/2208.04933: `half_glu1` and `half_glu2` of the released code. Raises
    `UserError` for another `multiplied`.

    Args:
      dim: channels.
      multiplied: what the gate multiplies, 'activated' x or 'given' y.
      rngs: draws the parameters.
    """

    goes_on = True

    def __init__(self, dim: int, *, multiplied: Literal['activated', 'given'] = 'activated', rngs: nnx.Rngs):
        self.multiplied = multiplied
        self.linear = Linear(dim, dim, bias=True, axes=('mlp', 'embed'), rngs=rngs)

    def __call__(self, y: Sequence) -> Sequence:
        x = jax.nn.gelu(y)
        return gated({'activated': x, 'given': y}[self.multiplied], self.linear(x), jax.nn.sigmoid)
