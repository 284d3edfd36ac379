"""Block-sparse attention: the selection of blocks by importance, and attention to their tokens alone."""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Bool, Float, Int, Shaped

from attnlab.functional import cores
from attnlab.functional.attend import View, attend
from attnlab.functional.dense import softmax
from attnlab.functional.needed import needing, of_pairs
from attnlab.functional.precision import wide_dtype
from attnlab.functional.recurrences import document_starts
from attnlab.typing import Heads, Keys, Queries, Segments, Values
from pallas_kernels.cost import Cost, Passes

CHUNK = 32
"""The number of queries whose scores are in memory at a time; computed again for the gradient."""

CHOOSING = 512
"""The number of queries that choose at a time, without gradients."""


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How documents are cut into blocks.

    Attributes:
      block: tokens of a compressed block.
      stride: tokens from the start of one compressed block to that of the next, a divisor of `block` and of `size`.
      size: tokens of a selected block, at least `block`.
      count: how many blocks a query selects, including those always selected.
      initial: how many of the first blocks of its document are always selected.
      local: how many blocks up to its own are always selected.
    """

    block: int
    stride: int
    size: int
    count: int
    initial: int
    local: int

    def selects_all(self, tokens: int) -> bool:
        """Whether every block of `tokens` tokens is selected, so that the branch is full attention."""
        return self.count * self.size >= tokens

    def ends(self, offsets: Int[Array, 'b t']) -> tuple[Bool[Array, 'b t'], Int[Array, 'b t']]:
        """Returns which tokens, by position in the document, are the last of a compressed block, and its number."""
        past = offsets + 1 - self.block
        return (past >= 0) & (past % self.stride == 0), past // self.stride

    def over(self, tokens: int, slots: int) -> int:
        """How many compressed blocks are over for the last `tokens` queries of `slots`, together, in one document."""
        lasts = np.arange(slots - tokens, slots) - (self.block - 1)
        return int(np.sum(np.maximum(lasts + self.stride, 0) // self.stride))

    def overlap(self, numbers: Int[Array, 'b n'], selectable: int) -> Int[Array, 'b n j']:
        """Returns how many strides of each compressed block lie in each selectable one."""
        first = (numbers * self.stride)[:, :, None]
        other = (jnp.arange(selectable, dtype=jnp.int32) * self.size)[None, None]
        shared = jnp.minimum(first + self.block, other + self.size) - jnp.maximum(first, other)
        return jnp.maximum(shared, 0) // self.stride


class Compressed(NamedTuple):
    """Compressed blocks in the order in which they ended.

    Attributes:
      keys: `b g n k`.
      values: `b g n v`.
      ends: the stream index of the last token of each, -1 where there is none.
      numbers: which block of its document it is.
    """

    keys: Float[Array, 'b g n k']
    values: Float[Array, 'b g n v']
    ends: Int[Array, 'b n']
    numbers: Int[Array, 'b n']

    def visible(self, queries: 'Located', block: int) -> Bool[Array, 'b t n']:
        """Which blocks lie wholly in a query's past, and in its document."""
        ended = self.ends[:, None] <= queries.tokens[None, :, None]
        return ended & (self.ends[:, None] - (block - 1) >= queries.firsts[:, :, None])


class Located(NamedTuple):
    """The places of queries in the stream, `t`, and of the starts of their documents, `b t`."""

    tokens: Int[Array, 't']
    firsts: Int[Array, 'b t']


def document_firsts(
    tokens: Int[Array, 't'], segments: Segments, first: Int[Array, ' b'], last: Int[Array, ' b']
) -> Int[Array, 'b t']:
    """Returns the stream index of the first token of every token's document.

    `first` is that of the token before these, and `last` its segment.
    """
    starts = jnp.where(document_starts(segments, last), tokens[None], first[:, None])
    return jax.lax.cummax(starts, axis=1)


Importance = Callable[
    [Float[Array, 'b t g r k'], Located, Compressed, Float[Array, 'b n j'], Blocks], Float[Array, 'b g t j']
]
"""What blocks are to queries, from queries, their places, compressed blocks and their overlap with those selected."""


def weighed(
    q: Float[Array, 'b t g r k'], here: Located, compressed: Compressed, overlap: Float[Array, 'b n j'], blocks: Blocks
) -> Float[Array, 'b g t j']:
    """The softmax weights `p` given to compressed blocks, `sum_c p_c overlap_cj`, summed over heads that share keys."""
    scores = jnp.einsum('btgrk,bgnk->bgrtn', q, compressed.keys.astype(q.dtype)) * q.shape[-1] ** -0.5
    weights = softmax(scores, compressed.visible(here, blocks.block)[:, None, None])
    return jnp.einsum('bgrtn,bnj->bgtj', weights, overlap)


