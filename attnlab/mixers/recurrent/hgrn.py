"""HGRN: a gated recurrence of complex numbers that turn by constant angles."""

from collections.abc import Callable
from collections.abc import Sequence as Shape
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Complex, Float, Int

from attnlab.context import Context
from attnlab.functional import cores
from attnlab.functional.precision import wide_dtype
from attnlab.functional.recomputed import recomputed_beside_products, recomputed_method
from attnlab.functional.recurrences import carried, no_segment
from attnlab.functional.structured import from_parts, parts
from attnlab.mixers.mixer import Mixer
from attnlab.nn import bounds
from attnlab.nn.bounds import BoundKind
from attnlab.nn.norms import RMSNorm
from attnlab.nn.parameter import param
from attnlab.nn.projections import Linear
from attnlab.typing import Sequence


class HGRNState(NamedTuple):
    """What the recurrence remembers of a stream.

    Attributes:
      hidden: real parts, then imaginary parts, float32 or float64.
      segment: the segment of the last token, `b`; -1 before the first.
    """

    hidden: Float[Array, 'b m']
    segment: Int[Array, ' b']


class HGRN(Mixer):
    """A gated recurrence of `dim` complex channels, `y = W_o (norm(Re h, Im h) * silu(W_g x))`, of

        h_t = l_t exp(i theta) h_{t-1} + (1 - l_t) c_t    c = silu(W_c x)    l = g + (1 - g) sigmoid(W_l x)

    `c` has a real and an imaginary part; `theta` is learned and starts at `10000^(-2 k / dim)` for channel k. `g` is
    `lower_bound`, or learned (`attnlab.nn.bounds.RisingBound`). The state is in float32 or better.
    Qin et al. 2023, https://arxiv.org/abs/2311.04823.

    Raises `UserError` for a `lower_bound` that is not from 0 to below 1.

    Args:
      dim: model width.
      lower_bound: the least that a forget gate keeps.
      bound: whether that is this number, or one of every channel that is learned and rises from layer to layer.
      norm: made as `norm(2 * dim, rngs=rngs)`.
      bias: whether the projections have one.
      implementation: of the core; `None`: the default of the platform.
      rngs: draws the parameters.
    """

    def __init__(
        self,
        dim: int,
        *,
        lower_bound: float = 0.0,
        bound: BoundKind = 'constant',
        norm: Callable[..., nnx.Module] = RMSNorm,
        bias: bool = False,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        self.bound = bounds.lower_bound('HGRN', bound, lower_bound, (dim,), axes=('mlp',), rngs=rngs)
        self.implementation = implementation
        self.candidate, self.gate = (
            Linear(dim, 2 * dim, bias=bias, axes=('embed', 'mlp'), rngs=rngs) for _ in range(2)
        )
        self.forget = Linear(dim, dim, bias=bias, axes=('embed', 'mlp'), rngs=rngs)

        def angles(key: jax.Array, shape: Shape[int], dtype: DTypeLike) -> Array:
            return 10000.0 ** (-2 * jnp.arange(dim, dtype=dtype) / dim)

        self.angle = param(angles, (dim,), axes=('mlp',), group='dynamics', rngs=rngs)
        self.norm: Any = norm(2 * dim, rngs=rngs)
        self.output = Linear(2 * dim, dim, bias=bias, axes=('mlp', 'embed'), rngs=rngs)

    def __call__(self, x: Sequence, ctx: Context, state: HGRNState | None = None) -> tuple[Sequence, HGRNState | None]:
        segments = ctx.segments_or_ones()
        h, last = cores.linear_scan(
            *self._entries(self.forget(x), self.candidate(x)),
            state=None if state is None else from_parts(carried(state.hidden, segments, state.segment)),
            segments=ctx.segments,
            implementation=self.implementation,
        )
        if state is not None:
            state = HGRNState(parts(last), segments[:, -1])
        return self.output(recomputed_beside_products(lambda h: self._read(h, x))(parts(h).astype(x.dtype))), state

    def _read(self, h: Float[Array, 'b t m'], x: Sequence) -> Float[Array, 'b t m']:
        return self.norm(h) * jax.nn.silu(self.gate(x))

    @recomputed_method
    def _entries(
        self, forget: Float[Array, 'b t d'], candidate: Float[Array, 'b t m']
    ) -> tuple[Complex[Array, 'b t d'], Complex[Array, 'b t d']]:
        """What is taken of the candidates, and by what the hidden state is multiplied."""
        wide = wide_dtype(forget.dtype)
        forget = forget.astype(wide)
        bound = bounds.bound_of(self.bound, forget)
        kept = bound + (1 - bound) * jax.nn.sigmoid(forget)
        taken = (1 - bound) * jax.nn.sigmoid(-forget)
        turn = jnp.exp(1j * self.angle[...].astype(wide))
        return taken * from_parts(jax.nn.silu(candidate).astype(wide)), kept * turn[None, None]

    @property
    def divides_time(self) -> bool:
        return True

    def init_state(self, batch: int, length: int, dtype: DTypeLike) -> HGRNState:
        """Returns zeros; their number does not depend on `length`."""
        del length
        return HGRNState(jnp.zeros((batch, 2 * self.angle.shape[0]), wide_dtype(dtype)), no_segment(batch))
