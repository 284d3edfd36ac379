"""Mixed chunk attention: a gated unit that is quadratic within chunks of tokens and linear across them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int

from attnlab.context import Context
from attnlab.functional import cores
from attnlab.functional.lookup import taken
from attnlab.functional.precision import wide_dtype
from attnlab.functional.recomputed import recomputed
from attnlab.functional.recurrences import NOTHING, carried, no_segment
from attnlab.mixers.mixer import Mixer
from attnlab.nn.gated_units import ROPE, QueriesAndKeys, gated_by_silu, offset_deviation, rounded_silu, wide_silu
from attnlab.nn.positions import Rope
from attnlab.nn.projections import Linear
from attnlab.typing import Sequence


class Tokens(NamedTuple):
    """What later tokens read of a token.

    Attributes:
      local: the key for those of the same chunk.
      across: the key for those of later chunks.
      value: for both.
      chunk: the number of its chunk in the document; -1 where there is no token.
      segment: its document; -1 where there is no token.
    """

    local: Float[Array, 'b s k']
    across: Float[Array, 'b s k']
    value: Float[Array, 'b s v']
    chunk: Int[Array, 'b s']
    segment: Int[Array, 'b s']


class MixedChunkState(NamedTuple):
    """What a layer remembers of a stream.

    Attributes:
      memory: what keys at least a chunk ago have written of values; float32 or float64.
      latest: as many tokens as a chunk has, oldest first.
      segment: the segment of the last token, `b`; -1 before the first.
    """

    memory: Float[Array, 'b 1 k v']
    latest: Tokens
    segment: Int[Array, ' b']


class MixedChunkAttention(Mixer):
    """The unit of FLASH, `y_i = W_o (u_i * sum_(j <= i) a_ij v_j)` with `u`, `v`, `z = silu(W x)` and

        a_ij = relu(q_i . k_j / c)^2    where i and j are of the same chunk of `c` tokens of the document,
        a_ij = q'_i . k'_j / c          where j is of an earlier one.

    All queries and keys are gains and offsets of `z`, rotated by position; within a chunk the product of the offsets is
    the relative bias of the paper. Weights across chunks may be negative.
    Hua et al. 2022, https://arxiv.org/abs/2202.10447.

    Keys at least `c` tokens ago are read from a memory of fixed size, to which a core of linear attention writes every
    token `c` tokens late; nearer ones, of this chunk or of the one before, are read one by one.

    Args:
      dim: model width.
      expand: width of `u` and `v` over that of the model.
      key_dim: channels of `z`.
      chunk: tokens of a chunk.
      position: rotates queries and keys; `None`: no positions.
      bias: whether the projections have one.
      implementation: of the core; `None`: the default of the platform.
      rngs: draws the parameters.
    """

    def __init__(
        self,
        dim: int,
        *,
        expand: int = 2,
        key_dim: int = 128,
        chunk: int = 256,
        position: Rope | None = ROPE,
        bias: bool = False,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        self.key_dim, self.value_dim, self.chunk = key_dim, expand * dim, chunk
        self.implementation = implementation
        self.input = Linear(dim, 2 * self.value_dim + key_dim, bias=bias, rngs=rngs)
        self.local = QueriesAndKeys(key_dim, position=position, offset=offset_deviation(chunk), rngs=rngs)
        self.across = QueriesAndKeys(key_dim, position=position, rngs=rngs)
        self.output = Linear(self.value_dim, dim, bias=bias, axes=('heads', 'embed'), rngs=rngs)

    def __call__(
        self, x: Sequence, ctx: Context, state: MixedChunkState | None = None
    ) -> tuple[Sequence, MixedChunkState | None]:
        wide = wide_dtype(x.dtype)
        splits = (self.value_dim, 2 * self.value_dim)
        gate, v, z = jnp.split(self.input(x), splits, axis=-1)
        z = wide_silu(z)
        (q, k), (far_q, far_k) = ((each[:, :, 0].astype(x.dtype) for each in part(z, ctx)) for part in self._parts)
        segments = ctx.segments_or_ones()
        new = Tokens(k, far_k, rounded_silu(v), ctx.positions // self.chunk, segments)
        before = self._none(x.shape[0], x.dtype) if state is None else state.latest
        tokens = Tokens(
            *(jnp.concatenate([old.astype(each.dtype), each], axis=1) for old, each in zip(before, new, strict=True))
        )
        far, memory = self._far(far_q, tokens, ctx, state)
        read = far.astype(wide) + self._near(q, far_q, new, tokens)
        if state is not None:
            latest = Tokens(
                *(each[:, -self.chunk :].astype(old.dtype) for old, each in zip(before, tokens, strict=True))
            )
            state = MixedChunkState(memory, latest, segments[:, -1])
        return self.output(gated_by_silu(read, gate)), state

    def init_state(self, batch: int, length: int, dtype: DTypeLike) -> MixedChunkState:
        """Returns the state before the first token; its size does not depend on `length`."""
        memory = jnp.zeros((batch, 1, self.key_dim, self.value_dim), wide_dtype(dtype))
        return MixedChunkState(memory, self._none(batch, dtype), no_segment(batch))

    @property
    def _parts(self) -> tuple[QueriesAndKeys, QueriesAndKeys]:
        return self.local, self.across

    def _none(self, batch: int, dtype: DTypeLike) -> Tokens:
        """A chunk without tokens."""
        widths = (self.key_dim, self.key_dim, self.value_dim)
        local, across, values = (jnp.zeros((batch, self.chunk, width), dtype) for width in widths)
        chunks, segments = (jnp.full((batch, self.chunk), NOTHING, jnp.int32) for _ in range(2))
        return Tokens(local, across, values, chunks, segments)

    def _far(
        self, q: Float[Array, 'b t k'], tokens: Tokens, ctx: Context, state: MixedChunkState | None
    ) -> tuple[Float[Array, 'b t v'], Float[Array, 'b 1 k v']]:
        """Reads of the keys at least `chunk` tokens ago, which are those of earlier chunks, and the memory of them."""
        late = Tokens(*(each[:, : q.shape[1]] for each in tokens))
        segments = ctx.segments_or_ones()
        same = (late.segment == segments)[..., None]
        read, memory = cores.linear_attention(
            q[:, :, None],
            jnp.where(same, late.across, jnp.zeros_like(late.across))[:, :, None],
            late.value[:, :, None],
            scale=1 / self.chunk,
            state=None if state is None else carried(state.memory, segments, state.segment),
            segments=ctx.segments,
            implementation=self.implementation,
        )
        return read[:, :, 0], memory

    def _near(
        self, q: Float[Array, 'b t k'], far_q: Float[Array, 'b t k'], new: Tokens, tokens: Tokens
    ) -> Float[Array, 'b t v']:
        """Reads of the last `chunk` keys, that of the token itself included, in float32 or better.

        Queries are taken in blocks of `chunk`, each with the block before it: twice as many keys as there are queries.
        """
        t, chunk = q.shape[1], self.chunk
        size = min(t, chunk)
        count = -(-t // size)
        seen = (np.arange(count) * size)[:, None] + np.arange(chunk + size)[None]

        def blocks(x: Array) -> Array:
            x = jnp.pad(x, ((0, 0), (0, count * size - t)) + ((0, 0),) * (x.ndim - 2))
            return x.reshape(x.shape[0], count, size, *x.shape[2:])

        def windows(x: Array) -> Array:
            return taken(jnp.pad(x, ((0, 0), (0, count * size - t)) + ((0, 0),) * (x.ndim - 2)), seen, 1)

        keys = Tokens(*map(windows, tokens))
        wide = wide_dtype(q.dtype)

        def scores(q: Float[Array, 'b t k'], k: Float[Array, 'b n s k']) -> Float[Array, 'b n c s']:
            return jnp.einsum('bnck,bnsk->bncs', blocks(q), k, preferred_element_type=wide) / chunk

        distance = jnp.arange(size)[:, None] + chunk - jnp.arange(chunk + size)[None]
        in_reach = ((distance >= 0) & (distance < chunk))[None, None]
        same = in_reach & (blocks(new.segment)[..., None] == keys.segment[:, :, None])
        local = blocks(new.chunk)[..., None] == keys.chunk[:, :, None]
        weights = _weights(scores(q, keys.local), scores(far_q, keys.across), local, same).astype(tokens.value.dtype)
        read = jnp.einsum('bncs,bnsv->bncv', weights, keys.value, preferred_element_type=wide)
        return read.reshape(read.shape[0], count * size, -1)[:, :t]


@recomputed
def _weights(
    near: Float[Array, 'b n c s'],
    far: Float[Array, 'b n c s'],
    local: Bool[Array, 'b n c s'],
    same: Bool[Array, 'b n c s'],
) -> Float[Array, 'b n c s']:
    """Squares of what is positive among the tokens of a chunk, the scores themselves across chunks."""
    weights = jnp.where(local, jnp.square(jax.nn.relu(near)), far)
    return jnp.where(same, weights, jnp.zeros_like(weights))