def scored(
    q: Float[Array, 'b t g r k'], here: Located, compressed: Compressed, overlap: Float[Array, 'b n j'], blocks: Blocks
) -> Float[Array, 'b g t j']:
    """The products of queries and keys of compressed blocks, each the same as one selected block; minus infinity for
    those that are not over. Summed over heads that share keys."""
    scores = jnp.einsum('btgrk,bgnk->bgtn', q, compressed.keys.astype(q.dtype), precision='highest')
    seen = jnp.broadcast_to(compressed.visible(here, blocks.block)[:, None], scores.shape)
    scores = jnp.einsum('bgtn,bnj->bgtj', jnp.where(seen, scores, 0), overlap, precision='highest')
    return jnp.where(jnp.einsum('bgtn,bnj->bgtj', seen.astype(q.dtype), overlap) > 0, scores, -jnp.inf)


def attend_selected(
    q: Queries,
    keys: Keys,
    values: Values,
    view: View,
    *,
    firsts: Int[Array, 'b t'],
    compressed: Compressed,
    blocks: Blocks,
    importance: Importance = weighed,
    implementation: str | None = None,
) -> Heads:
    """Returns softmax attention to the tokens of the most important blocks for each query, in its past and document.

    Keys and values are those of the view; slot `i` of a cache holds token `i` of the stream. `firsts` are the places
    where the documents of queries start. The selection has no gradient. Without a cache the core serves the call, in
    the form that `implementation` names. Yuan et al. 2025, https://arxiv.org/abs/2502.11089, equations 8 to 12.
    """
    queries = Located(view.queries.places, firsts)
    if blocks.selects_all(keys.shape[1]):
        return attend(q, keys, values, view, implementation=implementation)
    if view.cache is not None:
        swapped = (jnp.swapaxes(each, 1, 2) for each in (keys, values))
        return attend_in_stream(
            q, *swapped, queries=queries, compressed=compressed, blocks=blocks, importance=importance
        )
    b, t, h, channels = q.shape
    read = of_pairs(cores.attention, pairs=b * h * _read(t, t, blocks), channels=channels + values.shape[-1])
    return read(
        q,
        keys,
        values,
        segments=view.ctx.segments,
        chosen=choices(q, queries, compressed, t, blocks, importance),
        block=blocks.size,
        implementation=implementation,
    )


def attend_in_stream(
    q: Queries,
    keys: Float[Array, 'b g s k'],
    values: Float[Array, 'b g s v'],
    *,
    queries: Located,
    compressed: Compressed,
    blocks: Blocks,
    importance: Importance = weighed,
) -> Heads:
    """`attend_selected` for queries anywhere in a stream, whose token `i` is in slot `i`, in plain JAX.

    Scores are computed for `CHUNK` queries at a time. Where the queries of a chunk select fewer tokens, together, than
    there are, these are gathered, which a step of decoding must; elsewhere all are read once and those not selected
    hidden, since a gather moves the keys of every query and its gradient scatters them.
    """
    read = functools.partial(
        _attend_in_stream, queries=queries, compressed=compressed, blocks=blocks, importance=importance
    )
    costs = _costs(q, keys, values, compressed, blocks, importance)
    return needing(read, 'attend_in_stream', **costs)(q, keys, values)


def _attend_in_stream(
    q: Queries,
    keys: Float[Array, 'b g s k'],
    values: Float[Array, 'b g s v'],
    *,
    queries: Located,
    compressed: Compressed,
    blocks: Blocks,
    importance: Importance,
) -> Heads:
    groups, dtype = keys.shape[1], wide_dtype(q.dtype)
    overlap = blocks.overlap(compressed.numbers, _selectable(keys.shape[2], blocks)).astype(dtype)

    @jax.checkpoint
    def chunk(step: tuple[Array, Located]) -> Array:
        q, here = step
        found = jax.lax.stop_gradient(importance(q, here, compressed, overlap, blocks))
        chosen = _chosen(found, here, blocks)
        return attend_chosen(q, keys.astype(dtype), values.astype(dtype), here, chosen, blocks)

    return _in_chunks(chunk, q.astype(dtype), queries, groups, CHUNK).astype(q.dtype)


