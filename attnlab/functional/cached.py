"""Attention of new queries to what a cache holds."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from attnlab.functional import cores
from attnlab.functional.cache import Entries
from attnlab.functional.masks import visible
from attnlab.typing import Heads, Queries, Segments
from pallas_kernels import Softmax, WeightMap


def attend_cached(
    q: Queries,
    seen: Entries,
    *,
    tokens: Int[Array, 't'],
    places: Int[Array, 's'],
    segments: Segments,
    weights: WeightMap = Softmax(),
    scale: float | None = None,
    window: int | None = None,
    sinks: int = 0,
    bias: Float[Array, '#b #h t s'] | None = None,
    temperature: Float[Array, 'b t h'] | None = None,
    sink_scores: Float[Array, 'h'] | None = None,
    implementation: str | None = None,
) -> Heads:
    """Returns causal attention of queries at `tokens` of the stream to entries at `places`, as of `extend`.

    `window` and `sinks` are those of `visible`; the rest is handed to `cores.attention`.
    """
    added = jnp.zeros((1, 1, 1, 1), jnp.promote_types(q.dtype, jnp.float32)) if bias is None else bias
    mask = visible(tokens, places, window=window, sinks=sinks)[None, None]
    return cores.attention(
        q,
        jnp.swapaxes(seen.keys, 1, 2).astype(q.dtype),
        jnp.swapaxes(seen.values, 1, 2).astype(q.dtype),
        weights=weights,
        scale=scale,
        causal=False,
        segments=(segments, seen.segments),
        # Minus infinity where hidden, so that the core and every weight map serve the cache as it is.
        bias=jnp.where(mask, added, -jnp.inf),
        temperature=temperature,
        sink_scores=sink_scores,
        implementation=implementation,
    )
