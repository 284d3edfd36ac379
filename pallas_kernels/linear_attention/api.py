"""Linear attention with no, scalar or vector decay."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import checkify

from pallas_kernels import arguments, dispatch, packing, precision, target
from pallas_kernels.linear_attention import reference, xla

CORE = 'linear_attention'

Form = Callable[..., tuple[jax.Array, jax.Array]]


def linear_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array | None = None,
    *,
    scale: float | None = None,
    state: jax.Array | None = None,
    segments: jax.Array | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Runs the matrix-valued linear recurrence over time (Katharopoulos et al., 2020, arXiv 2006.16236; with decays
    Sun et al., 2023, arXiv 2307.08621; Yang et al., 2024, arXiv 2312.06635; Dao and Gu, 2024, arXiv 2405.21060).

    `S_t = diag(exp(log_decay_t)) S_{t-1} + k_t v_t^T`, `o_t = scale S_t^T q_t`, the past forgotten where a new document
    begins. The decay acts on the past alone, never on the token's own write.

    Args:
      q: queries, `b t h k`.
      k: keys, `b t h k`.
      v: values, `b t h v`. Each of q, k and v may have fewer heads, a divisor of `h`: head i then reads group
        `i // (h / groups)`. `h` is the largest of the three.
      log_decay: natural logarithm of the decay, at most 0 and finite: `b t h k`, `b t h`, or `h` for a constant per
        head; `None`: no decay. One above 0 is an error under `jax.experimental.checkify`.
      scale: factor of the queries; `None`: one over the square root of the key channels.
      state: S before the first step, `b h k v`; zero when `None`. It belongs to the segment of the first token.
      segments: document of every token, integers `b t`; `None`: one document a row.
      implementation: `None` chooses; see `dispatch.select`.

    Returns:
      o, `b t h v`, in the type of `v`, and the last S, `b h k v`, in float32 at least.

    Raises:
      ValueError: for shapes that do not fit; where the reference is named, for log decays above 0, unless traced.
      TypeError: for arrays that are not floating point, or non-integer `segments`.
      NotImplementedError: for a named implementation that cannot serve the call.
    """
    sizes = arguments.match(CORE, {}, q=(q, 'b t hq k'), k=(k, 'b t hk k'), v=(v, 'b t hv v'))
    heads = max(sizes['hq'], sizes['hk'], sizes['hv'])
    sizes = arguments.match(CORE, sizes | {'h': heads}, state=(state, 'b h k v'), segments=(segments, 'b t'))
    for name, array in (('q', q), ('k', k), ('v', v)):
        arguments.check_multiple(CORE, name, array.shape[2], heads, 'the call')
    arguments.check_floating(CORE, q=q, k=k, v=v, log_decay=log_decay, state=state)
    arguments.check_integer(CORE, segments=segments)

    dtype = precision.accumulator(q, k, v, log_decay, state)
    log_decay = _canonical_decay(log_decay, sizes, dtype)
    _check_sign(log_decay, implementation)
    if state is None:
        state = jnp.zeros((sizes['b'], heads, sizes['k'], sizes['v']), dtype)
    starts = None if segments is None else packing.starts(segments)
    if scale is None:
        scale = sizes['k'] ** -0.5

    state = state.astype(dtype)
    here = target.current()
    candidates = {
        'reference': dispatch.Candidate(_in_one_type(reference.linear_attention)),
        'xla': dispatch.Candidate(_in_one_type(xla.linear_attention)),
        'mosaic_gpu': dispatch.kernel(CORE, 'mosaic_gpu', here, q, k, v, log_decay, state),
        'mosaic_tpu': dispatch.kernel(CORE, 'mosaic_tpu', here, k, v, state),
    }
    run = dispatch.select(CORE, implementation, candidates)
    o, final = run(q, k, v, log_decay, state, starts, scale)
    return o.astype(v.dtype), final


def _in_one_type(form: Form) -> Form:
    """Has a form compute in the type of the state, on scaled queries."""

    def run(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        log_decay: jax.Array | None,
        state: jax.Array,
        starts: jax.Array | None,
        scale: float,
    ) -> tuple[jax.Array, jax.Array]:
        dtype = state.dtype
        return form(q.astype(dtype) * scale, k.astype(dtype), v.astype(dtype), log_decay, state, starts)

    return run


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


def _check_sign(log_decay: jax.Array | None, implementation: str | None) -> None:
    """Complains of decays that let the past grow: chunks sum them up, and their exponentials overflow."""
    if log_decay is None or log_decay.size == 0:
        return
    highest = jnp.max(log_decay)
    if implementation == 'reference' and not isinstance(highest, jax.core.Tracer) and highest > 0:
        raise ValueError(f'{CORE}: log_decay has entries up to {highest}; expected at most 0')
    checkify.debug_check(
        highest <= 0, CORE + ': log_decay has entries up to {highest}; expected at most 0', highest=highest
    )
