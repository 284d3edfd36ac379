"""Mixers whose states have few bits between tokens: states of any kind in a format, and caches of keys and values."""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float, Shaped

from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.functional.cache import KeyValueCache
from attnlab.mixers.mixer import Mixer
from attnlab.mixers.softmax.attention import Attention
from attnlab.quantize.formats import Format, MinMax, storage_called
from attnlab.signature import checked_fields
from attnlab.typing import Sequence, State


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=('stored', 'imaginary'), meta_fields=('shape', 'dtype')
)
@dataclasses.dataclass(frozen=True)
class Packed:
    """An array of a state in a format, its rows being what the last axis holds.

    Attributes:
      stored: by name, arrays `b g ...`, a row a group.
      imaginary: the same of the imaginary part of complex numbers; `None` of real ones.
      shape: of the array, without the rows of the batch.
      dtype: of the array.
    """

    stored: Any
    imaginary: Any
    shape: tuple[int, ...]
    dtype: Any


def packed(format: Format, x: Shaped[Array, 'b ...']) -> Packed:
    """An array in a format."""
    complex_ = jnp.issubdtype(x.dtype, jnp.complexfloating)
    rows = len(x), *_rows(x.shape[1:])
    parts = (x.real, x.imag) if complex_ else (x, None)
    stored, imaginary = (None if part is None else jax.vmap(format.encode)(part.reshape(rows)) for part in parts)
    return Packed(stored, imaginary, x.shape[1:], x.dtype)


def unpacked(format: Format, array: Packed) -> Shaped[Array, 'b ...']:
    """The array that was stored."""
    dtype = jnp.finfo(array.dtype).dtype

    def decoded(stored: Mapping[str, Array]) -> Array:
        numbers = jax.vmap(lambda one: format.decode(one, _rows(array.shape), dtype))(stored)
        return numbers.reshape(len(numbers), *array.shape)

    found = decoded(array.stored)
    return found if array.imaginary is None else jax.lax.complex(found, decoded(array.imaginary))


def _rows(shape: tuple[int, ...]) -> tuple[int, int]:
    return math.prod(shape[:-1]), shape[-1]


class StoredState(Mixer):
    """A mixer whose state is stored in a format after every token: `S_t = rounded(f(S_{t-1}, x_t))`.

    Every array of real or complex numbers of the state is, and whole numbers are kept as they are. A sequence is read
    token by token, without a state as well, so that what is evaluated is what is decoded, and any split of a sequence
    gives the same. The arithmetic is the mixer's own, in its types.

    Args:
      mixer: the mixer.
      format: of the state, a stable one; a row is what the last axis holds.
    """

    def __init__(self, mixer: Any, format: Format):
        self.mixer, self.format = mixer, format
        self.mixes_values = mixer.mixes_values

    def __call__(self, x: Sequence, ctx: Context, state: State | None = None) -> tuple[Sequence, State | None]:
        """Reads tokens one by one."""
        return _by_token(self.token, self, x, ctx, state)

    def values(self, x: Sequence, ctx: Context, state: State | None = None) -> Float[Array, 'b t v']:
        """The mixer's, which may depend on the state that was stored."""

        def token(x: Array, ctx: Context, state: State) -> tuple[Array, State]:
            return self.mixer.values(x, ctx, self._whole(state)), self.token(x, ctx, state)[1]

        return _by_token(token, self, x, ctx, state)[0]

    def init_state(self, batch: int, length: int, dtype: DTypeLike) -> State:
        """The mixer's, stored."""
        return self._stored(self.mixer.init_state(batch, length, dtype))

    def token(self, x: Float[Array, 'b 1 d'], ctx: Context, state: State) -> tuple[Float[Array, 'b 1 d'], State]:
        """Reads one token."""
        y, whole = self.mixer(x, ctx, self._whole(state))
        return y, self._stored(whole)

    def _whole(self, state: State) -> State:
        return jax.tree.map(
            lambda leaf: unpacked(self.format, leaf) if isinstance(leaf, Packed) else leaf,
            state,
            is_leaf=lambda leaf: isinstance(leaf, Packed),
        )

    def _stored(self, state: State) -> State:
        def stored(leaf: Array) -> Any:
            real = leaf.ndim > 1 and leaf.size and jnp.issubdtype(leaf.dtype, jnp.inexact)
            return packed(self.format, leaf) if real else leaf

        return jax.tree.map(stored, state)


def _by_token(
    read: Callable[..., tuple[Array, State]], mixer: Any, x: Array, ctx: Context, state: State | None
) -> tuple[Array, State | None]:
    """What `read` makes of a sequence, token after token; by the contract of a mixer."""
    begun = mixer.init_state(x.shape[0], x.shape[1], x.dtype) if state is None else state

    def one(state: State, token: tuple[Array, Array]) -> tuple[State, Array]:
        index, x = token
        y, state = read(x[:, None], ctx.token(index), state)
        return state, y[:, 0]

    after, y = jax.lax.scan(one, begun, (jnp.arange(x.shape[1]), jnp.swapaxes(x, 0, 1)))
    return jnp.swapaxes(y, 0, 1), None if state is None else after


