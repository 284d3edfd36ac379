"""A preallocated cache of past keys and values, of constant size."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Int, Shaped

from attnlab.errors import UserError
from attnlab.functional.reach import Reach
from attnlab.typing import Segments


class Entries(NamedTuple):
    """The keys (rotated by position), values and segments of tokens.

    In a cache heads come before time, `b g s k`, the order in which attention reads them: on CPU a step is ten times as
    fast as with time first.
    """

    keys: Float[Array, 'b s g k']
    values: Float[Array, 'b s g v']
    segments: Segments


class ForgettingEntries(NamedTuple):
    """The `Entries` of a cache with forget gates.

    `forgotten` is what the next token's query adds to the score of each key before its own gate: the sum of the log
    gates of all tokens after the key, `b s h`, in float32 or better.
    """

    keys: Float[Array, 'b s g k']
    values: Float[Array, 'b s g v']
    segments: Segments
    forgotten: Float[Array, 'b s h']


class KeyValueCache(NamedTuple):
    """The state of attention over a stream.

    With a window the slots after the first `sinks` are a ring, in which the newest token replaces the oldest. Otherwise
    slot `i` holds token `i`. In both cases `consumed` determines which token a slot holds: see `slot_tokens`.

    Attributes:
      entries: the slots: `Entries`, or another tuple of arrays that has `segments`, `b s`; heads come before time.
      consumed: number of tokens of the stream so far, int32.
    """

    entries: Any
    consumed: Int[Array, '']


def empty_cache(
    batch: int, length: int, *, kv_heads: int, key_dim: int, value_dim: int, dtype: DTypeLike, reach: Reach = Reach()
) -> KeyValueCache:
    """Returns an empty cache of `length` slots, or of the ring's slots if these are fewer."""
    slots = length if reach.ring is None else min(length, reach.ring)
    entries = Entries(
        keys=jnp.zeros((batch, kv_heads, slots, key_dim), dtype),
        values=jnp.zeros((batch, kv_heads, slots, value_dim), dtype),
        segments=jnp.zeros((batch, slots), jnp.int32),
    )
    return KeyValueCache(entries, jnp.zeros((), jnp.int32))


def extend(cache: KeyValueCache, new: Any, reach: Reach) -> tuple[Any, Int[Array, 's'], KeyValueCache]:
    """Appends tokens; returns the entries their queries may attend to, their places in the stream, and the new cache.

    In the entries appended and returned time comes before heads. A place of -1 is an empty slot. Without a window, or
    with fewer slots than a ring has, the cache holds as many tokens as it has slots: once `consumed` exceeds them its
    content is meaningless (see `overflown`). Raises `UserError` when one call is too long.
    """
    stored = jax.tree.map(lambda old, x: _swapped(x).astype(old.dtype), cache.entries, new)
    entries, places, cache = _extend(cache, stored, reach)
    return jax.tree.map(lambda x, like: _swapped(x).astype(like.dtype), entries, new), places, cache


def _extend(cache: KeyValueCache, new: Any, reach: Reach) -> tuple[Any, Int[Array, 's'], KeyValueCache]:
    slots, steps, sinks = cache.entries.segments.shape[1], new.segments.shape[1], reach.sinks
    consumed = cache.consumed + steps
    if not is_ring(cache, reach):
        if steps > slots:
            raise UserError(
                f'{steps} tokens do not fit in a state of length {slots}; init_state needs a greater length'
            )
        written = jax.tree.map(functools.partial(_write, cache.consumed), cache.entries, new)
        # XLA would else write once more for the products that read them, on CPU into copies of the whole cache.
        entries = jax.lax.optimization_barrier(written)
        return entries, slot_tokens(consumed, slots, slots), KeyValueCache(entries, consumed)

    tokens = cache.consumed + jnp.arange(steps, dtype=jnp.int32)
    place = _ring_slots(tokens, consumed, slots, sinks)
    entries = jax.tree.map(functools.partial(_put, place), cache.entries, new)
    after = KeyValueCache(entries, consumed)
    if steps == 1:  # The token that it replaces is outside its own window: no need to keep both.
        return entries, slot_tokens(consumed, slots, sinks), after
    both = jax.tree.map(lambda old, x: jnp.concatenate([old, x], _time_axis(x)), cache.entries, new)
    return both, jnp.concatenate([slot_tokens(cache.consumed, slots, sinks), tokens]), after


def is_ring(cache: KeyValueCache, reach: Reach) -> bool:
    """Whether the cache forgets its oldest tokens."""
    return cache.entries.segments.shape[1] == reach.ring


def overflown(cache: KeyValueCache, reach: Reach) -> Array | bool:
    """Whether more tokens came than a cache without a ring can hold."""
    return False if is_ring(cache, reach) else cache.consumed > cache.entries.segments.shape[1]


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
    """The slot of each new token; out of bounds, hence dropped, when a later token of the same call takes its slot."""
    ring = slots - sinks
    kept = (tokens < sinks) | (tokens >= consumed - ring)
    place = jnp.where(tokens < sinks, tokens, sinks + (tokens - sinks) % ring)
    return jnp.where(kept, place, slots)


def _write(start: Int[Array, ''], old: Shaped[Array, '...'], new: Shaped[Array, '...']) -> Shaped[Array, '...']:
    """Sets the slots from `start` on."""
    return jax.lax.dynamic_update_slice_in_dim(old, new, start, _time_axis(old))


def _put(place: Int[Array, 't'], old: Shaped[Array, '...'], new: Shaped[Array, '...']) -> Shaped[Array, '...']:
    """Sets the slots at `place`, ignoring those out of bounds."""
    return old.at[(slice(None),) * _time_axis(old) + (place,)].set(new, mode='drop')


def _time_axis(entry: Shaped[Array, '...']) -> int:
    """The axis of time: after the heads in keys and values, first after the batch in segments, which have no heads."""
    return 2 if entry.ndim == 4 else 1


def _swapped(entry: Shaped[Array, '...']) -> Shaped[Array, '...']:
    """Swaps heads and time; arrays without heads are unchanged."""
    return jnp.swapaxes(entry, 1, 2) if entry.ndim == 4 else entry