def choices(
    q: Queries, queries: Located, compressed: Compressed, slots: int, blocks: Blocks, importance: Importance
) -> Bool[Array, 'b t g n']:
    """Returns which blocks of its document each query selects, up to its own; it has no gradient.

    Importances are computed for `CHOOSING` queries at a time.
    """
    choose = functools.partial(
        _choices, queries=queries, compressed=compressed, slots=slots, blocks=blocks, importance=importance
    )
    needed, done = _weighing(q, compressed, slots, blocks, importance, min(CHOOSING, q.shape[1]))
    costs = {kind: Passes(Cost(count), Cost()) for kind, count in (('model', needed), ('executed', done))}
    return needing(choose, 'choices', **costs)(jax.lax.stop_gradient(q))


def _choices(
    q: Queries, *, queries: Located, compressed: Compressed, slots: int, blocks: Blocks, importance: Importance
) -> Bool[Array, 'b t g n']:
    compressed, dtype = jax.lax.stop_gradient(compressed), wide_dtype(q.dtype)
    overlap = blocks.overlap(compressed.numbers, _selectable(slots, blocks)).astype(dtype)
    numbers = jnp.arange(overlap.shape[-1], dtype=jnp.int32)

    def chunk(step: tuple[Array, Located]) -> Array:
        q, here = step
        selected = _chosen(importance(q, here, compressed, overlap, blocks), here, blocks)
        among = _any_of(selected, numbers[None, None, None])
        past = numbers[None, None] <= _own(here, blocks)[..., None]
        return jnp.swapaxes(among & past[:, None], 1, 2)

    return _in_chunks(chunk, q.astype(dtype), queries, compressed.keys.shape[1], CHOOSING)


