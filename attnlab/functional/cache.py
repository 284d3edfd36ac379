"""A preallocated store of past keys and values, of one size from the first token to the last."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int, Shaped

from attnlab.errors import UserError
from attnlab.typing import Segments


class Entries(NamedTuple):
    """What is kept of tokens: keys, `b g s k`, turned by position; values, `b g s v`; segments, `b s`.

    Heads come before time, which is how attention reads them: on CPU a step is ten times as fast as with time first.
    """

    keys: Float[Array, 'b g s k']
    values: Float[Array, 'b g s v']
    segments: Segments


class KeyValueCache(NamedTuple):
    """What attention remembers of a stream.

    With a window the slots after the first `sinks` are a ring, in which the newest token replaces the oldest. Otherwise
    slot `i` holds token `i`. Either way `consumed` alone says which token a slot holds: see `slot_tokens`.

    Attributes:
      entries: the slots: `Entries`, or another tuple of arrays that has `segments`, `b s`.
      consumed: how many tokens the stream has had, int32.
    """

    entries: Any
    consumed: Int[Array, '']


def empty_cache(
    batch: int, length: int, *, kv_heads: int, key_dim: int, value_dim: int, dtype: DTypeLike, ring: int | None = None
) -> KeyValueCache:
    """Returns an empty cache of `length` slots, or of `ring` when that is fewer."""
    slots = length if ring is None else min(length, ring)
    entries = Entries(
        keys=jnp.zeros((batch, kv_heads, slots, key_dim), dtype),
        values=jnp.zeros((batch, kv_heads, slots, value_dim), dtype),
        segments=jnp.zeros((batch, slots), jnp.int32),
    )
    return KeyValueCache(entries, jnp.zeros((), jnp.int32))


def extend(
    cache: KeyValueCache, new: Any, *, window: int | None = None, sinks: int = 0
) -> tuple[Any, Int[Array, 's'], KeyValueCache]:
    """Appends tokens; returns what their queries may attend to, its places in the stream, and the cache after them.

    A place of -1 is an empty slot. Without a window, or with fewer slots than `window + sinks`, the cache holds as many
    tokens as it has slots: once `consumed` exceeds them its content is meaningless (see `overflown`).
    Raises `UserError` when one call is too long.
    """
    slots, steps = cache.entries.segments.shape[1], new.segments.shape[1]
    consumed = cache.consumed + steps
    new = jax.tree.map(lambda old, x: x.astype(old.dtype), cache.entries, new)
    if not is_ring(cache, window, sinks):
        if steps > slots:
            raise UserError(
                f'{steps} tokens do not fit in a state of length {slots}; init_state wants a greater length'
            )
        entries = jax.tree.map(functools.partial(_write, cache.consumed), cache.entries, new)
        return entries, slot_tokens(consumed, slots, slots), KeyValueCache(entries, consumed)

    tokens = cache.consumed + jnp.arange(steps, dtype=jnp.int32)
    place = _ring_slots(tokens, consumed, slots, sinks)
    entries = jax.tree.map(functools.partial(_put, place), cache.entries, new)
    after = KeyValueCache(entries, consumed)
    if steps == 1:  # The one token it pushes out is outside its own window: no need to keep both.
        return entries, slot_tokens(consumed, slots, sinks), after
    both = jax.tree.map(lambda old, x: jnp.concatenate([old, x], _time_axis(x)), cache.entries, new)
    return both, jnp.concatenate([slot_tokens(cache.consumed, slots, sinks), tokens]), after


def is_ring(cache: KeyValueCache, window: int | None, sinks: int) -> bool:
    """Whether the cache forgets its oldest tokens."""
    return window is not None and cache.entries.segments.shape[1] == window + sinks


def overflown(cache: KeyValueCache, window: int | None, sinks: int) -> Array | bool:
    """Whether more tokens came than a cache that forgets none can hold."""
    return False if is_ring(cache, window, sinks) else cache.consumed > cache.entries.segments.shape[1]


def slot_tokens(consumed: Int[Array, ''], slots: int, sinks: int) -> Int[Array, 's']:
    """The stream index of the token in every slot after `consumed` tokens, -1 where there is none.

    The first `sinks` slots hold the first tokens, the others are a ring of the latest.
    """
    slot = jnp.arange(slots, dtype=jnp.int32)
    if sinks == slots:
        return jnp.where(slot < consumed, slot, -1)
    last = consumed - 1
    token = last - (last - slot) % (slots - sinks)
    return jnp.where(slot < sinks, jnp.where(slot < consumed, slot, -1), jnp.where(token >= sinks, token, -1))


def _ring_slots(tokens: Int[Array, 't'], consumed: Int[Array, ''], slots: int, sinks: int) -> Int[Array, 't']:
    """Where each new token goes; out of bounds, hence dropped, when a later one of the same call takes its slot."""
    ring = slots - sinks
    kept = (tokens < sinks) | (tokens >= consumed - ring)
    place = jnp.where(tokens < sinks, tokens, sinks + (tokens - sinks) % ring)
    return jnp.where(kept, place, slots)


def _write(start: Int[Array, ''], old: Shaped[Array, '...'], new: Shaped[Array, '...']) -> Shaped[Array, '...']:
    """Sets the slots from `start` on."""
    return jax.lax.dynamic_update_slice_in_dim(old, new, start, _time_axis(old))


def _put(place: Int[Array, 't'], old: Shaped[Array, '...'], new: Shaped[Array, '...']) -> Shaped[Array, '...']:
    """Sets the slots at `place`, passing over those out of bounds."""
    return old.at[(slice(None),) * _time_axis(old) + (place,)].set(new, mode='drop')


def _time_axis(entry: Shaped[Array, '...']) -> int:
    """Time comes after the heads in keys and values; segments have no heads."""
    return 2 if entry.ndim == 4 else 1
