"""The delta rule with no, scalar or vector decay."""

import jax
import jax.numpy as jnp

from pallas_kernels import arguments, dispatch, packing, precision, target
from pallas_kernels.delta_rule import reference, xla

CORE = 'delta_rule'


def delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    beta: jax.Array,
    log_decay: jax.Array | None = None,
    *,
    scale: float | None = None,
    state: jax.Array | None = None,
    segments: jax.Array | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Runs the linear recurrence that overwrites what its state holds for a key (Yang et al., 2024, arXiv 2406.06484;
    with decays Yang et al., 2025, arXiv 2412.06464; Kimi Team, 2025, arXiv 2510.26692).

    `S_t = (I - beta_t k_t k_t^T) diag(exp(log_decay_t)) S_{t-1} + beta_t k_t v_t^T`, `o_t = scale S_t^T q_t`, the past
    forgotten where a new document begins. The state decays before it is read for the key and written. Keys are used as
    given: the recurrence is stable for `beta |k|^2` from 0 to 2.

    Args:
      q: queries, `b t h k`.
      k: keys, `b t h k`, of length one as a rule.
      v: values, `b t h v`. Each of q, k and v may have fewer heads, a divisor of `h`: head i then reads group
        `i // (h / groups)`. `h` is the largest of the three.
      beta: how much of what the state holds for the key is replaced, `b t h`.
      log_decay: natural logarithm of the decay, at most 0 and finite: `b t h k`, `b t h`, or `h` for a constant per
        head; `None`: no decay.
      scale: factor of the queries; `None`: one over the square root of the key channels.
      state: S before the first step, `b h k v`; zero when `None`. It belongs to the segment of the first token.
      segments: document of every token, integers `b t`; `None`: one document a row.
      implementation: `None` chooses; see `dispatch.select`.

    Returns:
      o, `b t h v`, in the type of `v`, and the last S, `b h k v`, in float32 at least.

    Raises:
      ValueError: for shapes that do not fit.
      TypeError: for arrays that are not floating point, or non-integer `segments`.
      NotImplementedError: for a named implementation that cannot serve the call.
    """
    sizes = arguments.match(CORE, {}, q=(q, 'b t hq k'), k=(k, 'b t hk k'), v=(v, 'b t hv v'))
    heads = max(sizes['hq'], sizes['hk'], sizes['hv'])
    sizes = arguments.match(
        CORE, sizes | {'h': heads}, beta=(beta, 'b t h'), state=(state, 'b h k v'), segments=(segments, 'b t')
    )
    for name, array in (('q', q), ('k', k), ('v', v)):
        arguments.check_multiple(CORE, name, array.shape[2], heads, 'the call')
    arguments.check_floating(CORE, q=q, k=k, v=v, beta=beta, log_decay=log_decay, state=state)
    arguments.check_integer(CORE, segments=segments)

    dtype = precision.accumulator(q, k, v, beta, log_decay, state)
    log_decay = _canonical_decay(log_decay, sizes, dtype)
    if state is None:
        state = jnp.zeros((sizes['b'], heads, sizes['k'], sizes['v']), dtype)
    starts = None if segments is None else packing.starts(segments)
    if scale is None:
        scale = sizes['k'] ** -0.5

    here = target.current()
    state = state.astype(dtype)
    candidates = {
        'reference': dispatch.Candidate(reference.delta_rule),
        'xla': dispatch.Candidate(xla.delta_rule),
        'mosaic_gpu': dispatch.kernel(CORE, 'mosaic_gpu', here, q, k, v, log_decay, state),
        'mosaic_tpu': dispatch.kernel(CORE, 'mosaic_tpu', here, k, v, state),
    }
    run = dispatch.select(CORE, implementation, candidates)
    o, final = run(q, k, v, beta.astype(dtype), log_decay, state, starts, scale)
    return o.astype(v.dtype), final


def _canonical_decay(log_decay: jax.Array | None, sizes: dict[str, int], dtype: jnp.dtype) -> jax.Array | None:
    """The log decays as `b t h k`, dimensions along which they are constant of size 1; `None` stays `None`."""
    if log_decay is None:
        return None
    if log_decay.ndim == 1:
        arguments.match(CORE, sizes, log_decay=(log_decay, 'h'))
        log_decay = log_decay[None, None, :, None]
    elif log_decay.ndim == 3:
        arguments.match(CORE, sizes, log_decay=(log_decay, 'b t h'))
        log_decay = log_decay[..., None]
    else:
        arguments.match(CORE, sizes, log_decay=(log_decay, 'b t h k'))
    return log_decay.astype(dtype)
