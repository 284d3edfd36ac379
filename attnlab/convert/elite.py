"""Converts trained rotary attention into attention with a compressed cache: few rotated pairs, the rest low-rank.

    chunks = elite_chunks(mixer, x, ctx, kept=4)
    smaller = to_elite(mixer, chunks, rank=96)

Zhou et al. 2025, https://arxiv.org/abs/2503.01586.
"""

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float, Int

from attnlab.context import Context
from attnlab.convert.plain import other_parts
from attnlab.errors import UserError
from attnlab.mixers.softmax.attention import Attention
from attnlab.mixers.softmax.latent import LatentAttention
from attnlab.nn.decoupled import EliteRope
from attnlab.nn.heads import by_head
from attnlab.nn.positions import Rope
from attnlab.nn.projections import check_plain
from attnlab.typing import Sequence

Chunks = tuple[tuple[int, ...], ...]
"""The pairs of channels that are rotated by position, a tuple for every head."""


def elite_chunks(mixer: Attention, x: Sequence, ctx: Context, *, kept: int) -> Chunks:
    """Returns the `kept` most important pairs of every head, in order, found by a greedy search on inputs `x`.

    Each round adds the pair that brings the scores of a head, with only the chosen pairs rotated, closest to its
    original scores: the least mean absolute difference over queries and their visible keys. A smaller
    `kept` gives a prefix of a larger one. Raises `UserError` for attention that `to_elite` does not take, or for more
    pairs than there are.
    """
    _rope(mixer)
    pairs = mixer.key_dim // 2
    if not 1 <= kept <= pairs:
        raise UserError(f'kept is {kept}; a head has {pairs} pairs of channels')
    return tuple(_greedy(_differences(mixer, x, ctx, head), kept) for head in range(mixer.heads))


def score_distance(mixer: Attention, x: Sequence, ctx: Context, chunks: Chunks) -> Float[np.ndarray, 'h']:
    """Returns the distance of each head's scores with only these pairs rotated; `elite_chunks` minimises it."""
    table = EliteRope(chunks=chunks).table(EliteRope(chunks=chunks).keys(mixer.heads), mixer.key_dim)
    left = (np.delete(_differences(mixer, x, ctx, head), table[head], axis=0) for head in range(mixer.heads))
    return np.asarray([np.mean(np.abs(np.sum(rest, axis=0))) for rest in left])


def to_elite(mixer: Attention, chunks: Chunks, *, rank: int | None = None) -> LatentAttention:
    """Returns attention that rotates only these pairs, and makes all other key channels and the values from one latent.

    The joint map to the unrotated keys and the values of all heads is replaced by its best approximation of rank
    `rank`; `None` is the full rank, which is exact. With all pairs rotated the result is then the same function as
    `mixer`. The cache holds `2 r h + rank` numbers a token, `r` the pairs of a head, instead of `2 h k`.

    Raises `UserError` unless `mixer` is plain multi-head softmax attention with all channels rotary and maps that are
    not rounded, or for a rank above the full one.
    """
    rope = _rope(mixer)
    dim, heads = mixer.query.weight.shape[0], mixer.heads
    position = EliteRope(base=rope.base, chunks=chunks)
    full = min(dim, heads * (position.split(mixer.key_dim)[0] + mixer.value_dim))
    if rank is not None and not 1 <= rank <= full:
        raise UserError(f'rank is {rank}; the map to keys and values has rank {full} at most')
    result = LatentAttention(
        dim,
        heads=heads,
        position=position,
        key_dim=mixer.key_dim,
        value_dim=mixer.value_dim,
        rank=full if rank is None else rank,
        norm=None,
        causal=mixer.reach.causal,
        implementation=mixer.implementation,
        rngs=nnx.Rngs(0),
    )
    first, second = _pairs(mixer.key_dim, rope.interleaved)
    table = position.table(position.keys(heads), mixer.key_dim)
    rotated = np.concatenate([first[table], second[table]], axis=1)
    others = np.stack([np.setdiff1d(np.arange(mixer.key_dim), row) for row in rotated])

    query, key, value = (
        np.asarray(linear.weight[...], np.float64).reshape(dim, heads, -1)
        for linear in (mixer.query, mixer.key, mixer.value)
    )
    joint = np.concatenate([np.take_along_axis(key, others[None], 2), value], axis=2).reshape(dim, -1)
    left, sizes, right = np.linalg.svd(joint, full_matrices=False)
    weights = {
        'query': np.concatenate([np.take_along_axis(query, which[None], 2) for which in (others, rotated)], axis=2),
        'key': np.take_along_axis(key, rotated[None], 2),
        'down': left[:, : result.rank],
        'up': sizes[: result.rank, None] * right[: result.rank],
        'output': mixer.output.weight[...],
    }
    dtype = mixer.query.weight.dtype
    for name, weight in weights.items():
        linear = getattr(result, name)
        linear.weight[...] = jnp.asarray(weight, dtype).reshape(linear.weight.shape)
    return result


def _rope(mixer: Attention) -> Rope:
    """The rotary embedding of a mixer.

    Raises `UserError` unless it is plain multi-head softmax attention with maps that are not rounded.
    """
    rope, others = mixer.position, other_parts(mixer)
    if not isinstance(rope, Rope) or rope.fraction != 1 or mixer.kv_heads != mixer.heads:
        raise UserError('elite frequencies need softmax attention with as many key/value heads as heads, all rotary')
    if mixer.query.bias is not None:
        others.append('bias')
    if others:
        raise UserError(f'elite frequencies need attention without other parts; this has {", ".join(others)}')
    for linear in (mixer.query, mixer.key, mixer.value, mixer.output):
        check_plain(linear)
    return rope


def _pairs(channels: int, interleaved: bool) -> tuple[Int[np.ndarray, 'c'], Int[np.ndarray, 'c']]:
    """The first and the second channel of every pair."""
    each = np.arange(channels)
    return (each[0::2], each[1::2]) if interleaved else (each[: channels // 2], each[channels // 2 :])


def _differences(mixer: Attention, x: Sequence, ctx: Context, head: int) -> Float[np.ndarray, 'c n']:
    """Rotated minus unrotated contribution of each pair to the scores of a head, for visible keys."""
    rope = _rope(mixer)
    first, second = _pairs(mixer.key_dim, rope.interleaved)

    def products(q: Array, k: Array) -> Array:
        q, k = (jnp.stack([each[:, :, head, first], each[:, :, head, second]], axis=-1) for each in (q, k))
        return jnp.einsum('btcn,bscn->cbts', q, k)

    q, k = (by_head(linear(x), mixer.heads) for linear in (mixer.query, mixer.key))
    rotated = products(rope.rotate(q, ctx.positions), rope.rotate(k, ctx.positions))
    difference = mixer.key_dim**-0.5 * (rotated - products(q, k))
    segments = np.asarray(ctx.segments_or_ones())
    seen = (segments[:, :, None] == segments[:, None, :]) & (segments != 0)[:, :, None]
    if mixer.reach.causal:
        seen &= np.tril(np.ones((x.shape[1],) * 2, bool))[None]
    return np.asarray(difference)[:, seen]


def _greedy(differences: Float[np.ndarray, 'c n'], kept: int) -> tuple[int, ...]:
    left, chosen = np.sum(differences, axis=0), np.zeros(len(differences), bool)
    order = []
    for _ in range(kept):
        distances = np.asarray([np.mean(np.abs(left - each)) for each in differences])
        best = int(np.argmin(np.where(chosen, np.inf, distances)))
        chosen[best] = True
        order.append(best)
        left = left - differences[best]
    return tuple(order)
