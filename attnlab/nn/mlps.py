"""Channel mixers: networks applied to every token separately; nonlinearities by name, or as a tree of functions.

The hidden activations are recomputed in the backward pass: that is elementwise work, while storing them would take more
memory than anything else in a block, and more time on CPU.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from attnlab.module import Module
from attnlab.nn.activations import activation as activation_called
from attnlab.nn.activations import learned
from attnlab.nn.core_units import CoreUnit
from attnlab.nn.norms import LayerNorm
from attnlab.nn.preludes import Canon, Prelude
from attnlab.nn.projections import Linear
from attnlab.typing import Segments, Sequence, State


def gated_width(dim: int) -> int:
    """Returns 8/3 of a width, rounded up to a multiple of 64."""
    return 64 * -(-8 * dim // (3 * 64))


class GatedMLP(Module):
    """A gated two-layer network `y = (f(x W_g) * (x W_u)) W_d`, hidden width `hidden`.

    `hidden=None` is 8/3 of `dim` rounded up to a multiple of 64: the cost of an ungated network of four times `dim`.
    The activation names the variant: 'silu' SwiGLU, 'gelu' GEGLU, 'relu' ReGLU, 'sigmoid' GLU, 'identity' bilinear.
    Raises `UserError` for an unknown activation. Shazeer 2020, https://arxiv.org/abs/2002.05202.
    """

    def __init__(self, dim: int, *, hidden: int | None = None, activation: str | CoreUnit = 'silu', rngs: nnx.Rngs):
        hidden = gated_width(dim) if hidden is None else hidden
        self.activation, self.learned = activation, learned(activation, rngs=rngs)
        self.gate = Linear(dim, hidden, axes=('embed', 'mlp'), rngs=rngs)
        self.up = Linear(dim, hidden, axes=('embed', 'mlp'), rngs=rngs)
        self.down = Linear(hidden, dim, axes=('mlp', 'embed'), rngs=rngs)

    def __call__(self, x: Sequence) -> Sequence:
        return self.read(self.gate(x), self.up(x))

    def read(self, gate: Float[Array, 'b t f'], up: Float[Array, 'b t f']) -> Sequence:
        """Returns `(f(gate) * up) W_d`."""
        f = self.learned or activation_called(self.activation)

        def down(gate: jax.Array, up: jax.Array) -> jax.Array:
            # The barrier keeps the derivative of the activation out of the product before it: on TPUs the two together
            # take seconds to compile and move more bytes than apart (docs/compile_time.md).
            return self.down(jax.lax.optimization_barrier(f(gate) * up))

        return jax.checkpoint(down)(gate, up)


class NormedGatedMLP(Module):
    """Activator: a gated network whose two factors are normalised, `y = (n(f(x W_g)) * n(x W_u)) W_d`, with biases.

    `n` is one layer norm for both. The paper has it in the place of attention, before an ungated network, so that its
    models mix no tokens (`attnlab.blocks.mixerless`); it is a channel mixer besides. Widths are those of `GatedMLP`.
    Abdullah and Aydin 2024, https://arxiv.org/abs/2405.15953. Raises `UserError` for an unknown activation.
    """

    def __init__(
        self, dim: int, *, hidden: int | None = None, activation: str | CoreUnit = 'gelu_exact', rngs: nnx.Rngs
    ):
        hidden = gated_width(dim) if hidden is None else hidden
        self.activation, self.learned = activation, learned(activation, rngs=rngs)
        self.gate = Linear(dim, hidden, bias=True, axes=('embed', 'mlp'), rngs=rngs)
        self.up = Linear(dim, hidden, bias=True, axes=('embed', 'mlp'), rngs=rngs)
        self.norm = LayerNorm(hidden, rngs=rngs)
        self.down = Linear(hidden, dim, bias=True, axes=('mlp', 'embed'), rngs=rngs)

    def __call__(self, x: Sequence) -> Sequence:
        f = self.learned or activation_called(self.activation)
        return jax.checkpoint(lambda gate, up: self.down(self.norm(f(gate)) * self.norm(up)))(self.gate(x), self.up(x))


class MLP(Module):
    """A two-layer network `y = f(x W_u) W_d`, hidden width `hidden` (`None`: four times `dim`), without biases.

    Raises `UserError` for an unknown activation.
    """

    def __init__(self, dim: int, *, hidden: int | None = None, activation: str | CoreUnit = 'gelu', rngs: nnx.Rngs):
        hidden = 4 * dim if hidden is None else hidden
        self.activation, self.learned = activation, learned(activation, rngs=rngs)
        self.up = Linear(dim, hidden, axes=('embed', 'mlp'), rngs=rngs)
        self.down = Linear(hidden, dim, axes=('mlp', 'embed'), rngs=rngs)

    def __call__(self, x: Sequence) -> Sequence:
        f = self.learned or activation_called(self.activation)
        return jax.checkpoint(lambda up: self.down(f(up)))(self.up(x))


class ConvolvedMLP(Module):
    """`GatedMLP` whose hidden channels see a few tokens: `[g | u] = c([x W_g | x W_u])`, `y = (f(g) * u) W_d`.

    `c` is made as `prelude(2 * hidden, rngs=)`, and its state is passed as that of a prelude. Allen-Zhu 2025,
    https://ssrn.com/abstract=5240330, point D. Raises `UserError` for an unknown activation.
    """

    remembers = True

    def __init__(
        self,
        dim: int,
        *,
        hidden: int | None = None,
        activation: str | CoreUnit = 'silu',
        prelude: Callable[..., Prelude] = Canon,
        rngs: nnx.Rngs,
    ):
        self.network = GatedMLP(dim, hidden=hidden, activation=activation, rngs=rngs)
        self.prelude = prelude(2 * self.network.up.weight.shape[1], rngs=rngs)

    def __call__(
        self, x: Sequence, segments: Segments | None, state: State | None = None
    ) -> tuple[Sequence, State | None]:
        network = self.network
        both = jnp.concatenate([network.gate(x), network.up(x)], axis=-1)
        both, state = self.prelude(both, segments, state)
        return network.read(*jnp.split(both, 2, axis=-1)), state

    def init_state(self, batch: int, dtype: DTypeLike) -> State:
        """Returns the state of the prelude."""
        return self.prelude.init_state(batch, dtype)
