"""Chunks of time of `selective_scan`, and what one of its steps does to a state, `b n d`."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Inputs(NamedTuple):
    """Time-varying inputs: of one step `b ...`, of one chunk `c b ...`, of the whole call `chunks c b ...`."""

    x: jax.Array
    dt: jax.Array
    B: jax.Array
    C: jax.Array
    starts: jax.Array | None


def decay(rates: jax.Array, at: Inputs) -> jax.Array:
    """What a step leaves of the state, `exp(dt A)`, and nothing of it where a document begins; rates are `n d`."""
    decay = jnp.exp(at.dt[:, None, :] * rates[None])
    return decay if at.starts is None else jnp.where(at.starts[:, None, None], 0, decay)


def write(at: Inputs) -> jax.Array:
    """What a step adds to the state, `dt x B`."""
    return (at.dt * at.x)[:, None, :] * at.B[:, :, None]


def chunked(array: jax.Array, steps: int) -> jax.Array:
    """`b t ...` as `chunks c b ...`, padded with zeros: steps of size zero change nothing."""
    array = jnp.moveaxis(array, 1, 0)
    array = jnp.pad(array, ((0, -array.shape[0] % steps),) + ((0, 0),) * (array.ndim - 1))
    return array.reshape(array.shape[0] // steps, steps, *array.shape[1:])


def by_time(array: jax.Array, t: int) -> jax.Array:
    """`chunks c b ...` as `b t ...`."""
    chunks, steps, *others = array.shape
    return jnp.moveaxis(array.reshape(chunks * steps, *others)[:t], 0, 1)
