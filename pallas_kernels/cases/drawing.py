"""The parts of named calls: documents, and reproducible random numbers."""

import math
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

Runs = tuple[tuple[int, int], ...]
"""A row as (segment, length) of its documents in order; segment 0 is padding."""

PACKED_37: tuple[Runs, ...] = (((1, 16), (2, 1), (3, 15), (0, 5)), ((1, 3), (2, 5), (3, 24), (4, 5)))
PACKED_67: tuple[Runs, ...] = (((1, 32), (2, 1), (3, 31), (0, 3)), ((1, 5), (2, 40), (3, 22)))


class Call(NamedTuple):
    """The arguments of a core by name: `arrays` have gradients, `options` have none."""

    arrays: dict[str, Any]
    options: dict[str, Any]


def documents(rows: tuple[Runs, ...] | None) -> dict[str, jax.Array]:
    """The option `segments` of a call, if it has documents."""
    return {} if rows is None else {'segments': segments(rows)}


def segments(rows: tuple[Runs, ...]) -> jax.Array:
    """Returns the segments of every token, int32 `b t`."""
    return jnp.array([[segment for segment, length in row for _ in range(length)] for row in rows], jnp.int32)


def shape(letters: str, sizes: dict[str, int]) -> tuple[int, ...]:
    """The sizes of dimensions given by their letters, `1` standing for itself."""
    return tuple(1 if letter == '1' else sizes[letter] for letter in letters.split())


def abstract(letters: str, sizes: dict[str, int], dtype: DTypeLike) -> jax.ShapeDtypeStruct:
    """An array without numbers, for compilation."""
    return jax.ShapeDtypeStruct(shape(letters, sizes), dtype)


def key(name: str, argument: str) -> jax.Array:
    """The random key of one argument of a case."""
    return jax.random.key(zlib.crc32(f'{name}/{argument}'.encode()))


def normal(name: str, argument: str, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    """Standard normal numbers, drawn in float32 for every type, so that all types hold the same ones."""
    return _in_a_row(jax.random.normal, name, argument, shape).astype(dtype)


def uniform(name: str, argument: str, shape: tuple[int, ...]) -> jax.Array:
    """Numbers from 0 to 1, in float32."""
    return _in_a_row(jax.random.uniform, name, argument, shape)


def chosen(name: str, argument: str, share: float, shape: tuple[int, ...]) -> jax.Array:
    """A mask in which a fraction `share` is True."""
    return uniform(name, argument, shape) < share


def log_decay(name: str, shape: tuple[int, ...], strength: float, *, sudden: bool) -> jax.Array:
    """Log decays from 0 to `-2 strength`, in float32; `sudden` ones are near 0 but for a tenth, which forgets all."""
    decay = -2 * strength * uniform(name, 'log_decay', shape)
    return jnp.where(chosen(name, 'sudden', 0.1, shape), -50.0, decay / 1000) if sudden else decay


def _in_a_row(draw: Callable[..., jax.Array], name: str, argument: str, shape: tuple[int, ...]) -> jax.Array:
    """Drawn flat, then reshaped: drawing in the shape itself would compile ten times as long."""
    return draw(key(name, argument), (math.prod(shape),)).reshape(shape)


def hidden(name: str, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    """A bias `b h t s`, a fifth of it minus infinity; where it varies by query, the first query sees nothing."""
    hidden = chosen(name, 'hidden', 0.2, shape)
    if shape[2] > 1:
        hidden = hidden.at[:, :, 0].set(True)
    return jnp.where(hidden, -math.inf, normal(name, 'bias', shape, dtype))
