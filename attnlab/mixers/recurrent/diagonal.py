"""Diagonal recurrences: every channel remembers one number, and gates say how long."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from attnlab.context import Context
from attnlab.functional import cores
from attnlab.functional.precision import wide_dtype
from attnlab.functional.recomputed import recomputed_beside_products
from attnlab.functional.recurrences import carried, document_starts, no_segment
from attnlab.mixers.mixer import Mixer
from attnlab.nn.preludes import Prelude
from attnlab.nn.projections import Linear
from attnlab.typing import Sequence, State


class DiagonalState(NamedTuple):
    """What a diagonal recurrence remembers of a stream.

    Attributes:
      hidden: the last `h`, float32 or float64, `b d`.
      prelude: the state of the prelude; `None` without one.
      segment: the segment of the last token, `b`; -1 before the first.
    """

    hidden: Float[Array, 'b d']
    prelude: State | None
    segment: Int[Array, ' b']


class DiagonalRecurrence(Mixer):
    """A gated elementwise recurrence, `y = W_o (g * h)` with `h_t = a_t h_{t-1} + b_t`.

    `b` and `a` are `gates(prelude(lift(x)))`, and `g` is the output gate, read from `x`. A part that is `None` is left
    out. `h` is in float32 or better.
    De et al. 2024, https://arxiv.org/abs/2402.19427; Feng et al. 2024, https://arxiv.org/abs/2410.01201.

    Args:
      dim: model width.
      gates: made as `gates(features, width, rngs=rngs)`; called with what the prelude gives and with which tokens
        are the first of their document, returns `b` and `a`.
      width: channels of the recurrence; `None`: `dim`.
      lift: made as `lift(dim, width, rngs=rngs)`; the linear map before the prelude.
      prelude: made as `prelude(features, rngs=rngs)`.
      gate: made as `gate(dim, width, rngs=rngs)`.
      bias: whether the output map has one.
      implementation: of the core; `None`: the default of the platform.
      rngs: draws the parameters.
    """

    def __init__(
        self,
        dim: int,
        *,
        gates: Callable[..., nnx.Module],
        width: int | None = None,
        lift: Callable[..., nnx.Module] | None = None,
        prelude: Callable[..., Prelude] | None = None,
        gate: Callable[..., nnx.Module] | None = None,
        bias: bool = False,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        self.width = dim if width is None else width
        self.implementation = implementation
        features = dim if lift is None else self.width
        self.lift = None if lift is None else lift(dim, self.width, rngs=rngs)
        self.prelude = None if prelude is None else prelude(features, rngs=rngs)
        self.gates = gates(features, self.width, rngs=rngs)
        self.gate = None if gate is None else gate(dim, self.width, rngs=rngs)
        self.output = Linear(self.width, dim, bias=bias, axes=('mlp', 'embed'), rngs=rngs)

    def __call__(
        self, x: Sequence, ctx: Context, state: DiagonalState | None = None
    ) -> tuple[Sequence, DiagonalState | None]:
        segments = ctx.segments_or_ones()
        inputs = x if self.lift is None else self.lift(x)
        prelude = None
        if self.prelude is not None:
            inputs, prelude = self.prelude(inputs, ctx.segments, None if state is None else state.prelude)
        taken, kept = self.gates(inputs, document_starts(segments, None if state is None else state.segment))
        h, last = cores.linear_scan(
            taken,
            kept,
            state=None if state is None else carried(state.hidden, segments, state.segment),
            segments=ctx.segments,
            implementation=self.implementation,
        )
        if state is not None:
            state = DiagonalState(last, prelude, segments[:, -1])
        return self.output(recomputed_beside_products(lambda y: self._opened(y, x))(h.astype(x.dtype))), state

    def _opened(self, y: Float[Array, 'b t f'], x: Sequence) -> Float[Array, 'b t f']:
        return y if self.gate is None else y * self.gate(x)

    @property
    def divides_time(self) -> bool:
        return True

    def init_state(self, batch: int, length: int, dtype: DTypeLike) -> DiagonalState:
        """Returns the state before the first token; its size does not depend on `length`."""
        hidden = jnp.zeros((batch, self.width), wide_dtype(dtype))
        prelude = None if self.prelude is None else self.prelude.init_state(batch, dtype)
        return DiagonalState(hidden, prelude, no_segment(batch))
