"""A recurrence that is linear but for the rectified part of its state."""

from collections.abc import Sequence as Shape
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.functional.precision import wide_dtype
from attnlab.functional.recurrences import almost_linear, document_starts, no_segment
from attnlab.mixers.mixer import Mixer
from attnlab.nn.parameter import param
from attnlab.nn.projections import Linear
from attnlab.typing import Sequence


class AlmostLinearState(NamedTuple):
    """What the recurrence remembers of a stream.

    Attributes:
      hidden: the state of the recurrence, float32 or float64.
      segment: the segment of the last token, `b`; -1 before the first.
    """

    hidden: Float[Array, 'b n']
    segment: Int[Array, ' b']


class AlmostLinearRNN(Mixer):
    """AL-RNN, driven by its input: a state of which all but `rectified` units are linear, read by a linear map.

        z_t = a * z_{t-1} + W f(z_{t-1}) + h + C x_t        y_t = B z_t

    `f` rectifies the last `rectified` units and leaves the others as they are, so that the map is linear in each of at
    most `2^rectified` regions. The paper's has no input but observations that overwrite units while it is trained; `C`
    and `B` are what makes it a layer. `a` starts as the diagonal of `R^T R / n + 1` over its largest eigenvalue, `R`
    normal, W normal of standard deviation 0.01, `h` at zero. The state and its maps are in float32 or better.
    Brenner et al. 2024, https://arxiv.org/abs/2410.14240.

    Raises `UserError` for more rectified units than there are.

    Args:
      dim: model width.
      width: units of the state; `None`: as wide as the model.
      rectified: how many of them are rectified; `None`: an eighth, rounded up.
      rngs: draws the parameters.
    """

    def __init__(self, dim: int, *, width: int | None = None, rectified: int | None = None, rngs: nnx.Rngs):
        width = dim if width is None else width
        rectified = -(-width // 8) if rectified is None else rectified
        if rectified > width:
            raise UserError(f'rectified is {rectified}; it must be at most the width of the state, {width}')
        self.linear = width - rectified
        self.input = Linear(dim, width, bias=True, rngs=rngs)
        self.diagonal = param(stable_diagonal, (width,), axes=(None,), group='dynamics', rngs=rngs)
        small = nnx.initializers.normal(0.01)
        self.recurrent = param(small, (width, width), axes=(None, None), group='dynamics', rngs=rngs)
        self.output = Linear(width, dim, axes=('heads', 'embed'), rngs=rngs)

    def __call__(
        self, x: Sequence, ctx: Context, state: AlmostLinearState | None = None
    ) -> tuple[Sequence, AlmostLinearState | None]:
        wide = wide_dtype(x.dtype)
        diagonal, recurrent = (each[...].astype(wide) for each in (self.diagonal, self.recurrent))

        def step(hidden: Array, inputs: tuple[Array, Array]) -> tuple[Array, Array]:
            driven, start = inputs
            hidden = jnp.where(start[:, None], 0, hidden)
            hidden = almost_linear(hidden, diagonal, recurrent, self.linear) + driven
            return hidden, hidden

        segments = ctx.segments_or_ones()
        starts = document_starts(segments, None if state is None else state.segment)
        hidden = jnp.zeros((x.shape[0], diagonal.shape[0]), wide) if state is None else state.hidden
        hidden, states = jax.lax.scan(step, hidden, (jnp.moveaxis(self.input(x).astype(wide), 1, 0), starts.T))
        if state is not None:
            state = AlmostLinearState(hidden, segments[:, -1])
        return self.output(jnp.moveaxis(states, 0, 1).astype(x.dtype)), state

    def init_state(self, batch: int, length: int, dtype: DTypeLike) -> AlmostLinearState:
        """Returns a state of zeros; its size does not depend on `length`."""
        del length
        return AlmostLinearState(jnp.zeros((batch, self.diagonal.shape[0]), wide_dtype(dtype)), no_segment(batch))


def stable_diagonal(key: jax.Array, shape: Shape[int], dtype: DTypeLike) -> Array:
    """The diagonal of a positive definite matrix over its largest eigenvalue: decays near one, none above."""
    (width,) = shape
    draws = jax.random.normal(key, (width, width), dtype)
    matrix = draws.T @ draws / width + jnp.eye(width, dtype=dtype)
    return jnp.diagonal(matrix) / jnp.linalg.eigvalsh(matrix)[-1]
