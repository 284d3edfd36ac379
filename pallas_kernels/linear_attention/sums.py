"""What `linear_attention` reads of a value that is one: the sums of its weights, by which normalised forms divide."""

import jax
import jax.numpy as jnp

from pallas_kernels import arguments
from pallas_kernels.linear_scan.api import linear_scan
from pallas_kernels.matrix_state.arguments import canonical

CORE = 'linear_attention_sums'


@arguments.checked
def linear_attention_sums(
    q: jax.Array,
    k: jax.Array,
    log_decay: jax.Array | None = None,
    *,
    scale: float | None = None,
    state: jax.Array | None = None,
    segments: jax.Array | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Runs the normaliser of `linear_attention`: the sums of the weights of every row.

    `z_t = exp(log_decay_t) z_{t-1} + k_t`, `s_t = scale q_t . z_t`, the past forgotten where a document begins: what
    `linear_attention` gives for values that are one, and the column of its state. A column of ones beside 128 channels
    of values would ask kernels for a second tile of them; this is a call of `linear_scan`, whatever the values are
    (Katharopoulos et al., 2020, arXiv 2006.16236, equation 18).

    Args:
      q: queries, `b t h k`.
      k: keys, `b t h k`. Either may have fewer heads, as in `linear_attention`.
      log_decay: as in `linear_attention`.
      scale: factor of the queries; `None`: one over the square root of the key channels.
      state: z before the first step, `b h k`; zero when `None`.
      segments: document of every token, integers `b t`; `None`: one document a row.
      implementation: of `linear_scan`; `None` chooses.

    Returns:
      s, `b t h`, and the last z, `b h k`, both in float32 at least.

    Raises:
      ValueError: for shapes that do not fit; where the reference is named, for log decays above 0, unless traced.
      TypeError: for arrays that are not floating point, or non-integer `segments`.
      NotImplementedError: for a named implementation that cannot serve the call.
    """
    arguments.match(CORE, {}, q=(q, 'b t h k'), k=(k, 'b t g k'))
    # Of other ranks, which are no decays, `canonical` says so.
    own = log_decay.shape[min(2, log_decay.ndim - 1)] if log_decay is not None and log_decay.ndim in (1, 3, 4) else 1
    heads = max(q.shape[2], k.shape[2], own)
    column = None if state is None else state[..., None]
    # A value of one channel has all heads, and is not looked at.
    ones = jnp.ones((*q.shape[:2], heads, 1), k.dtype)
    call = canonical(CORE, q, k, ones, log_decay, scale, column, segments, implementation)
    q, k = (jnp.repeat(each.astype(call.dtype), heads // each.shape[2], axis=2) for each in (q, k))
    decay = jnp.ones((1, 1, 1, 1), call.dtype) if call.log_decay is None else jnp.exp(call.log_decay)
    rows, steps, *_ = decay.shape
    decay = jnp.broadcast_to(decay, (rows, steps, *k.shape[2:]))

    def flat(x: jax.Array) -> jax.Array:
        *others, h, k = x.shape
        return x.reshape(*others, h * k)

    z, last = linear_scan(
        flat(k), flat(decay), state=flat(call.state[..., 0]), segments=segments, implementation=implementation
    )
    return call.scale * jnp.sum(q * z.reshape(k.shape), axis=-1), last.reshape(call.state.shape[:3])