@checked_fields
@dataclasses.dataclass(frozen=True)
class KIVI:
    """How keys and values of a cache are stored: keys by channel, values by token, the latest whole.

        x ~ min + s q,  s = (max - min) / (2^bits - 1)

    Keys wait, whole, until there are `window` of them, which then are stored, `group` tokens of a channel sharing a
    scale. Of values the last `window` are whole, those before them stored one by one, `group` channels of a token
    sharing a scale. A query sees itself and what it finds. Keys are stored as attention keeps them, rotated by their
    positions. A prompt is stored as it is read, token by token; the released code reads it whole before it is stored.
    Liu et al. 2024, https://arxiv.org/abs/2402.02750.

    Attributes:
      bits: of a code, 2 to 8.
      group: numbers that share a scale.
      window: latest tokens that are whole, a multiple of `group`.
      scales: the type of scales and least numbers.

    Raises `UserError` for bits, sizes or a type that there are not.
    """

    bits: int = 2
    group: int = 32
    window: int = 128
    scales: str = 'float16'

    def __post_init__(self) -> None:
        MinMax(self.bits, scales=self.scales)
        if self.bits > 8 or self.group < 1 or self.window < self.group or self.window % self.group:
            raise UserError(
                f'KIVI has {self.bits} bits, groups of {self.group} and a window of {self.window}; it must have 2 to 8 '
                'bits and a window that is a multiple of the group'
            )

    @property
    def of_keys(self) -> MinMax:
        """The format of a channel of `group` tokens, a row."""
        return MinMax(self.bits, scales=self.scales)

    def of_values(self, channels: int) -> MinMax:
        """The format of a token's channels, a row."""
        return MinMax(self.bits, scope=min(self.group, channels), scales=self.scales)


class StoredCacheState(NamedTuple):
    """What attention with a stored cache remembers.

    Attributes:
      keys: arrays `b g n ...`, `n` groups of tokens, a row a channel.
      values: arrays `b g s ...`, a row a token.
      recent_keys: `b g w k`, token `i` in slot `i mod w`.
      recent_values: `b g w v`, likewise.
      rest: the state of attention with keys and values of no slot.
    """

    keys: Mapping[str, Array]
    values: Mapping[str, Array]
    recent_keys: Float[Array, 'b g w k']
    recent_values: Float[Array, 'b g w v']
    rest: Any


