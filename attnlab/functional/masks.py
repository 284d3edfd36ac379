"""Which key a query may see, where that is decided token by token."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Int


def visible(
    queries: Int[Array, 't'], keys: Int[Array, 's'], *, window: int | None = None, sinks: int = 0
) -> Bool[Array, 't s']:
    """Tells which keys each query sees under a causal mask, both given by their places in the stream.

    A key is seen when it is no later than the query, and either among the last `window` keys, the query's own included,
    or among the first `sinks` of the stream. A negative place is an empty slot.
    """
    distance = queries[:, None] - keys[None, :]
    seen = (keys[None, :] >= 0) & (distance >= 0)
    if window is not None:
        seen &= (distance < window) | (keys[None, :] < sinks)
    return seen


def reachable(length: int, *, causal: bool, window: int | None = None, sinks: int = 0) -> Bool[Array, 't s']:
    """Tells which keys each query of a row sees, of as many keys as queries; both ways where not causal."""
    places = jnp.arange(length, dtype=jnp.int32)
    seen = visible(places, places, window=window, sinks=sinks)
    return seen if causal else seen | visible(places[::-1], places[::-1], window=window)
