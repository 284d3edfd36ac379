"""The block that mLSTM has in xLSTM: in wider channels, behind a convolution, beside a gate."""

from collections.abc import Callable
from collections.abc import Sequence as Shape
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.functional.precision import wide_dtype
from attnlab.functional.recomputed import recomputed
from attnlab.functional.recurrences import no_segment
from attnlab.functional.stabilised import stabilised_linear_attention
from attnlab.mixers.linear.mlstm import MLSTMState, forget_biases
from attnlab.mixers.mixer import Mixer
from attnlab.nn.heads import by_head, head_channels
from attnlab.nn.norms import GroupNorm
from attnlab.nn.parameter import param
from attnlab.nn.preludes import Prelude, ShortConv
from attnlab.nn.projections import BlockDiagonal, Linear
from attnlab.typing import Sequence, State


class MLSTMBlockState(NamedTuple):
    """What a layer remembers of a stream: that of the memory, and of the prelude."""

    cell: MLSTMState
    prelude: State


class MLSTMBlock(Mixer):
    """The block of mLSTM in xLSTM, whose wider channels and gate take the place of a channel mixer:

        m, z = split(W_i x)        c = prelude(m)        q, k, v = W_q c, W_k c, W_v m
        y = W_o ((norm(h) + s c) silu(z))

    `h` is the read of `stabilised_linear_attention`, with gates of every head from queries, keys and values,
    `i = exp(W_1 [q, k, v] + a)` and `f = sigmoid(W_2 [q, k, v] + d)`. `W_q`, `W_k` and `W_v` map `block` neighbouring
    channels each, the norm is that of every head with its mean and a gain for every channel, and `s` is learned for
    every channel, one at first. Gates start as constants, `d` from 3 to 6 over the heads, `a` drawn around `input_bias`
    with a standard deviation of 0.1. Beck et al. 2024, https://arxiv.org/abs/2405.04517.

    Raises `UserError` for heads or a `block` that do not divide the inner width.

    Args:
      dim: model width.
      heads: how many memories, of as many key as value channels.
      expand: inner width over model width.
      block: channels that are mapped together to queries, keys and values.
      input_bias: around which the logits of input gates start; -10 in later models (see `MLSTM`).
      prelude: made as `prelude(inner, rngs=)`.
      implementation: of the core; `None`: the default of the platform.
      rngs: draws the parameters.
    """

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        expand: int = 2,
        block: int = 4,
        input_bias: float = 0.0,
        prelude: Callable[..., Prelude] = ShortConv,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        inner = expand * dim
        channels = head_channels(inner, heads)
        if inner % block:
            raise UserError(f'block of MLSTMBlock is {block}; it must divide the inner width, {expand} times {dim}')
        self.heads, self.inner, self.implementation = heads, inner, implementation
        self.input = Linear(dim, 2 * inner, axes=('embed', 'mlp'), rngs=rngs)
        self.prelude = prelude(inner, rngs=rngs)
        self.query, self.key, self.value = (
            BlockDiagonal(inner, blocks=inner // block, bias=False, rngs=rngs) for _ in range(3)
        )
        zeros = nnx.initializers.zeros

        def around(key: Array, shape: Shape[int], dtype: DTypeLike) -> Array:
            return input_bias + 0.1 * jax.random.normal(key, shape, dtype)

        self.input_gate, self.forget_gate = (
            Linear(3 * inner, heads, initializer=zeros, axes=('mlp', 'heads'), rngs=rngs) for _ in range(2)
        )
        self.input_bias = param(around, (heads,), axes=('heads',), group='dynamics', rngs=rngs)
        self.forget_bias = param(forget_biases, (heads,), axes=('heads',), group='dynamics', rngs=rngs)
        self.norm = GroupNorm(channels, heads=heads, bias=False, rngs=rngs)
        self.skip = param(nnx.initializers.ones, (inner,), axes=('mlp',), group='vector', rngs=rngs)
        self.output = Linear(inner, dim, axes=('mlp', 'embed'), rngs=rngs)

    def __call__(
        self, x: Sequence, ctx: Context, state: MLSTMBlockState | None = None
    ) -> tuple[Sequence, MLSTMBlockState | None]:
        m, z = jnp.split(self.input(x), 2, axis=-1)
        c, prelude = self.prelude(m, ctx.segments, None if state is None else state.prelude)
        q, k, v = self.query(c), self.key(c), self.value(m)
        seen = jnp.concatenate([q, k, v], axis=-1)
        before = self._empty(x.shape[0], x.dtype) if state is None else state.cell
        segments = ctx.segments_or_ones()
        q, k, v = (by_head(each, self.heads) for each in (q, k, v))
        h, (memory, highest) = stabilised_linear_attention(
            q,
            k,
            v,
            jax.nn.log_sigmoid(_with_bias(self.forget_gate(seen), self.forget_bias)),
            _with_bias(self.input_gate(seen), self.input_bias),
            state=(before.memory, before.highest),
            continues=segments[:, 0] == before.segment,
            segments=segments,
            implementation=self.implementation,
        )
        if state is not None:
            state = MLSTMBlockState(MLSTMState(memory, highest, segments[:, -1]), prelude)
        read = self.norm(h).reshape(m.shape)
        return self.output(_joined(read, self.skip[...], c, z)), state

    def init_state(self, batch: int, length: int, dtype: DTypeLike) -> MLSTMBlockState:
        """Returns an empty memory; its size does not depend on `length`."""
        return MLSTMBlockState(self._empty(batch, dtype), self.prelude.init_state(batch, dtype))

    def _empty(self, batch: int, dtype: DTypeLike) -> MLSTMState:
        wide, channels = wide_dtype(dtype), self.inner // self.heads
        memory = jnp.zeros((batch, self.heads, channels, channels + 1), wide)
        return MLSTMState(memory, jnp.zeros((batch, self.heads), wide), no_segment(batch))


@recomputed
def _joined(
    read: Float[Array, 'b t f'], skip: Float[Array, ' f'], c: Float[Array, 'b t f'], z: Float[Array, 'b t f']
) -> Float[Array, 'b t f']:
    # Wide for the gradient of the skip, which is a sum over tokens.
    wide = wide_dtype(c.dtype)
    joined = read.astype(wide) + skip.astype(wide)[None, None] * c.astype(wide)
    return (joined * jax.nn.silu(z.astype(wide))).astype(c.dtype)


def _with_bias(logits: Float[Array, 'b t h'], bias: nnx.Param) -> Float[Array, 'b t h']:
    wide = wide_dtype(logits.dtype)
    return logits.astype(wide) + bias[...].astype(wide)[None, None]