class StoredCache(Mixer):
    """Attention whose cache of keys and values is stored as by `KIVI`.

    A sequence is read token by token, as by `StoredState`. Raises `UserError` for attention with a window, whose cache
    is a ring.

    Args:
      mixer: the attention.
      how: the bits, and what shares a scale.
    """

    def __init__(self, mixer: Any, how: KIVI):
        if not isinstance(mixer, Attention) or mixer.reach.window is not None:
            raise UserError(f'{type(mixer).__name__} has no cache of all its keys; KIVI stores that of full attention')
        self.mixer: Any = mixer
        self.how = how

    def __call__(self, x: Sequence, ctx: Context, state: State | None = None) -> tuple[Sequence, State | None]:
        """Reads tokens one by one."""
        return _by_token(self.token, self, x, ctx, state)

    def init_state(self, batch: int, length: int, dtype: DTypeLike) -> StoredCacheState:
        """The empty cache, of `length` tokens filled up to a multiple of the window."""
        whole = self.mixer.init_state(batch, length, dtype)
        keys, values = whole.cache.entries[:2]
        window, group = self.how.window, self.how.group
        slots = -(-length // window) * window
        by_channel = jnp.zeros((batch, keys.shape[1], slots // group, self.mixer.key_dim, group), dtype)
        by_token = jnp.zeros((batch, keys.shape[1], slots, self.mixer.value_dim), dtype)
        return StoredCacheState(
            keys=_mapped(self.how.of_keys.encode, by_channel),
            values=_mapped(self.how.of_values(self.mixer.value_dim).encode, by_token, rows=1),
            recent_keys=jnp.zeros((*keys.shape[:2], window, keys.shape[3]), dtype),
            recent_values=jnp.zeros((*values.shape[:2], window, values.shape[3]), dtype),
            rest=_with_entries(whole, keys[:, :, :0], values[:, :, :0]),
        )

    def token(
        self, x: Float[Array, 'b 1 d'], ctx: Context, state: StoredCacheState
    ) -> tuple[Float[Array, 'b 1 d'], StoredCacheState]:
        """Reads one token."""
        window, consumed = self.how.window, state.rest.cache.consumed
        slots = state.rest.cache.entries.segments.shape[1]
        y, whole = self.mixer(x, ctx, _with_entries(state.rest, *self._seen(state, consumed, slots)))
        # A call beyond the slots gives NaN; what it would have stored does not matter.
        place = jnp.minimum(consumed, slots - 1)
        key, value = (
            jax.lax.dynamic_slice_in_dim(each, place, 1, 2).astype(recent.dtype)
            for each, recent in zip(whole.cache.entries[:2], (state.recent_keys, state.recent_values), strict=True)
        )
        slot = consumed % window
        recent_keys = jax.lax.dynamic_update_slice_in_dim(state.recent_keys, key, slot, 2)
        # The value that it takes the place of, if there was one, is stored.
        oldest = jax.lax.dynamic_slice_in_dim(state.recent_values, slot, 1, 2)
        recent_values = jax.lax.dynamic_update_slice_in_dim(state.recent_values, value, slot, 2)
        encode = self.how.of_values(self.mixer.value_dim).encode
        values = _put(state.values, _mapped(encode, oldest, rows=1), consumed - window, consumed >= window)
        grouped = recent_keys.reshape(*key.shape[:2], window // self.how.group, self.how.group, key.shape[3])
        full = _mapped(self.how.of_keys.encode, jnp.swapaxes(grouped, 3, 4))
        first = (consumed + 1 - window) // self.how.group
        keys = _put(state.keys, full, first, (consumed + 1) % window == 0)
        rest = _with_entries(whole, *(each[:, :, :0] for each in whole.cache.entries[:2]))
        return y, StoredCacheState(keys, values, recent_keys, recent_values, rest)

    def _seen(self, state: StoredCacheState, consumed: Array, slots: int) -> tuple[Array, Array]:
        """The keys and values of all tokens so far, in their slots, those that were stored and those that are whole."""
        window, group, dtype = self.how.window, self.how.group, state.recent_keys.dtype
        key_dim, value_dim = self.mixer.key_dim, self.mixer.value_dim
        by_channel = _mapped(lambda stored: self.how.of_keys.decode(stored, (key_dim, group), dtype), state.keys)
        keys = jnp.swapaxes(by_channel, 3, 4).reshape(*by_channel.shape[:2], -1, key_dim)
        values = _mapped(
            lambda stored: self.how.of_values(value_dim).decode(stored, (1, value_dim), dtype), state.values
        )[..., 0, :]
        tokens = jnp.arange(slots)

        def mixed(stored: Array, recent: Array, whole: Array) -> Array:
            return jnp.where(whole[None, None, :, None], recent[:, :, tokens % window], stored[:, :, :slots])

        return (
            mixed(keys, state.recent_keys, tokens >= consumed // window * window),
            mixed(values, state.recent_values, tokens >= consumed - window),
        )


def _mapped(function: Callable[..., Any], given: Any, rows: int = 0) -> Any:
    """A function of rows for every row of the batch, head, and token or group of tokens; a token is `rows` rows."""
    if rows:
        given = given[..., None, :]
    for _ in range(3):
        function = jax.vmap(function)
    return function(given)


def _put(stored: Mapping[str, Array], new: Mapping[str, Array], place: Array, there: Array) -> dict[str, Array]:
    """The new groups at their place, if there are any."""
    place = jnp.maximum(place, 0)
    return {
        name: jnp.where(there, jax.lax.dynamic_update_slice_in_dim(array, new[name], place, 2), array)
        for name, array in stored.items()
    }


def _with_entries(state: Any, keys: Array, values: Array) -> Any:
    """A state of attention with other keys and values."""
    cache: KeyValueCache = state.cache
    return state._replace(cache=cache._replace(entries=cache.entries._replace(keys=keys, values=values)))


StateFormat = Format | KIVI
"""How states are stored."""


def state_called(text: str) -> StateFormat:
    """The format of a name: `kivi2` or `kivi4@64`, groups of 64; or as `storage_called` has them, such as `int8`.

    Raises `UserError` for an unknown name, and for a format that is not stable.
    """
    if (found := re.fullmatch(r'kivi(\d+)(?:@(\d+))?', text)) is not None:
        group = int(found[2]) if found[2] else 32
        return KIVI(int(found[1]), group=group, window=max(128 // max(group, 1), 1) * group)
    format = storage_called(text)
    if not format.stable:
        raise UserError(
            f'{text!r} is no format of states: its codes change when a state is stored again, as it is after every '
            'token, so that the state drifts; choose another, such as int8, affine8, e4m3, mxe4m3 or kivi2'
        )
    return format


def without_storage(mixer: Any) -> Any:
    """The mixer without what stores its state; one that is not stored, as it is."""
    return mixer.mixer if isinstance(mixer, StoredState | StoredCache) else mixer


def with_stored_state(mixer: Any, how: StateFormat) -> Mixer | None:
    """A mixer whose state is stored; `None` where there is nothing of the kind to store."""
    if isinstance(how, KIVI):
        return StoredCache(mixer, how) if isinstance(mixer, Attention) and mixer.reach.window is None else None
    return StoredState(mixer, how)
