"""sLSTM: an LSTM with exponential input gates, whose gates read its own output."""

from collections.abc import Callable
from collections.abc import Sequence as Shape
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int

from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.functional.precision import wide_dtype
from attnlab.functional.recurrences import document_starts, no_segment
from attnlab.mixers.mixer import Mixer
from attnlab.nn.heads import by_head, head_channels
from attnlab.nn.norms import GroupNorm
from attnlab.nn.parameter import param
from attnlab.nn.preludes import Prelude, ShortConv
from attnlab.typing import Sequence, State


class Cells(NamedTuple):
    """Output, memory, normaliser and stabiliser of every channel, float32 or float64."""

    hidden: Float[Array, 'b h k']
    memory: Float[Array, 'b h k']
    normaliser: Float[Array, 'b h k']
    highest: Float[Array, 'b h k']


class SLSTMState(NamedTuple):
    """What a layer remembers of a stream.

    Attributes:
      cells: those after the last token.
      prelude: the state of the prelude.
      segment: the segment of the last token, `b`; -1 before the first.
    """

    cells: Cells
    prelude: State
    segment: Int[Array, ' b']


class SLSTM(Mixer):
    """The sLSTM layer of xLSTM, `y = norm(h)`, step by step:

        i, f, z, o = W (x', x', x, x)_t + R h_{t-1} + b
        m_t = max(i, m_{t-1} + log sigmoid(f))
        c_t = exp(m_{t-1} + log sigmoid(f) - m_t) c_{t-1} + exp(i - m_t) tanh(z)    n_t likewise, of ones
        h_t = sigmoid(o) c_t / n_t

    with `x'` what the prelude makes of `x`. W and R are maps of every head to itself; R starts at zero, and `b` at
    zero but for forget gates, from 5 to -7 over the channels of a head by a power law. The norm is that of every head.
    Gates, cells and maps of `h` are in float32 or better. Beck et al. 2024, https://arxiv.org/abs/2405.04517.

    Raises `UserError` for heads that do not divide the width, and for a negative power.

    Args:
      dim: model width.
      heads: how many groups of channels, each with maps of its own.
      prelude: made as `prelude(dim, rngs=rngs)`.
      power: of the power law that the biases of forget gates start by; 0.3 is the paper's for the first layer, 1.6 for
        the last.
      rngs: draws the parameters.
    """

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        prelude: Callable[..., Prelude] = ShortConv,
        power: float = 0.3,
        rngs: nnx.Rngs,
    ):
        if power < 0:
            raise UserError(f'power of SLSTM is {power}; it must be at least 0')
        self.heads, channels = heads, head_channels(dim, heads)
        self.prelude = prelude(dim, rngs=rngs)
        small = nnx.initializers.normal((2 / (5 * dim)) ** 0.5)
        shape, axes = (4, heads, channels, channels), (None, 'heads', None, None)
        self.inputs = param(small, shape, axes=axes, rngs=rngs)
        self.recurrent = param(nnx.initializers.zeros, shape, axes=axes, rngs=rngs)

        def biases(key: jax.Array, shape: Shape[int], dtype: DTypeLike) -> Array:
            place = np.arange(channels) / max(1, channels - 1)
            return jnp.zeros(shape, dtype).at[1].set(jnp.asarray(5 - 12 * place**power, dtype))

        self.bias = param(biases, shape[:3], axes=axes[:3], group='dynamics', rngs=rngs)
        self.norm = GroupNorm(channels, heads=heads, rngs=rngs)

    def __call__(
        self, x: Sequence, ctx: Context, state: SLSTMState | None = None
    ) -> tuple[Sequence, SLSTMState | None]:
        segments = ctx.segments_or_ones()
        smoothed, prelude = self.prelude(x, ctx.segments, None if state is None else state.prelude)
        wide = wide_dtype(x.dtype)
        recurrent = self.recurrent[...].astype(wide)

        def step(before: Cells, inputs: tuple[Array, Array]) -> tuple[Cells, Array]:
            gates, start = inputs
            before = jax.tree.map(lambda cell: jnp.where(start[:, None, None], jnp.zeros_like(cell), cell), before)
            read = jnp.einsum('bhk,ghkv->gbhv', before.hidden, recurrent, precision='highest')
            after = _advance(before, gates + read, start)
            return after, after.hidden

        starts = document_starts(segments, None if state is None else state.segment)
        cells = self._at_rest(x.shape[0], wide) if state is None else state.cells
        gates = jnp.moveaxis(self._gates(x, smoothed), 2, 0)
        cells, hidden = jax.lax.scan(step, cells, (gates, starts.T))
        if state is not None:
            state = SLSTMState(cells, prelude, segments[:, -1])
        return self.norm(jnp.moveaxis(hidden, 0, 1).astype(x.dtype)).reshape(x.shape), state

    def init_state(self, batch: int, length: int, dtype: DTypeLike) -> SLSTMState:
        """Returns cells at rest; their number does not depend on `length`."""
        del length
        cells = self._at_rest(batch, wide_dtype(dtype))
        return SLSTMState(cells, self.prelude.init_state(batch, dtype), no_segment(batch))

    def _at_rest(self, batch: int, dtype: DTypeLike) -> Cells:
        shape = (batch, *self.bias.shape[1:])
        return Cells(*(jnp.zeros(shape, dtype) for _ in Cells._fields))

    def _gates(self, x: Sequence, smoothed: Sequence) -> Float[Array, 'f b t h k']:
        """What gates read of the input, in the order i, f, z, o, with biases."""
        wide = wide_dtype(x.dtype)
        weight = self.inputs[...].astype(x.dtype)
        found = [
            jnp.einsum('bthk,ghkv->gbthv', by_head(each, self.heads), own, preferred_element_type=wide)
            for each, own in ((smoothed, weight[:2]), (x, weight[2:]))
        ]
        return jnp.concatenate(found) + self.bias[...].astype(wide)[:, None, None]


def _advance(before: Cells, gates: Float[Array, 'f b h k'], start: Bool[Array, ' b']) -> Cells:
    """One step; the first of a document is stabilised by its own input gate."""
    inputs, forget, candidate, output = gates
    kept = before.highest + jax.nn.log_sigmoid(forget)
    highest = jnp.where(start[:, None, None], inputs, jnp.maximum(inputs, kept))
    write = jnp.exp(inputs - highest)
    keep = jnp.exp(jnp.minimum(kept - highest, 0))
    memory = keep * before.memory + write * jnp.tanh(candidate)
    normaliser = keep * before.normaliser + write
    return Cells(jax.nn.sigmoid(output) * memory / normaliser, memory, normaliser, highest)
