"""State-space models around a linear system: structured ones, the same at every token, and those that tokens steer."""

from collections.abc import Callable
from typing import NamedTuple

from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from attnlab.context import Context
from attnlab.functional.precision import wide_dtype
from attnlab.functional.recurrences import carried, no_segment
from attnlab.mixers.mixer import Mixer, require_causal
from attnlab.nn.parameter import param
from attnlab.nn.readouts import GatedReadout
from attnlab.nn.systems import System
from attnlab.typing import Sequence


class StructuredState(NamedTuple):
    """What a structured state-space model remembers of a stream.

    Attributes:
      memory: the state of the system, float32 or float64, complex numbers as their parts.
      segment: the segment of the last token, `b`; -1 before the first.
    """

    memory: Float[Array, 'b ...']
    segment: Int[Array, ' b']


class StructuredSSM(Mixer):
    """A linear system, a skip, and a readout that mixes channels.

        y = system(x) + D x    out = readout(y)

    The system runs in float32 or better; `D`, one a channel, starts normal. S4, S4D, S5 and the LRU differ in the
    system, which is the same at every token; S6 has one that tokens steer (`SelectiveSystem`).
    Gu et al. 2022, https://arxiv.org/abs/2111.00396.

    Args:
      dim: model width.
      system: made as `system(dim, state=, causal=, rngs=rngs)`; see `attnlab.nn.systems`, and `SelectiveSystem`.
      state: states, of a channel or of all, as the system counts them.
      causal: `False`: the system reads both ways, with one set of dynamics.
      readout: made as `readout(dim, rngs=rngs)`.
      implementation: of the core; `None`: the default of the platform.
      rngs: draws the parameters.
    """

    def __init__(
        self,
        dim: int,
        *,
        system: Callable[..., System],
        state: int = 64,
        causal: bool = True,
        readout: Callable[..., nnx.Module] = GatedReadout,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        self.implementation, self.causal = implementation, causal
        self.system = system(dim, state=state, causal=causal, rngs=rngs)
        self.D = param(nnx.initializers.normal(1.0), (dim,), axes=('mlp',), group='vector', rngs=rngs)
        self.readout = readout(dim, rngs=rngs)

    def __call__(
        self, x: Sequence, ctx: Context, state: StructuredState | None = None
    ) -> tuple[Sequence, StructuredState | None]:
        wide = x.astype(wide_dtype(x.dtype))
        before = None if state is None else carried(state.memory, ctx.segments_or_ones(), state.segment)
        y, after = self.system(x, ctx.segments, before, implementation=self.implementation)
        if after is not None:
            state = StructuredState(after, ctx.segments_or_ones()[:, -1])
        y = y + self.D[...].astype(y.dtype)[None, None] * wide
        return self.readout(y.astype(x.dtype)), state

    @property
    def divides_time(self) -> bool:
        return self.causal

    def init_state(self, batch: int, length: int, dtype: DTypeLike) -> StructuredState:
        """Returns the state of a system at rest; its size does not depend on `length`. Raises `UserError` if it reads
        both ways."""
        del length
        require_causal(self, self.causal)
        return StructuredState(self.system.init_state(batch, dtype), no_segment(batch))
