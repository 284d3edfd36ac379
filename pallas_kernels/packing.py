"""Packed documents in a recurrence.

Forms may forget by a decay of zero, and read what is hidden with a weight of zero. So documents do not see each other
as long as all is finite; what has overflowed in one may be NaN in the next, in some forms and not in others.
"""

import jax
import jax.numpy as jnp


def starts(segments: jax.Array, *, reverse: bool = False) -> jax.Array:
    """Marks the tokens, bool `b t`, at which a recurrence forgets what came before.

    Token `t` is marked where `segments[t] != segments[t-1]`; the first token is not, since the incoming state belongs
    to its segment. With `reverse` the recurrence runs from the last token to the first and the marks are mirrored.
    """
    change = segments[:, 1:] != segments[:, :-1]
    # A row without tokens has no first one.
    return jnp.pad(change, ((0, 0), (0, 1) if reverse else (1, 0)))[:, : segments.shape[1]]


def runs(segments: jax.Array) -> jax.Array:
    """Numbers the contiguous runs of equal segments from 0, int32 `b t`."""
    return jnp.cumsum(starts(segments), axis=1, dtype=jnp.int32)
