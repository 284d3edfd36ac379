"""Attention of new queries to what a cache holds."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

import pallas_kernels
from attnlab.functional.cache import Entries
from attnlab.functional.masks import visible
from attnlab.typing import Heads, Queries, Segments


def attend_cached(
    q: Queries,
    seen: Entries,
    *,
    tokens: Int[Array, 't'],
    places: Int[Array, 's'],
    segments: Segments,
    window: int | None = None,
    temperature: Float[Array, 'b t h'] | None = None,
    implementation: str | None = None,
) -> Heads:
    """Returns causal softmax attention of queries at `tokens` of the stream to entries at `places`, as of `extend`."""
    mask = visible(tokens, places, window=window)[None, None]
    return pallas_kernels.attention(
        q,
        jnp.swapaxes(seen.keys, 1, 2).astype(q.dtype),
        jnp.swapaxes(seen.values, 1, 2).astype(q.dtype),
        causal=False,
        segments=(segments, seen.segments),
        bias=jnp.where(mask, jnp.zeros((), jnp.promote_types(q.dtype, jnp.float32)), -jnp.inf),
        temperature=temperature,
        implementation=implementation,
    )
