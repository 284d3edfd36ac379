"""Gated slot attention: a memory of a fixed number of slots, each with a key and a value, read by softmax."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from attnlab.context import IN_MIXER, Context
from attnlab.errors import UserError
from attnlab.functional import cores
from attnlab.functional.precision import wide_dtype
from attnlab.functional.recomputed import recomputed, recomputed_method
from attnlab.functional.recurrences import carried, no_segment
from attnlab.mixers.mixer import Mixer
from attnlab.nn.decays import fading
from attnlab.nn.gates import SlotGates
from attnlab.nn.heads import by_head, head_channels
from attnlab.nn.norms import RMSNorm
from attnlab.nn.positions import Rope
from attnlab.nn.preludes import Prelude, behind_preludes, preludes_for, states_of
from attnlab.nn.projections import Linear
from attnlab.typing import Heads, Keys, Queries, Segments, Sequence, State, Values

TEMPERATURE = 8.0


class GatedSlotState(NamedTuple):
    """What the slots hold, and the segment of the last token, `b`; -1 before the first.

    Attributes:
      keys: of every slot; float32 or float64.
      values: of every slot; float32 or float64.
      segment: the segment of the last token, `b`; -1 before the first.
      preludes: the states of the preludes of queries, keys and values; empty without preludes.
    """

    keys: Float[Array, 'b h n k']
    values: Float[Array, 'b h n v']
    segment: Int[Array, ' b']
    preludes: tuple[State, ...]


class GatedSlots(Mixer):
    """Gated slot attention: `y_t = W_o norm(silu(V_t^T softmax(K_t q_t)))` over slots whose keys and values fade,

        K_t = diag(a_t) K_{t-1} + (1 - a_t) k_t^T        V_t = diag(a_t) V_{t-1} + (1 - a_t) v_t^T

    with a gate for every slot, `a = sigmoid(W_a x)^(1 / temperature)`, and SiLU of queries, keys and values. Scores are
    not scaled; the norm is over all heads. Zhang et al. 2024, https://arxiv.org/abs/2409.07146. With other `gates` a
    token may change a few slots and leave the others as they are: "Raven" 2026, https://github.com/goombalab/raven.
    With a `gate` the norm is of every head, with one gain for all, and what it gives is multiplied by the gate.

    Raises `UserError` for heads that do not divide the width, a temperature that is not positive, and another one than
    the default beside `gates`, which do not read it.
    """

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        slots: int = 64,
        temperature: float = TEMPERATURE,
        gates: Callable[..., SlotGates] | None = None,
        prelude: Callable[..., Prelude] | None = None,
        key_norm: Callable[..., nnx.Module] | None = None,
        position: Rope | None = None,
        gate: Callable[..., nnx.Module] | None = None,
        eps: float = 1e-5,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        """Makes the projections and the norm.

        Args:
          dim: model width.
          heads: how many memories, each of `dim / heads` key and value channels.
          slots: of every memory.
          temperature: keeps the mixer's own gates near one; other `gates` do not read it.
          gates: made as `gates(dim, heads=, slots=, rngs=)`; give the log decays; `None`: those above.
          prelude: made as `prelude(dim, rngs=)`, one each for queries, keys and values, before SiLU.
          key_norm: made as `key_norm(channels, heads=, rngs=)`, one each for queries and keys.
          position: rotates queries and keys, behind their norms.
          gate: made as `gate(dim, dim, rngs=)`.
          eps: of the norm.
          implementation: of the core that reads values; `None`: the default of the platform.
          rngs: draws the parameters.
        """
        if temperature <= 0:
            raise UserError(f'temperature of GatedSlots is {temperature}; it must be positive')
        if gates is not None and temperature != TEMPERATURE:
            raise UserError(
                f'temperature of GatedSlots is {temperature}, which gates do not read; leave it out, or give it to a '
                'part of gates that takes one, such as gates.decay=ChannelDecay'
            )
        self.heads, self.slots, self.temperature = heads, slots, temperature
        self.channels, self.implementation = head_channels(dim, heads), implementation
        self.query, self.key, self.value = (Linear(dim, dim, rngs=rngs) for _ in range(3))
        self.forget: Linear | SlotGates = (
            Linear(dim, heads * slots, rngs=rngs) if gates is None else gates(dim, heads=heads, slots=slots, rngs=rngs)
        )
        self.preludes = preludes_for(prelude, dim, dim, dim, rngs=rngs)
        norms = [] if key_norm is None else [key_norm(self.channels, heads=heads, rngs=rngs) for _ in range(2)]
        self.key_norms = nnx.List(norms)
        self.position = position
        self.norm = RMSNorm(dim if gate is None else self.channels, eps=eps, rngs=rngs)
        self.gate = None if gate is None else gate(dim, dim, rngs=rngs)
        self.output = Linear(dim, dim, axes=('heads', 'embed'), rngs=rngs)

    def __call__(
        self, x: Sequence, ctx: Context, state: GatedSlotState | None = None
    ) -> tuple[Sequence, GatedSlotState | None]:
        (q, k, v), preludes = behind_preludes(
            self.preludes,
            (linear(x) for linear in (self.query, self.key, self.value)),
            ctx.segments,
            None if state is None else state.preludes,
            lambda y: by_head(recomputed(jax.nn.silu)(y), self.heads),
        )
        if self.key_norms:
            q, k = (norm(each) for norm, each in zip(self.key_norms, (q, k), strict=True))
        if self.position is not None:
            q, k = (self.position.rotate(each, ctx.positions) for each in (q, k))
        before: tuple[Array, Array] | None = None
        if state is not None:
            segments = ctx.segments_or_ones()
            keys, values = (carried(each, segments, state.segment) for each in (state.keys, state.values))
            before = keys, values
        read, (keys, values) = gated_slots(
            q,
            k,
            v,
            self._log_decay(x, ctx),
            state=before,
            segments=ctx.segments,
            implementation=self.implementation,
        )
        if state is not None:
            state = GatedSlotState(keys, values, ctx.segments_or_ones()[:, -1], preludes)
        if self.gate is None:
            return self.output(self._normed(read.reshape(x.shape))), state
        return self.output(self._normed(read).reshape(x.shape) * self.gate(x)), state

    @recomputed_method
    def _normed(self, read: Float[Array, '*b d']) -> Float[Array, '*b d']:
        return self.norm(jax.nn.silu(read))

    @property
    def divides_time(self) -> bool:
        return True

    def init_state(self, batch: int, length: int, dtype: DTypeLike) -> GatedSlotState:
        """Returns empty slots; their size does not depend on `length`."""
        shape = (batch, self.heads, self.slots, self.channels)
        keys, values = (jnp.zeros(shape, wide_dtype(dtype)) for _ in range(2))
        return GatedSlotState(keys, values, no_segment(batch), states_of(self.preludes, batch, dtype))

    def _log_decay(self, x: Sequence, ctx: Context) -> Float[Array, 'b t h n']:
        if not isinstance(self.forget, Linear):
            return self.forget(x, None if ctx.deterministic else ctx.fold_in(IN_MIXER).dropout_key)
        return fading(self.forget(x).reshape(*x.shape[:2], self.heads, self.slots), self.temperature)


def gated_slots(
    q: Queries,
    k: Keys,
    v: Values,
    log_decay: Float[Array, 'b t h n'],
    *,
    state: tuple[Float[Array, 'b h n k'], Float[Array, 'b h n v']] | None = None,
    segments: Segments | None = None,
    implementation: str | None = None,
) -> tuple[Heads, tuple[Float[Array, 'b h n k'], Float[Array, 'b h n v']]]:
    """Returns `V_t^T softmax(K_t q_t)` and the last `K` and `V`, in float32 or wider, of

        K_t = diag(a_t) K_{t-1} + (1 - a_t) k_t^T        V_t = diag(a_t) V_{t-1} + (1 - a_t) v_t^T

    with `a = exp(log_decay)`. In two passes of linear attention: scores are what a query reads of the rows of
    the memory of keys, and their softmax reads the columns of that of values. `implementation` is of the latter; the
    former is plain JAX. As many heads of all. Zhang et al. 2024, https://arxiv.org/abs/2409.07146.
    """
    write = recomputed(lambda log_decay: -jnp.expm1(log_decay))(log_decay)
    core = {'scale': 1.0, 'segments': segments}
    keys, values = (None, None) if state is None else state
    scores, keys = cores.linear_attention_rows(q, write, k, log_decay, state=keys, **core)
    weights = recomputed(jax.nn.softmax)(scores).astype(v.dtype)
    read, values = cores.linear_attention(
        weights, write.astype(v.dtype), v, log_decay, state=values, implementation=implementation, **core
    )
    return read, (keys, values)
