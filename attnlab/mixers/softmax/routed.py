"""Attention that chooses what it reads: blocks of tokens, by what a summary of them promises."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int, Shaped

from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.functional import cores
from attnlab.functional.attend import View, attend, look
from attnlab.functional.block_sparse import Blocks, Compressed, Located, attend_selected, document_firsts
from attnlab.functional.cache import Entries, KeyValueCache, empty_cache
from attnlab.functional.needed import of_pairs
from attnlab.functional.precision import wide_dtype
from attnlab.functional.reach import Reach
from attnlab.functional.recurrences import no_segment
from attnlab.functional.rotary import rotated_channels
from attnlab.mixers.mixer import Mixer
from attnlab.module import Module
from attnlab.nn.activations import activation as activation_called
from attnlab.nn.heads import check_groups, head_channels
from attnlab.nn.parameter import param
from attnlab.nn.positions import Rope
from attnlab.nn.projections import Linear
from attnlab.typing import Heads, Keys, Positions, Queries, Sequence, Values

Make = Callable[..., nnx.Module]
BRANCHES = ('compressed', 'selected', 'window')


class BlockCompressor(Module):
    """Maps every head's block of tokens to one, `W_2 f(W_1 (x_1 + e_1, ..., x_c + e_c))`, `e` learned for each place.

    `hidden=None` is twice `channels`. Raises `UserError` for an unknown activation.
    """

    def __init__(
        self, channels: int, *, block: int, hidden: int | None = None, activation: str = 'gelu', rngs: nnx.Rngs
    ):
        activation_called(activation)
        hidden = 2 * channels if hidden is None else hidden
        self.activation = activation
        start = nnx.initializers.normal(0.02)
        self.places = param(start, (block, channels), axes=(None, None), group='vector', rngs=rngs)
        self.up = Linear(block * channels, hidden, axes=(None, 'mlp'), rngs=rngs)
        self.down = Linear(hidden, channels, axes=('mlp', None), rngs=rngs)

    def __call__(self, x: Float[Array, 'b n c g k']) -> Float[Array, 'b n g k']:
        # In the type of the places, so that their gradients are summed over blocks in float32.
        x = jnp.swapaxes((x + self.places[...][None, None, :, None]).astype(x.dtype), 2, 3)
        return self.down(activation_called(self.activation)(self.up(x.reshape(*x.shape[:3], -1))))


class BranchGates(Module):
    """The gates `sigmoid(W_2 f(W_1 x))`; `hidden=None` is half of `dim`.

    Raises `UserError` for an unknown activation.
    """

    def __init__(self, dim: int, features: int, *, hidden: int | None = None, activation: str = 'silu', rngs: nnx.Rngs):
        activation_called(activation)
        hidden = max(1, dim // 2) if hidden is None else hidden
        self.activation = activation
        self.up = Linear(dim, hidden, axes=('embed', 'mlp'), rngs=rngs)
        self.down = Linear(hidden, features, axes=('mlp', 'heads'), rngs=rngs)

    def __call__(self, x: Sequence) -> Float[Array, 'b t f']:
        return jax.nn.sigmoid(self.down(activation_called(self.activation)(self.up(x))))


class Recent(NamedTuple):
    """The tokens that blocks to come may still reach back to, the latest last, as they were projected."""

    keys: Float[Array, 'b w g k']
    values: Float[Array, 'b w g v']
    positions: Int[Array, 'b w']


class NativeSparseState(NamedTuple):
    """What native sparse attention remembers of a stream.

    Attributes:
      selected: all keys and values of the branch that selects.
      window: those of the window's branch, a ring.
      compressed: the compressed blocks that have ended.
      ended: how many those are, `b`.
      recent: the last tokens of the branch that compresses.
      first: the stream index of the first token of the current document, `b`.
      segment: that document, `b`; -1 before the first token.
    """

    selected: KeyValueCache
    window: KeyValueCache
    compressed: Compressed
    ended: Int[Array, ' b']
    recent: Recent
    first: Int[Array, ' b']
    segment: Int[Array, ' b']


class NativeSparseAttention(Mixer):
    """Causal attention of three branches with keys and values of their own, `y_i = W_o sum_a g_ia attention_a(q_i)`.

    They read blocks of `compressed_block` tokens, `compressed_stride` apart, each compressed to one key and one value;
    the tokens of the `selected_blocks` blocks of `selected_block` tokens whose compressed blocks the query weighs most,
    summed over the query heads that share keys, the first and the last two blocks among them always; and the last
    `window` tokens. Blocks are counted from the first token of a document, and read only when they are over.
    The gates `g` are sigmoids of a network of the input, one for every branch and head. Rotated, a compressed key
    stands where its block starts. Yuan et al. 2025, https://arxiv.org/abs/2502.11089.

    The state holds the `length` tokens it was made for, and a call that goes beyond gives NaN.

    Raises `UserError` for sizes that do not divide.

    Args:
      dim: model width.
      heads: query heads.
      kv_heads: key and value heads of every branch, a divisor of `heads`; `None`: as many.
      key_dim: channels of a query, key or value per head; `None`: `dim / heads`.
      compressed_block: tokens of a compressed block.
      compressed_stride: tokens between their starts, a divisor of `compressed_block` and of `selected_block`.
      selected_block: tokens of a selected block, at least `compressed_block`.
      selected_blocks: how many blocks a query selects, at least `initial + local`.
      initial: how many blocks at the start of the document are always selected.
      local: how many blocks up to and including the query's own are always selected.
      window: how many tokens the window's branch sees, the query's own included.
      position: how positions enter the scores; `None`: not at all.
      compressor: makes the maps of blocks of keys, and of values, as `compressor(channels, block=, rngs=)`.
      gate: makes the gates, as `gate(dim, features, rngs=)`.
      implementation: of the core, which serves all three without a state, and compressed blocks and window with one;
        `None`: the default of the platform.
      rngs: draws the parameters.
    """

    def __init__(
        self,
        dim: int,
        *,
        heads: int,
        kv_heads: int | None = None,
        key_dim: int | None = None,
        compressed_block: int = 32,
        compressed_stride: int = 16,
        selected_block: int = 64,
        selected_blocks: int = 16,
        initial: int = 1,
        local: int = 2,
        window: int = 512,
        position: Rope | None = None,
        compressor: Make = BlockCompressor,
        gate: Make = BranchGates,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ):
        kv_heads = heads if kv_heads is None else kv_heads
        self.key_dim = head_channels(dim, heads, instead='key_dim') if key_dim is None else key_dim
        check_groups(heads, kv_heads)
        if compressed_stride < 1 or compressed_block % compressed_stride or selected_block % compressed_stride:
            raise UserError(
                f'compressed_stride is {compressed_stride}; it must divide compressed_block, which is '
                f'{compressed_block}, and selected_block, which is {selected_block}'
            )
        if selected_block < compressed_block:
            raise UserError(
                f'selected_block is {selected_block}; expected at least compressed_block, which is {compressed_block}'
            )
        if local < 1 or initial < 0 or selected_blocks < initial + local:
            raise UserError(
                f'selected_blocks is {selected_blocks}; expected at least initial + local, which are {initial} and '
                f'{local}, and at least one of them local'
            )
        self.heads, self.kv_heads = heads, kv_heads
        if position is not None:
            rotated_channels(self.key_dim, position.fraction)
        self.blocks = Blocks(compressed_block, compressed_stride, selected_block, selected_blocks, initial, local)
        self.reach, self.position, self.implementation = Reach(window=window), position, implementation
        self.query = Linear(dim, heads * self.key_dim, rngs=rngs)
        self.keys = nnx.List([Linear(dim, kv_heads * self.key_dim, rngs=rngs) for _ in BRANCHES])
        self.values = nnx.List([Linear(dim, kv_heads * self.key_dim, rngs=rngs) for _ in BRANCHES])
        self.key_compressor: Any = compressor(self.key_dim, block=compressed_block, rngs=rngs)
        self.value_compressor: Any = compressor(self.key_dim, block=compressed_block, rngs=rngs)
        self.gate: Any = gate(dim, len(BRANCHES) * heads, rngs=rngs)
        self.output = Linear(heads * self.key_dim, dim, axes=('heads', 'embed'), rngs=rngs)

    def __call__(
        self, x: Sequence, ctx: Context, state: NativeSparseState | None = None
    ) -> tuple[Sequence, NativeSparseState | None]:
        batch, t, _ = x.shape
        q = self._rotated(self.query(x).reshape(batch, t, self.heads, self.key_dim), ctx.positions)
        keys = [linear(x).reshape(batch, t, self.kv_heads, self.key_dim) for linear in self.keys]
        values = [linear(x).reshape(batch, t, self.kv_heads, self.key_dim) for linear in self.values]
        keys[1:] = [self._rotated(k, ctx.positions) for k in keys[1:]]

        before = self.init_state(batch, t, x.dtype) if state is None else state
        segments = ctx.segments_or_ones()
        view = look(Entries(keys[1], values[1], segments), ctx, Reach(), None if state is None else state.selected)
        near = look(Entries(keys[2], values[2], segments), ctx, self.reach, None if state is None else state.window)
        tokens = view.queries.places
        here = Located(tokens, document_firsts(tokens, segments, before.first, before.segment))
        compressed, count, recent = self._compress(keys[0], values[0], ctx.positions, here, before)
        windowed = attend(q, near.entries.keys, near.entries.values, near, implementation=self.implementation)
        reads = (
            self._read_compressed(q, compressed, here, view),
            attend_selected(
                q,
                view.entries.keys,
                view.entries.values,
                view,
                firsts=here.firsts,
                compressed=compressed,
                blocks=self.blocks,
                implementation=self.implementation,
            ),
            windowed,
        )
        gates = self.gate(x).reshape(batch, t, len(BRANCHES), self.heads, 1)
        y = self.output(sum(gates[:, :, i] * read for i, read in enumerate(reads)).reshape(batch, t, -1))
        if view.cache is None or near.cache is None:
            return y, None
        return view.or_nan(y), NativeSparseState(
            view.cache, near.cache, compressed, count, recent, here.firsts[:, -1], segments[:, -1]
        )

    def init_state(self, batch: int, length: int, dtype: DTypeLike) -> NativeSparseState:
        """Returns empty caches: of `length` tokens, of the window, and of the blocks that so many tokens can end."""
        sizes: Any = {'kv_heads': self.kv_heads, 'key_dim': self.key_dim, 'value_dim': self.key_dim, 'dtype': dtype}
        slots = max(1, length // self.blocks.stride)
        keys, values = (jnp.zeros((batch, self.kv_heads, slots, self.key_dim), dtype) for _ in range(2))
        reach = self.blocks.block - 1
        latest_keys, latest_values = (jnp.zeros((batch, reach, self.kv_heads, self.key_dim), dtype) for _ in range(2))
        return NativeSparseState(
            selected=empty_cache(batch, length, **sizes),
            window=empty_cache(batch, length, **sizes, reach=self.reach),
            compressed=Compressed(
                keys, values, jnp.full((batch, slots), -1, jnp.int32), jnp.zeros((batch, slots), jnp.int32)
            ),
            ended=jnp.zeros((batch,), jnp.int32),
            recent=Recent(latest_keys, latest_values, jnp.zeros((batch, reach), jnp.int32)),
            first=jnp.zeros((batch,), jnp.int32),
            segment=no_segment(batch),
        )

    def _rotated(self, x: Float[Array, 'b t h k'], positions: Positions) -> Float[Array, 'b t h k']:
        return x if self.position is None else self.position.rotate(x, positions)

    def _compress(
        self, k: Keys, v: Values, positions: Positions, here: Located, before: NativeSparseState
    ) -> tuple[Compressed, Int[Array, ' b'], Recent]:
        """The compressed blocks with those that end here, how many they are, and the tokens to keep for the next."""
        t = k.shape[1]
        old = before.recent
        tokens = Recent(
            jnp.concatenate([old.keys.astype(k.dtype), k], axis=1),
            jnp.concatenate([old.values.astype(v.dtype), v], axis=1),
            jnp.concatenate([old.positions, positions], axis=1),
        )
        ended, numbers = self.blocks.ends(here.tokens[None] - here.firsts)
        most = -(-t // self.blocks.stride)
        # Where blocks end, in order; `t` where there are fewer than there could be.
        ends = jnp.sort(jnp.where(ended, jnp.arange(t, dtype=jnp.int32)[None], t), axis=1)[:, :most]
        take = jax.vmap(functools.partial(jnp.take, axis=0, mode='clip'))
        places = ends[:, :, None] + jnp.arange(self.blocks.block, dtype=jnp.int32)[None, None]
        blocks = take(jnp.concatenate([tokens.keys, tokens.values], axis=-1), places)
        keys, values = jnp.split(blocks, 2, axis=-1)
        new = Compressed(
            _swapped(self._rotated(self.key_compressor(keys), take(tokens.positions, ends))),
            _swapped(self.value_compressor(values)),
            jnp.take(here.tokens, ends, mode='clip'),
            take(numbers, ends),
        )
        after = _appended(before.compressed, new, before.ended, ends < t)
        recent = jax.tree.map(lambda x, old: x[:, t:].astype(old.dtype), tokens, old)
        return after, before.ended + jnp.sum(ended, axis=1, dtype=jnp.int32), recent

    def _read_compressed(self, q: Queries, compressed: Compressed, here: Located, view: View) -> Heads:
        seen = compressed.visible(here, self.blocks.block)[:, None]
        batch, t, heads, channels = q.shape
        over = batch * heads * self.blocks.over(t, view.entries.segments.shape[1])
        return of_pairs(cores.attention, pairs=over, channels=2 * channels)(
            q,
            _swapped(compressed.keys).astype(q.dtype),
            _swapped(compressed.values).astype(q.dtype),
            causal=False,
            bias=jnp.where(seen, jnp.zeros((), wide_dtype(q.dtype)), -jnp.inf),
            implementation=self.implementation,
        )


def _appended(cache: Compressed, new: Compressed, start: Int[Array, ' b'], real: Bool[Array, 'b m']) -> Compressed:
    """The cache with the real ones of new blocks from `start` on; those that find no room are lost."""
    slots = start[:, None] + jnp.arange(real.shape[1], dtype=jnp.int32)[None]
    slots = jnp.where(real, slots, cache.ends.shape[1])

    def put(old: Shaped[Array, 'b ...'], new: Shaped[Array, 'b ...']) -> Shaped[Array, 'b ...']:
        every = (slice(None),) if old.ndim == 4 else ()  # heads come before slots
        written = jax.vmap(lambda old, slots, new: old.at[(*every, slots)].set(new, mode='drop'))
        return written(old, slots, new.astype(old.dtype))

    return jax.tree.map(put, cache, new)


def _swapped(x: Float[Array, 'b s g k']) -> Float[Array, 'b g s k']:
    """Heads before time, or time before heads."""
    return jnp.swapaxes(x, 1, 2)