def _in_chunks(
    function: Callable[[tuple[Array, Located]], Array], q: Queries, queries: Located, groups: int, most: int
) -> Shaped[Array, 'b t ...']:
    """What a function gives for `most` queries, `b t g r k`, at a time, one after the other."""
    batch, t, heads, channels = q.shape
    size = min(most, t)
    more = -t % size
    padded = jnp.pad(q, ((0, 0), (0, more), (0, 0), (0, 0)))
    pieces = jnp.moveaxis(padded.reshape(batch, -1, size, groups, heads // groups, channels), 1, 0)
    firsts = jnp.pad(queries.firsts, ((0, 0), (0, more)), mode='edge')
    tokens = jnp.pad(queries.tokens, (0, more), mode='edge').reshape(-1, size)
    steps = (pieces, Located(tokens, jnp.moveaxis(firsts.reshape(batch, -1, size), 1, 0)))
    found = function(jax.tree.map(lambda x: x[0], steps))[None] if t <= most else jax.lax.map(function, steps)
    return jnp.moveaxis(found, 0, 1).reshape(batch, -1, *found.shape[3:])[:, :t]


def _costs(
    q: Queries,
    keys: Float[Array, 'b g s k'],
    values: Float[Array, 'b g s v'],
    compressed: Compressed,
    blocks: Blocks,
    importance: Importance,
) -> dict[str, Passes]:
    """The costs of a call: those of its definition (`model`), and what it does (`executed`).

    Needed are products with the tokens of chosen blocks up to the query, and what `_weighing` says. Documents are
    ignored.
    """
    b, t, h, k = q.shape
    s, v = keys.shape[2], values.shape[-1]
    size = min(CHUNK, t)
    pairs = 2 * b * h * _read(t, s, blocks) * (k + v)
    compared, scored = _weighing(q, compressed, s, blocks, importance, size)
    chosen = min(blocks.count, _selectable(s, blocks)) * blocks.size
    met = 2 * b * size * -(-t // size) * h * (chosen if size * chosen <= s else s)
    # All of it again for the gradient.
    return {
        'model': Passes(Cost(pairs + compared), Cost(2 * pairs)),
        'executed': Passes(Cost(met * (k + v) + scored), Cost(2 * met * (k + v) + met * k + scored)),
    }


def _read(t: int, s: int, blocks: Blocks) -> int:
    """How many tokens the last `t` queries of `s` read, together, in one document."""
    places = np.arange(s - t, s)
    return int(np.sum(np.minimum(places + 1, (blocks.count - 1) * blocks.size + places % blocks.size + 1)))


def _weighing(
    q: Queries, compressed: Compressed, slots: int, blocks: Blocks, importance: Importance, size: int
) -> tuple[int, int]:
    """The operations that the choice needs, and those it takes for `size` queries at a time.

    Needed are products with the summaries of blocks that are over where they are compared for this alone: NSA's are
    weighed by the branch that reads them.
    """
    b, t, h, k = q.shape
    g, summaries, selectable, shared = *compressed.keys.shape[1:3], _selectable(slots, blocks), importance is weighed
    padded = b * size * -(-t // size)
    # Overlaps are multiplied by weights; or by products, and by what is over.
    scored = 2 * padded * summaries * (h * k + g * selectable if shared else g * (k + 2 * selectable))
    return 0 if shared else 2 * b * g * blocks.over(t, slots) * k, scored


def _selectable(tokens: int, blocks: Blocks) -> int:
    """How many blocks so many tokens have."""
    return max(1, -(-tokens // blocks.size))


def _chosen(importance: Float[Array, 'b g t j'], here: Located, blocks: Blocks) -> Int[Array, 'b g t n']:
    """The numbers of the selected blocks; later than the query's own where fewer exist than are to be selected."""
    selectable, own = importance.shape[-1], _own(here, blocks)[:, None, :, None]
    number = jnp.arange(selectable, dtype=jnp.int32)[None, None, None]
    always = (number < blocks.initial) | (number > own - blocks.local)
    wanted = jnp.where(always, jnp.inf, importance)
    return jax.lax.top_k(jnp.where(number <= own, wanted, -jnp.inf), min(blocks.count, selectable))[1]


def _any_of(chosen: Int[Array, 'b g t n'], numbers: Int[Array, '#b 1 #t s']) -> Bool[Array, 'b g t s']:
    """Which of the numbers of blocks a query chose."""
    return functools.reduce(jnp.logical_or, (one[..., None] == numbers for one in jnp.unstack(chosen, axis=-1)))


def _own(here: Located, blocks: Blocks) -> Int[Array, 'b t']:
    """The number of each query's own block."""
    return (here.tokens[None] - here.firsts) // blocks.size


def attend_chosen(
    q: Float[Array, 'b t g r k'],
    keys: Float[Array, 'b g s k'],
    values: Float[Array, 'b g s v'],
    here: Located,
    chosen: Int[Array, 'b g t n'],
    blocks: Blocks,
    *,
    gathered: bool | None = None,
) -> Float[Array, 'b t h v']:
    """Softmax attention to the tokens of chosen blocks, by their numbers; `gathered=None` is the cheaper way."""
    if gathered is None:
        gathered = q.shape[1] * chosen.shape[-1] * blocks.size <= keys.shape[2]
    read = (_gathered if gathered else _masked)(q, keys, values, here, chosen, blocks)
    return read.reshape(*read.shape[:2], -1, read.shape[-1])


def _masked(
    q: Float[Array, 'b t g r k'],
    keys: Float[Array, 'b g s k'],
    values: Float[Array, 'b g s v'],
    here: Located,
    chosen: Int[Array, 'b g t n'],
    blocks: Blocks,
) -> Float[Array, 'b t g r v']:
    slots = jnp.arange(keys.shape[2], dtype=jnp.int32)
    offsets = slots[None, None] - here.firsts[:, :, None]
    numbers = (offsets // blocks.size)[:, None]
    seen = _any_of(chosen, numbers)
    seen &= ((offsets >= 0) & (slots[None] <= here.tokens[:, None])[None])[:, None]
    scores = jnp.einsum('btgrk,bgsk->bgrts', q, keys) * q.shape[-1] ** -0.5
    return jnp.einsum('bgrts,bgsv->btgrv', softmax(scores, seen[:, :, None]), values)


def _gathered(
    q: Float[Array, 'b t g r k'],
    keys: Float[Array, 'b g s k'],
    values: Float[Array, 'b g s v'],
    here: Located,
    chosen: Int[Array, 'b g t n'],
    blocks: Blocks,
) -> Float[Array, 'b t g r v']:
    inside = jnp.arange(blocks.size, dtype=jnp.int32)[None, None, None, None]
    places = here.firsts[:, None, :, None, None] + blocks.size * chosen[..., None] + inside
    places = places.reshape(*chosen.shape[:3], -1)
    seen = places <= here.tokens[None, None, :, None]
    keys, values = jnp.split(_take(jnp.concatenate([keys, values], axis=-1), places), [keys.shape[-1]], axis=-1)
    scores = jnp.einsum('btgrk,bgtsk->bgrts', q, keys) * q.shape[-1] ** -0.5
    return jnp.einsum('bgrts,bgtsv->btgrv', softmax(scores, seen[:, :, None]), values)


def _take(rows: Float[Array, 'b g s d'], places: Int[Array, 'b g t n']) -> Float[Array, 'b g t n d']:
    """The rows at the places, of one batch dimension: the compiler for TPUs with SparseCores (v5p, v6e) dies of two."""
    flat = (x.reshape(-1, *x.shape[2:]) for x in (rows, places))
    return jax.vmap(functools.partial(jnp.take, axis=0, mode='clip'))(*flat).reshape(*places.shape, -1)
