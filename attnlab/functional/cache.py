"""A preallocated store of past keys and values, of one size from the first token to the last."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Int

from attnlab.errors import UserError
from attnlab.typing import Keys, Segments, Values


class KeyValueCache(NamedTuple):
    """What attention remembers of a stream.

    With a window the slots after the first `sinks` are a ring, in which the newest token replaces the oldest. Otherwise
    slot `i` holds token `i`. Either way `index` alone says which token a slot holds: see `slot_tokens`.

    Attributes:
      keys: `b s g k`, already turned by their positions.
      values: `b s g v`.
      segments: the segment of every slot, `b s`.
      index: how many tokens the stream has had, int32.
    """

    keys: Keys
    values: Values
    segments: Segments
    index: Int[Array, '']


class Remembered(NamedTuple):
    """The keys a call may attend to, and the place of each in the stream (-1: an empty slot)."""

    keys: Keys
    values: Values
    segments: Segments
    tokens: Int[Array, 's']


def empty_cache(
    batch: int, length: int, *, kv_heads: int, key_dim: int, value_dim: int, dtype: DTypeLike, ring: int | None = None
) -> KeyValueCache:
    """Returns an empty cache of `length` slots, or of `ring` when that is fewer."""
    slots = length if ring is None else min(length, ring)
    return KeyValueCache(
        keys=jnp.zeros((batch, slots, kv_heads, key_dim), dtype),
        values=jnp.zeros((batch, slots, kv_heads, value_dim), dtype),
        segments=jnp.zeros((batch, slots), jnp.int32),
        index=jnp.zeros((), jnp.int32),
    )


def extend(
    cache: KeyValueCache, keys: Keys, values: Values, segments: Segments, *, window: int | None = None, sinks: int = 0
) -> tuple[Remembered, KeyValueCache]:
    """Appends tokens; returns what their queries may attend to, and the cache after them.

    Without a window, or with fewer slots than `window + sinks`, the cache holds as many tokens as it has slots: once
    `index` exceeds them its content is meaningless (see `overflown`). Raises `UserError` when one call is too long.
    """
    slots, new = cache.keys.shape[1], keys.shape[1]
    fresh = Remembered(
        keys.astype(cache.keys.dtype),
        values.astype(cache.values.dtype),
        segments.astype(jnp.int32),
        cache.index + jnp.arange(new, dtype=jnp.int32),
    )
    if not is_ring(cache, window, sinks):
        if new > slots:
            raise UserError(f'{new} tokens do not fit in a state of length {slots}; init_state wants a greater length')
        write = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=cache.index, axis=1)
        after = KeyValueCache(*map(write, cache[:3], fresh[:3]), index=cache.index + new)
        return Remembered(*after[:3], tokens=slot_tokens(after.index, slots, slots)), after

    place = _ring_slots(fresh.tokens, cache.index + new, slots, sinks)
    after = KeyValueCache(
        *(old.at[:, place].set(x, mode='drop') for old, x in zip(cache[:3], fresh[:3], strict=True)),
        index=cache.index + new,
    )
    if new == 1:  # The one token it pushes out is outside its own window: no need to keep both.
        return Remembered(*after[:3], tokens=slot_tokens(after.index, slots, sinks)), after
    before = Remembered(*cache[:3], tokens=slot_tokens(cache.index, slots, sinks))
    joined = [jnp.concatenate([x, y], axis=1) for x, y in zip(before[:3], fresh[:3], strict=True)]
    return Remembered(*joined, tokens=jnp.concatenate([before.tokens, fresh.tokens])), after


def is_ring(cache: KeyValueCache, window: int | None, sinks: int) -> bool:
    """Whether the cache forgets its oldest tokens."""
    return window is not None and cache.keys.shape[1] == window + sinks


def overflown(cache: KeyValueCache, window: int | None, sinks: int) -> Array | bool:
    """Whether more tokens came than a cache that forgets none can hold."""
    return False if is_ring(cache, window, sinks) else cache.index > cache.keys.shape[1]


def slot_tokens(index: Int[Array, ''], slots: int, sinks: int) -> Int[Array, 's']:
    """The stream index of the token in every slot after `index` tokens, -1 where there is none.

    The first `sinks` slots hold the first tokens, the others are a ring of the latest.
    """
    slot = jnp.arange(slots, dtype=jnp.int32)
    if sinks == slots:
        return jnp.where(slot < index, slot, -1)
    last = index - 1
    token = last - (last - slot) % (slots - sinks)
    return jnp.where(slot < sinks, jnp.where(slot < index, slot, -1), jnp.where(token >= sinks, token, -1))


def _ring_slots(tokens: Int[Array, 't'], index: Int[Array, ''], slots: int, sinks: int) -> Int[Array, 't']:
    """Where each new token goes; out of bounds, hence dropped, when a later one of the same call takes its slot."""
    ring = slots - sinks
    kept = (tokens < sinks) | (tokens >= index - ring)
    place = jnp.where(tokens < sinks, tokens, sinks + (tokens - sinks) % ring)
    return jnp.where(kept, place, slots)
