"""Linear attention whose writes are weighted by exponentials, held in range by a running maximum."""

import functools

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float

from attnlab.functional.counted import counted_linear_attention
from attnlab.functional.precision import wide_dtype
from attnlab.functional.recomputed import recomputed
from attnlab.functional.recurrences import document_starts, of_token_before
from attnlab.typing import Heads, Keys, Queries, Segments, Values

NEVER = -1e30
"""The logarithm of what is nothing, finite so that sums of it have gradients."""


def running_maximum(log_forget: Float[Array, 'b t h'], log_input: Float[Array, 'b t h']) -> Float[Array, 'b t h']:
    """Returns `m_t = max(log_forget_t + m_{t-1}, log_input_t)`, from minus infinity on."""

    def join(first: tuple[Array, Array], second: tuple[Array, Array]) -> tuple[Array, Array]:
        return jnp.maximum(first[0] + second[0], NEVER), jnp.maximum(first[1] + second[0], second[1])

    return jax.lax.associative_scan(join, (log_forget, log_input), axis=1)[1]


def stabilised_linear_attention(
    q: Queries,
    k: Keys,
    v: Values,
    log_forget: Float[Array, 'b t h'],
    log_input: Float[Array, 'b t h'],
    *,
    state: tuple[Float[Array, 'b h k u'], Float[Array, 'b h']],
    continues: Bool[Array, ' b'],
    segments: Segments | None = None,
    eps: float = 1e-6,
    implementation: str | None = None,
) -> tuple[Heads, tuple[Float[Array, 'b h k u'], Float[Array, 'b h']]]:
    """Returns `h_t = C_t^T q_t / max(|n_t^T q_t|, 1)`, with queries over the square root of their channels, of

        C_t = f_t C_{t-1} + i_t k_t v_t^T        n_t = f_t n_{t-1} + i_t k_t

    for forget gates `f = exp(log_forget)` of at most 1 and input gates `i = exp(log_input)` of any size. C, and n as a
    last column, are held divided by `exp(m_t)`, `m` the running maximum: no exponent is above 0. `state` is that of
    the token before, divided memory and `m`; it counts where the row `continues`. `eps` is added to the divided
    denominator. As many heads of all.
    Beck et al. 2024, https://arxiv.org/abs/2405.04517.
    """
    memory, highest = state
    wide = wide_dtype(q.dtype)
    segments = jnp.ones(q.shape[:2], jnp.int32) if segments is None else segments
    starts = document_starts(segments).at[:, 0].set(~continues)[..., None]
    log_forget, log_input = (each.astype(wide) for each in (log_forget, log_input))
    keeps = jnp.where(starts, NEVER, log_forget)
    first = jnp.maximum(log_input[:, :1], keeps[:, :1] + highest[:, None])
    m = running_maximum(keeps, jnp.concatenate([first, log_input[:, 1:]], axis=1))
    # Where a document starts there is nothing to decay.
    decay = jnp.where(starts, 0, jnp.minimum(log_forget + of_token_before(m, highest) - m, 0))
    y, memory = counted_linear_attention(
        q,
        _weighted(k, log_input - m),
        v,
        decay,
        state=jnp.where(continues[:, None, None, None], memory, 0),
        segments=segments,
        implementation=implementation,
    )
    return recomputed(functools.partial(_over_floor, eps=eps))(y, m).astype(v.dtype), (memory, m[:, -1])


@recomputed
def _weighted(k: Keys, log_weight: Float[Array, 'b t h']) -> Keys:
    return (jnp.exp(log_weight)[..., None] * k).astype(k.dtype)


def _over_floor(y: Float[Array, 'b t h u'], m: Float[Array, 'b t h'], *, eps: float) -> Heads:
    """Reads over the absolute value of their last column, at least `exp(-m)`."""
    wide, scale = y.astype(m.dtype), jnp.exp(jnp.minimum(m, 0))[..., None]
    floor = jnp.exp(-jnp.maximum(m, 0))[..., None]
    read = scale * wide[..., :-1] / (jnp.maximum(jnp.abs(scale * wide[..., -1:]), floor) + eps)
    return read.astype(y.dtype)
