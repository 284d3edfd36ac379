"""Linear recurrences whose past is divided into blocks of doubling length, each read with a weight of its own."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int

from attnlab.functional.documents import places_after
from attnlab.functional.precision import wide_dtype
from attnlab.functional.recomputed import recomputed
from attnlab.functional.recurrences import document_starts
from attnlab.typing import Heads, Segments, State, Values

NEAR = 64
"""Tokens of the largest blocks whose levels are read together: about as many as values have channels."""


class Levels(NamedTuple):
    """What a stream has written, by level, and where in its document it stands.

    Attributes:
      memory: of each level from 1 on, what the left half of the last token's block has written; float32 or float64.
      place: how many tokens of the document were seen, `b`.
    """

    memory: Float[Array, 'b l h m v']
    place: Int[Array, ' b']


def levels_of(length: int) -> int:
    """How many levels above the own token there are in `length` tokens: the logarithm to base 2, rounded up."""
    return (length - 1).bit_length() if length > 0 else 0


def no_levels(batch: int, count: int, shape: tuple[int, ...], dtype: DTypeLike) -> Levels:
    """The state of `batch` new streams, `shape` that of a memory, for activations of type `dtype`."""
    return Levels(jnp.zeros((batch, count, *shape), wide_dtype(dtype)), jnp.zeros((batch,), jnp.int32))


def read_by_level(
    run: Callable[..., tuple[Array, Array]],
    v: Values,
    weights: Float[Array, 'b t h l'],
    *,
    state: Levels | None = None,
    last: Int[Array, ' b'] | None = None,
    segments: Segments | None = None,
) -> tuple[Heads, State | None]:
    """Returns `o_t = sum_s w_t^(level(t, s)) P_ts v_s` for a recurrence with reads `sum_s P_ts v_s`.

        level(t, s) = bit_length(t xor s),    s <= t, both from 0 at the first token of their document

    Level 0 is the token itself; a token in the right half of its block of `2^l`, the blocks laid side by side from the
    start of the document, reads the left half by level `l`. So a level is a run over blocks for documents, with values
    of their left halves alone; `run(v, segments=, state=)` gives reads and the last memory. Without a state the levels
    of blocks up to `NEAR` tokens are one run, see `_near`, where a token has one value for each head. `weights` hold
    those of level 0 first. `last` is the segment of the token before `state`, with whose levels a stream reads; without
    a state there are as many as its length asks for. Tokens further into their document than levels reach give NaN.
    Guo et al. 2025, https://arxiv.org/abs/2506.04761.
    """
    b, t = v.shape[:2]
    segments = jnp.ones((b, t), jnp.int32) if segments is None else segments
    starts = document_starts(segments, last)
    place = places_after(starts, None if state is None else state.place)
    count = levels_of(t) if state is None else state.memory.shape[1]
    count = min(count, weights.shape[-1] - 1)
    wide = wide_dtype(v.dtype)

    def level(total: Array, given: tuple[Array, Array, Any]) -> tuple[Array, Any]:
        number, weight, before = given
        half = jax.lax.shift_right_logical(place, jnp.maximum(number - 1, 0)) & 1
        own = number == 0
        blocks = starts | ((place & ((1 << number) - 1)) == 0)
        if before is not None:
            before = jnp.where(blocks[:, 0, None, None, None], jnp.zeros_like(before), before)
        left = (own | (half == 0))[..., None, None]
        y, after = run(_left(v, left), segments=jnp.cumsum(blocks, axis=1, dtype=jnp.int32), state=before)
        weight = jnp.where((own | (half == 1))[..., None], weight, jnp.zeros_like(weight))
        return total + _weighed(y, weight.astype(wide)), None if before is None else after

    first, memory, total = 0, None, jnp.zeros((*weights.shape[:3], v.shape[-1]), wide)
    if state is not None:
        # Level 0 keeps nothing.
        memory = jnp.pad(jnp.moveaxis(state.memory, 1, 0), ((1, 0), *((0, 0),) * 4))
    elif v.shape[2] == weights.shape[2]:
        near = min(count, levels_of(NEAR))
        first, total = near + 1, _near(run, v, weights[..., : near + 1].astype(wide), starts, place)
    numbers = jnp.arange(first, count + 1, dtype=jnp.int32)
    by_level = jnp.moveaxis(weights[..., first : count + 1], -1, 0)
    total, after = jax.lax.scan(level, total, (numbers, by_level, memory))
    total = jnp.where((place < 1 << count)[..., None, None], total, jnp.nan)
    if state is not None:
        state = Levels(jnp.moveaxis(after[1:], 0, 1), place[:, -1] + 1)
    return total.astype(v.dtype), state


@recomputed
def _left(v: Values, left: Bool[Array, 'b t 1 1']) -> Values:
    return jnp.where(left, v, jnp.zeros_like(v))


@recomputed
def _weighed(y: Heads, weight: Float[Array, 'b t h']) -> Heads:
    return weight[..., None] * y.astype(weight.dtype)


def _near(
    run: Callable[..., tuple[Array, Array]],
    v: Values,
    weights: Float[Array, 'b t h l'],
    starts: Bool[Array, 'b t'],
    place: Int[Array, 'b t'],
) -> Heads:
    """The reads within blocks of `size = 2^(l - 1)` tokens, by all of their levels, in float32 or float64.

    A run over the blocks with the unit vector of `t mod size` for a value gives `P_ts` in channel `s mod size`, as a
    block has no two tokens of one channel. Where rows are cut every `size` tokens, those of channels up to that of `t`
    are in the piece of `t`, and the others in the one before.
    """
    (b, t, h), size = v.shape[:3], 1 << weights.shape[-1] - 1
    channel = jnp.arange(t, dtype=jnp.int32) % size
    blocks = starts | ((place & (size - 1)) == 0)
    units = jnp.broadcast_to(jax.nn.one_hot(channel, size, dtype=v.dtype)[None, :, None], (b, t, h, size))
    effects, _ = run(units, segments=jnp.cumsum(blocks, axis=1, dtype=jnp.int32), state=None)

    back = (channel[:, None] - jnp.arange(size, dtype=jnp.int32)[None]) % size
    level = 32 - jax.lax.clz(place[..., None] ^ (place[..., None] - back[None]))
    # A gather's gradient would be a scatter.
    weighed = jnp.einsum('bthl,btcl->bthc', weights, jax.nn.one_hot(level, weights.shape[-1], dtype=weights.dtype))
    effects = (weighed * effects.astype(weighed.dtype)).astype(v.dtype)

    def pieces(x: Array) -> Array:
        return jnp.pad(x, ((0, 0), (0, -t % size), (0, 0), (0, 0))).reshape(b, -1, size, *x.shape[2:])

    here, values = pieces(effects), pieces(v)
    before = jnp.pad(values, ((0, 0), (1, 0), *((0, 0),) * 3))[:, :-1]
    own = jnp.tril(jnp.ones((size, size), bool))[None, None, :, None]
    product = functools.partial(jnp.einsum, 'bnihc,bnchv->bnihv', preferred_element_type=weights.dtype)
    read = product(jnp.where(own, here, 0), values) + product(jnp.where(own, 0, here), before)
    return read.reshape(b, -1, h, v.shape[-1])[:, :t]
