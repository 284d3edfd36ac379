"""Attention to the blocks of tokens whose mean keys match the query best."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from attnlab.context import Context
from attnlab.functional.attend import look
from attnlab.functional.block_sparse import Blocks, Compressed, attend_selected, scored
from attnlab.functional.cache import Entries, KeyValueCache, empty_cache
from attnlab.functional.precision import wide_dtype
from attnlab.functional.reach import Reach
from attnlab.functional.recurrences import document_starts
from attnlab.functional.rotary import rotated_channels
from attnlab.mixers.mixer import Mixer
from attnlab.nn.heads import by_head, head_channels
from attnlab.nn.positions import Rope
from attnlab.nn.preludes import Prelude, behind_preludes, preludes_for, states_of
from attnlab.nn.projections import Linear
from attnlab.typing import Sequence, State


class BlockRoutedState(NamedTuple):
    """What a layer remembers of a stream.

    Attributes:
      entries: keys and values; see `KeyValueCache`.
      consumed: number of tokens so far.
      preludes: the states of the preludes of queries, keys and values; empty without preludes.
    """

    entries: Entries
    consumed: Int[Array, '']
    preludes: tuple[State, ...]


class BlockRoutedAttention(Mixer):
    """Causal softmax attention to the tokens of `blocks` blocks of `block` tokens: the query's own, and those before it
    with the largest `q . mean(k)`.

    Means are of keys after rotation; every head chooses for itself, and the choice has no gradient. Blocks are counted
    from the first token of a document. Lu et al. 2025, https://arxiv.org/abs/2502.13189.

    The state holds the `length` tokens it was made for, and a call that goes beyond gives NaN.

    Raises `UserError` for heads that do not divide the width.

    Args:
      dim: model width.
      heads: each of `dim / heads` channels.
      block: tokens of a block.
      blocks: how many of them a query reads, its own included.
      prelude: made as `prelude(dim, rngs=)`, one each for queries, keys and values, before rotations.
      position: how positions enter the scores; `None`: not at all.
      implementation: of the core, which serves calls without a state; `None`: the default of the platform.
      rngs: draws the parameters.
    """

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        block: int = 256,
        blocks: int = 4,
        prelude: Callable[..., Prelude] | None = None,
        position: Rope | None = None,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        self.heads, self.channels, self.position = heads, head_channels(dim, heads), position
        self.implementation = implementation
        if position is not None:
            rotated_channels(self.channels, position.fraction)
        self.blocks = Blocks(block=block, stride=block, size=block, count=blocks, initial=0, local=1)
        self.query, self.key, self.value = (Linear(dim, dim, rngs=rngs) for _ in range(3))
        self.preludes = preludes_for(prelude, dim, dim, dim, rngs=rngs)
        self.output = Linear(dim, dim, axes=('heads', 'embed'), rngs=rngs)

    def __call__(
        self, x: Sequence, ctx: Context, state: BlockRoutedState | None = None
    ) -> tuple[Sequence, BlockRoutedState | None]:
        (q, k, v), preludes = behind_preludes(
            self.preludes,
            (linear(x) for linear in (self.query, self.key, self.value)),
            ctx.segments,
            None if state is None else state.preludes,
            lambda y: by_head(y, self.heads),
        )
        if self.position is not None:
            q, k = self.position.rotate(q, ctx.positions), self.position.rotate(k, ctx.positions)
        cache = None if state is None else KeyValueCache(state.entries, state.consumed)
        view = look(Entries(k, v, ctx.segments_or_ones()), ctx, Reach(), cache)
        keys, values, segments = view.entries
        slots = jnp.arange(segments.shape[1], dtype=jnp.int32)[None]
        firsts = jax.lax.cummax(jnp.where(document_starts(segments), slots, 0), axis=1)
        y = attend_selected(
            q,
            keys,
            values,
            view,
            firsts=jnp.take(firsts, view.queries.places, axis=1, mode='clip'),
            compressed=_means(keys, firsts, self.blocks),
            blocks=self.blocks,
            importance=scored,
            implementation=self.implementation,
        )
        y = view.or_nan(self.output(y.reshape(x.shape)))
        return y, None if view.cache is None else BlockRoutedState(*view.cache, preludes)

    def init_state(self, batch: int, length: int, dtype: DTypeLike) -> BlockRoutedState:
        """Returns an empty cache of `length` slots."""
        channels = self.channels
        cache = empty_cache(batch, length, kv_heads=self.heads, key_dim=channels, value_dim=channels, dtype=dtype)
        return BlockRoutedState(*cache, states_of(self.preludes, batch, dtype))


def _means(keys: Float[Array, 'b s h k'], firsts: Int[Array, 'b s'], blocks: Blocks) -> Compressed:
    """The mean keys, in float32 or wider, of the blocks that end among these tokens; `firsts` start their documents."""
    slots = jnp.arange(keys.shape[1], dtype=jnp.int32)
    ended, numbers = blocks.ends(slots[None] - firsts)
    ends = jnp.sort(jnp.where(ended, slots[None], len(slots)), axis=1)[:, : max(1, len(slots) // blocks.size)]
    take = jax.vmap(functools.partial(jnp.take, axis=0, mode='clip'))
    inside = jnp.arange(1 - blocks.size, 1, dtype=jnp.int32)
    held = take(keys.astype(wide_dtype(keys.dtype)), ends[:, :, None] + inside[None, None])
    means = jnp.swapaxes(jnp.mean(held, axis=2), 1, 2)
    return Compressed(means, means, jnp.where(ends < len(slots), ends, -1), take(numbers, ends))
