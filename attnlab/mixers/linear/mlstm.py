"""mLSTM: a matrix-valued memory with exponential input gates."""

from collections.abc import Callable
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
from attnlab.functional.recomputed import recomputed_beside_products
from attnlab.functional.recurrences import no_segment
from attnlab.functional.stabilised import stabilised_linear_attention
from attnlab.mixers.mixer import Mixer
from attnlab.nn.heads import by_head, head_channels
from attnlab.nn.norms import GroupNorm
from attnlab.nn.parameter import param
from attnlab.nn.preludes import Prelude, behind_preludes, preludes_for, states_of
from attnlab.nn.projections import Linear
from attnlab.typing import Heads, Sequence, State


class MLSTMState(NamedTuple):
    """What a layer remembers of a stream.

    Attributes:
      memory: what keys have written of values, and of ones in a last column, over the exponential of `highest`.
      highest: the running maximum of the logarithms of input gates, less what was forgotten since.
      segment: the segment of the last token, `b`; -1 before the first.
      preludes: the states of the preludes of queries, keys and values; empty without preludes.
    """

    memory: Float[Array, 'b h k u']
    highest: Float[Array, 'b h']
    segment: Int[Array, ' b']
    preludes: tuple[State, ...] = ()


def forget_biases(key: jax.Array, shape: Shape[int], dtype: DTypeLike) -> Array:
    """Where the logits of forget gates start: from 3 to 6 over the heads."""
    del key
    return jnp.linspace(3.0, 6.0, shape[0], dtype=dtype)


class MLSTM(Mixer):
    """The mLSTM layer of xLSTM, `y_t = W_o (sigmoid(W_g x_t) * norm(C_t^T q_t / max(|n_t^T q_t|, 1)))`, of

        C_t = f_t C_{t-1} + exp(i_t) k_t v_t^T        n_t = f_t n_{t-1} + exp(i_t) k_t

    with gates of every head from the input, `i = cap(W_i x + c)`, `f = sigmoid(cap(W_f x + d))`, and
    `cap(z) = a tanh(z / a)`; the norm is that of every head with its mean.
    Beck et al. 2024, https://arxiv.org/abs/2405.04517; Beck et al. 2025, https://arxiv.org/abs/2503.13427.

    Raises `UserError` for heads that do not divide the channels and a cap that is not positive.
    """

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        key_dim: int | None = None,
        value_dim: int | None = None,
        prelude: Callable[..., Prelude] | None = None,
        cap: float = 15.0,
        input_bias: float = -10.0,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        """Makes the projections.

        Args:
          dim: model width.
          heads: how many memories.
          key_dim: channels of a query or key per head; `None`: half of those of a value.
          value_dim: channels of a value per head; `None`: `dim / heads`.
          prelude: made as `prelude(features, rngs=)`, one each for queries, keys and values; gates read the input.
          cap: what no gate's logit exceeds, to either side.
          input_bias: where the logits of input gates start.
          implementation: of the core; `None`: the default of the platform.
          rngs: draws the parameters.
        """
        value_dim = head_channels(dim, heads, instead='value_dim') if value_dim is None else value_dim
        key_dim = max(1, value_dim // 2) if key_dim is None else key_dim
        self.heads, self.key_dim, self.value_dim = heads, key_dim, value_dim
        if cap <= 0:
            raise UserError(f'cap of MLSTM is {cap}; it must be positive')
        self.cap, self.implementation = cap, implementation
        self.query, self.key = (Linear(dim, heads * key_dim, rngs=rngs) for _ in range(2))
        self.value = Linear(dim, heads * value_dim, rngs=rngs)
        self.preludes = preludes_for(prelude, *(heads * each for each in (key_dim, key_dim, value_dim)), rngs=rngs)
        zeros = nnx.initializers.zeros
        self.input_gate, self.forget_gate = (Linear(dim, heads, initializer=zeros, rngs=rngs) for _ in range(2))
        start = nnx.initializers.constant(input_bias)
        self.input_bias = param(start, (heads,), axes=('heads',), group='dynamics', rngs=rngs)
        self.forget_bias = param(forget_biases, (heads,), axes=('heads',), group='dynamics', rngs=rngs)
        self.gate = Linear(dim, heads * value_dim, rngs=rngs)
        self.norm = GroupNorm(value_dim, heads=heads, eps=1e-6, rngs=rngs)
        self.output = Linear(heads * value_dim, dim, axes=('heads', 'embed'), rngs=rngs)

    def __call__(
        self, x: Sequence, ctx: Context, state: MLSTMState | None = None
    ) -> tuple[Sequence, MLSTMState | None]:
        (q, k, v), preludes = behind_preludes(
            self.preludes,
            (linear(x) for linear in (self.query, self.key, self.value)),
            ctx.segments,
            None if state is None else state.preludes,
            lambda y: by_head(y, self.heads),
        )
        before = self.init_state(x.shape[0], 0, x.dtype) if state is None else state
        segments = ctx.segments_or_ones()
        read, (memory, highest) = stabilised_linear_attention(
            q,
            k,
            v,
            jax.nn.log_sigmoid(self._capped(self.forget_gate(x), self.forget_bias)),
            self._capped(self.input_gate(x), self.input_bias),
            state=(before.memory, before.highest),
            continues=segments[:, 0] == before.segment,
            segments=segments,
            implementation=self.implementation,
        )
        if state is not None:
            state = MLSTMState(memory, highest, segments[:, -1], preludes)
        return self.output(recomputed_beside_products(lambda y: self._read(y, x))(read)), state

    def _read(self, y: Heads, x: Sequence) -> Float[Array, 'b t f']:
        return self.norm(y).reshape(*x.shape[:2], -1) * jax.nn.sigmoid(self.gate(x))

    def init_state(self, batch: int, length: int, dtype: DTypeLike) -> MLSTMState:
        """Returns an empty memory; its size does not depend on `length`."""
        wide = wide_dtype(dtype)
        memory = jnp.zeros((batch, self.heads, self.key_dim, self.value_dim + 1), wide)
        highest = jnp.zeros((batch, self.heads), wide)
        return MLSTMState(memory, highest, no_segment(batch), states_of(self.preludes, batch, dtype))

    def _capped(self, logits: Float[Array, 'b t h'], bias: nnx.Param) -> Float[Array, 'b t h']:
        wide = logits.astype(wide_dtype(logits.dtype))
        wide = wide + jnp.broadcast_to(bias[...].astype(wide.dtype), wide.shape)
        return self.cap * jnp.tanh(wide / self.cap)
