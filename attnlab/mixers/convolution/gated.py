"""Gated convolutions: a few tokens at a time, and a product that makes them depend on the input."""

from flax import nnx
from jax.typing import DTypeLike

from attnlab.context import Context
from attnlab.mixers.mixer import Mixer
from attnlab.nn.preludes import ConvState, ShortConv
from attnlab.nn.projections import Linear
from attnlab.typing import Sequence, State


class GatedConvolution(Mixer):
    """A short causal convolution of every channel times a projection of the input, `y = conv(x) * (x W + c) + x`.

    Arora et al. 2023, https://arxiv.org/abs/2312.04927, section 3.3, with the skip connection of the released code.

    Args:
      dim: model width.
      width: taps of the convolution.
      rngs: draws the parameters.

    Raises `UserError` for a width below 1.
    """

    def __init__(self, dim: int, *, width: int = 3, rngs: nnx.Rngs):
        self.conv = ShortConv(dim, width=width, activation=None, bias=True, rngs=rngs)
        self.gate = Linear(dim, dim, bias=True, rngs=rngs)

    def __call__(self, x: Sequence, ctx: Context, state: State | None = None) -> tuple[Sequence, State | None]:
        y, state = self.conv(x, ctx.segments, state)
        return y * self.gate(x) + x, state

    @property
    def divides_time(self) -> bool:
        return True

    def init_state(self, batch: int, length: int, dtype: DTypeLike) -> ConvState:
        """Returns the inputs the convolution still needs; their number does not depend on `length`."""
        del length
        return self.conv.init_state(batch, dtype)
