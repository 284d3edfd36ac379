"""Which key a query may see, where that is decided token by token."""

from jax import Array
from jaxtyping import Bool, Int


def visible(
    query_index: Int[Array, 't'],
    key_index: Int[Array, 's'],
    query_segments: Int[Array, 'b t'],
    key_segments: Int[Array, 'b s'],
    *,
    window: int | None = None,
    sinks: int = 0,
) -> Bool[Array, 'b t s']:
    """Tells which keys each query sees under a causal mask.

    A key is seen when it is no later than the query, in the same segment, and either among the last `window` keys, the
    query's own included, or among the first `sinks` of the stream. A negative key index is an empty slot.
    """
    distance = query_index[:, None] - key_index[None, :]
    seen = (key_index[None, :] >= 0) & (distance >= 0)
    if window is not None:
        seen &= (distance < window) | (key_index[None, :] < sinks)
    return seen[None] & (query_segments[:, :, None] == key_segments[:, None, :])
