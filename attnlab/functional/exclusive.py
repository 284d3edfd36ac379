"""Linear attention whose queries read the memory before their own token is written."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from attnlab.functional import cores
from attnlab.functional.precision import wide_dtype
from attnlab.functional.recomputed import recomputed
from attnlab.functional.recurrences import document_starts, of_token_before
from attnlab.typing import Heads, Keys, Queries, Segments, Values


def exclusive_linear_attention(
    q: Queries,
    k: Keys,
    v: Values,
    log_decay: Float[Array, 'b t h k'],
    bonus: Float[Array, 'h k'],
    *,
    state: Float[Array, 'b h k v'] | None = None,
    segments: Segments | None = None,
    implementation: str | None = None,
) -> tuple[Heads, Float[Array, 'b h k v']]:
    """Returns `S_{t-1}^T q_t + (q_t . u k_t) v_t` and the last S of `S_t = diag(exp(log_decay_t)) S_{t-1} + k_t v_t^T`.

    `u` is the `bonus` of a token for itself. The reads are those of a run whose writes and decays come a step later:
    its S after step t is `S_{t-1}`. As many heads of queries, keys and values.
    Peng et al. 2024, https://arxiv.org/abs/2404.05892.
    """
    late_k, late_v, late_decay = (of_token_before(each, None) for each in (k, v, log_decay))
    if segments is not None:
        starts = document_starts(segments)[..., None, None]
        # Decays too: rounding would give those of the document before a gradient.
        late_k, late_decay = (jnp.where(starts, jnp.zeros_like(each), each) for each in (late_k, late_decay))
    core = {'scale': 1.0, 'state': state, 'segments': segments, 'implementation': implementation}
    y, before = cores.linear_attention(q, late_k, late_v, late_decay, **core)
    last_k, last_v = k[:, -1].astype(before.dtype), v[:, -1].astype(before.dtype)
    after = jnp.exp(log_decay[:, -1])[..., None] * before + last_k[..., None] * last_v[..., None, :]
    return y + own_read(q, k, v, bonus), after


@recomputed
def own_read(q: Queries, k: Keys, v: Values, bonus: Float[Array, 'h k']) -> Heads:
    """Returns `(q_t . u k_t) v_t`, what a token reads of itself; `u` is the `bonus`."""
    wide = wide_dtype(v.dtype)
    own = jnp.sum((q * k).astype(wide) * bonus.astype(wide)[None, None], axis=-1, keepdims=True)
    return own.astype(v.dtype) * v
