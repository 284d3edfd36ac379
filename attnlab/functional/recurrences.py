"""Parts shared by recurrences: starts of documents, the state carried from chunk to chunk, a map rectified in part."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int, Shaped

from attnlab.typing import Segments

NOTHING = -1
"""The last segment of a stream before its first token; documents are numbered from 1, and 0 is padding."""


def no_segment(batch: int) -> Int[Array, ' b']:
    """The last segment of `batch` new streams."""
    return jnp.full((batch,), NOTHING, jnp.int32)


def document_starts(segments: Segments, last: Int[Array, ' b'] | None = None) -> Bool[Array, 'b t']:
    """Returns which tokens are the first of their document: those whose segment differs from the previous token's.

    `last` is the segment of the token before the chunk; without it the first token of the chunk is a start.
    """
    return segments != of_token_before(segments, last, nothing=NOTHING)


def of_token_before(
    x: Shaped[Array, 'b t ...'], last: Shaped[Array, 'b ...'] | None, *, nothing: int = 0
) -> Shaped[Array, 'b t ...']:
    """What `x` was one token earlier; at the first token `last`, or `nothing` where that is `None`.

    By padding: where time is divided over devices, they exchange the edge, and would turn rows for a concatenation.
    """
    if last is None:
        return jnp.pad(x, ((0, 0), (1, 0)) + ((0, 0),) * (x.ndim - 2), constant_values=nothing)[:, :-1]
    return jnp.concatenate([last[:, None].astype(x.dtype), x[:, :-1]], axis=1)


def carried(state: Float[Array, 'b ...'], segments: Segments, last: Int[Array, ' b']) -> Float[Array, 'b ...']:
    """The initial state of a chunk: `state` where the chunk's first token is of segment `last`, zeros elsewhere."""
    same = (segments[:, 0] == last).reshape((-1,) + (1,) * (state.ndim - 1))
    return jnp.where(same, state, jnp.zeros_like(state))


def almost_linear(
    state: Float[Array, 'b n'], diagonal: Float[Array, ' n'], recurrent: Float[Array, 'n n'], linear: int
) -> Float[Array, 'b n']:
    """`a z + f(z) W`, where `f` rectifies all units but the first `linear`, in the type of the state.

    Brenner et al. 2024, https://arxiv.org/abs/2410.14240.
    """
    rectified = jnp.concatenate([state[:, :linear], jax.nn.relu(state[:, linear:])], axis=1)
    return diagonal[None] * state + jnp.matmul(rectified, recurrent, precision='highest')
