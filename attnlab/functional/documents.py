"""Sums over the documents of a row, and over neighbours within one, for mixers that see them whole."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from attnlab.context import PADDING
from attnlab.functional.precision import wide_dtype
from attnlab.functional.recomputed import recomputed
from attnlab.functional.recurrences import NOTHING, document_starts
from attnlab.typing import Segments


def document_index(segments: Segments) -> Int[Array, 'b t']:
    """Returns the place in its row of the document of every token, from 0; padding counts as documents."""
    return jnp.cumsum(document_starts(segments), axis=1) - 1


def document_sizes(segments: Segments | None, batch: int, length: int) -> Int[Array, 'b t']:
    """Returns how many tokens the document of every token has."""
    if segments is None:
        return jnp.full((batch, length), length, jnp.int32)
    return _totals(jnp.ones((batch, length), jnp.int32), segments)


def document_means(x: Float[Array, 'b t ...'], segments: Segments | None) -> Float[Array, 'b #t ...']:
    """Returns the mean of `x` over the document of every token, in float32 or better; one a row without segments."""
    wide = x.astype(wide_dtype(x.dtype))
    if segments is None:
        return jnp.mean(wide, axis=1, keepdims=True)
    sizes = document_sizes(segments, *segments.shape)
    return _totals(wide, segments) / sizes.reshape(*sizes.shape, *(1,) * (x.ndim - 2)).astype(wide.dtype)


def _totals(x: Array, segments: Segments) -> Array:
    def of_row(row: Array, index: Array) -> Array:
        totals = jax.ops.segment_sum(row, index, num_segments=row.shape[0], indices_are_sorted=True)
        return totals[index]

    return jax.vmap(of_row)(x, document_index(segments))


def document_places(segments: Segments | None, batch: int, length: int) -> Int[Array, 'b t']:
    """Returns the place of every token in its document, from 0."""
    if segments is None:
        return jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
    return places_after(document_starts(segments))


def places_after(starts: Bool[Array, 'b t'], seen: Int[Array, ' b'] | None = None) -> Int[Array, 'b t']:
    """Returns the place of every token in its document, from 0, where a stream has `seen` tokens of the first."""
    index = jnp.arange(starts.shape[1], dtype=jnp.int32)[None]
    return index - jax.lax.cummax(jnp.where(starts, index, 0 if seen is None else -seen[:, None]), axis=1)


def document_membership(segments: Segments | None, batch: int, length: int, most: int) -> Bool[Array, 'b t n']:
    """Returns which of the first `most` documents of its row every token is of: of none for padding, and for others."""
    if segments is None:
        return jnp.broadcast_to(jnp.arange(most) == 0, (batch, length, most))
    there = jnp.not_equal(segments, PADDING)
    index = jnp.cumsum(document_starts(segments) & there, axis=1) - 1
    return (index[..., None] == jnp.arange(most)[None, None]) & there[..., None]


@recomputed
def local_sum(
    x: Float[Array, 'b t d'], taps: Float[Array, 'w #b #t d'], segments: Segments | None
) -> Float[Array, 'b t d']:
    """Returns `y_t = sum_i taps_(i t) x_(t + i - w // 2)` over neighbours of the same document."""
    t, width = x.shape[1], taps.shape[0]
    around = (width // 2, width - 1 - width // 2)
    inputs = jnp.pad(x, ((0, 0), around, (0, 0)))
    known = None if segments is None else jnp.pad(segments, ((0, 0), around), constant_values=NOTHING)
    y = jnp.zeros_like(x)
    for i in range(width):
        neighbour = inputs[:, i : i + t]
        if known is not None and segments is not None:
            same = jnp.equal(known[:, i : i + t], segments)
            neighbour = jnp.where(same[..., None], neighbour, jnp.zeros_like(neighbour))
        y = y + taps[i] * neighbour
    return y


@dataclasses.dataclass(frozen=True)
class Slots:
    """A place for every token in an array apart from the row, such as one that documents are laid out in.

    Attributes:
      index: `b t`; `count` for tokens that have none.
      count: how many there are in a row.
      there: which tokens are no padding, `b t`.
    """

    index: Int[Array, 'b t']
    count: int
    there: Bool[Array, 'b t']

    def spread(self, x: Float[Array, 'b t ...']) -> Float[Array, 'b n ...']:
        """Returns `x` by slot, zero in those of no token."""

        @recomputed
        def spread(x: Float[Array, 'b t ...'], index: Int[Array, 'b t']) -> Float[Array, 'b n ...']:
            return jax.vmap(
                lambda row, index: jnp.zeros((self.count, *row.shape[1:]), row.dtype).at[index].set(row, mode='drop')
            )(x, index)

        return spread(x, self.index)

    def collected(self, y: Float[Array, 'b n ...']) -> Float[Array, 'b t ...']:
        """Returns `y` by token, zero for padding and NaN for other tokens without a slot."""
        none = jnp.where(self.there, jnp.nan, 0.0).astype(y.dtype)
        index = jnp.minimum(self.index, self.count - 1)
        found = jax.vmap(lambda row, index: row[index])(y, index)
        shape = (*index.shape, *(1,) * (y.ndim - 2))
        return jnp.where((self.index < self.count).reshape(shape), found, none.reshape(shape))


def document_slots(segments: Segments | None, batch: int, length: int, most: int) -> Slots:
    """Returns slots that lay out the first `most` documents of a row one after the other, each in `length`."""
    there = jnp.ones((batch, length), bool) if segments is None else jnp.not_equal(segments, PADDING)
    starts = jnp.arange(length)[None] == 0 if segments is None else document_starts(segments)
    document = jnp.cumsum(starts & there, axis=1) - 1
    index = document * length + document_places(segments, batch, length)
    return Slots(jnp.where(there & (document < most), index, most * length), most * length, there)


def block_slots(segments: Segments | None, batch: int, length: int, size: int, most: int) -> Slots:
    """Returns slots of blocks of `size` tokens, counted from the start of each document; the last may not be full.

    There are as many as `most` documents can need, whatever their lengths.
    """
    there = jnp.ones((batch, length), bool) if segments is None else jnp.not_equal(segments, PADDING)
    place = document_places(segments, batch, length) % size
    block = jnp.cumsum((place == 0) & there, axis=1) - 1
    count = -(-length // size) + most - 1
    return Slots(jnp.where(there & (block < count), block * size + place, count * size), count * size, there)
