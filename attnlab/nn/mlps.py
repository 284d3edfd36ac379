"""Channel mixers: networks applied to every token separately.

The hidden activations are recomputed in the backward pass: that is elementwise work, while storing them would take more
memory than anything else in a block, and more time on CPU.
"""

import jax
from flax import nnx

from attnlab.module import Module
from attnlab.nn.activations import activation as activation_called
from attnlab.nn.activations import learned
from attnlab.nn.projections import Linear
from attnlab.typing import Sequence


class GatedMLP(Module):
    """A gated two-layer network `y = (f(x W_g) * (x W_u)) W_d`, hidden width `hidden`.

    `hidden=None` is 8/3 of `dim` rounded up to a multiple of 64: the cost of an ungated network of four times `dim`.
    The activation names the variant: 'silu' SwiGLU, 'gelu' GEGLU, 'relu' ReGLU, 'sigmoid' GLU, 'identity' bilinear.
    Raises `UserError` for an unknown activation. Shazeer 2020, https://arxiv.org/abs/2002.05202.
    """

    def __init__(self, dim: int, *, hidden: int | None = None, activation: str = 'silu', rngs: nnx.Rngs):
        hidden = 64 * -(-8 * dim // (3 * 64)) if hidden is None else hidden
        self.activation, self.learned = activation, learned(activation, rngs=rngs)
        self.gate = Linear(dim, hidden, axes=('embed', 'mlp'), rngs=rngs)
        self.up = Linear(dim, hidden, axes=('embed', 'mlp'), rngs=rngs)
        self.down = Linear(hidden, dim, axes=('mlp', 'embed'), rngs=rngs)

    def __call__(self, x: Sequence) -> Sequence:
        f = self.learned or activation_called(self.activation)

        def read(gate: jax.Array, up: jax.Array) -> jax.Array:
            # The barrier keeps the derivative of the activation out of the product before it: on TPUs the two together
            # take seconds to compile and move more bytes than apart (docs/compile_time.md).
            return self.down(jax.lax.optimization_barrier(f(gate) * up))

        return jax.checkpoint(read)(self.gate(x), self.up(x))


class MLP(Module):
    """A two-layer network `y = f(x W_u) W_d`, hidden width `hidden` (`None`: four times `dim`), without biases.

    Raises `UserError` for an unknown activation.
    """

    def __init__(self, dim: int, *, hidden: int | None = None, activation: str = 'gelu', rngs: nnx.Rngs):
        hidden = 4 * dim if hidden is None else hidden
        self.activation, self.learned = activation, learned(activation, rngs=rngs)
        self.up = Linear(dim, hidden, axes=('embed', 'mlp'), rngs=rngs)
        self.down = Linear(hidden, dim, axes=('mlp', 'embed'), rngs=rngs)

    def __call__(self, x: Sequence) -> Sequence:
        f = self.learned or activation_called(self.activation)
        return jax.checkpoint(lambda up: self.down(f(up)))(self.up(x))
