"""The delta rule with no, scalar or vector decay."""

import functools

import jax

from pallas_kernels import arguments, cost, dispatch, target
from pallas_kernels.arguments import checked
from pallas_kernels.delta_rule import reference, xla
from pallas_kernels.matrix_state.arguments import Canonical, canonical

CORE = 'delta_rule'


@checked
def delta_rule(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    beta: jax.Array,
    log_decay: jax.Array | None = None,
    *,
    erase: jax.Array | None = None,
    scale: float | None = None,
    state: jax.Array | None = None,
    segments: jax.Array | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Runs the linear recurrence that overwrites the value stored for a key (Yang et al., 2024, arXiv 2406.06484;
    with decays Yang et al., 2025, arXiv 2412.06464; Kimi Team, 2025, arXiv 2510.26692).

    `S_t = (I - beta_t k_t k_t^T) diag(exp(log_decay_t)) S_{t-1} + beta_t k_t v_t^T`, `o_t = scale S_t^T q_t`, the past
    forgotten where a new document begins. The state decays before it is read for the key and written. Keys are used as
    given: the recurrence is stable for `beta |k|^2` from 0 to 2.

    With an `erase` key e of its own it is `S_t = (I - beta_t k_t e_t^T) diag(exp(log_decay_t)) S_{t-1} + beta_t k_t
    v_t^T`: the state is read for e, and written under k. It is not a contraction then unless e lies along k.

    Args:
      q: queries, `b t h k`.
      k: keys, `b t h k`, usually of length one.
      v: values, `b t h v`. Each of q, k and v may have fewer heads, a divisor of `h`: head i then reads group
        `i // (h / groups)`. `h` is the largest of the three.
      beta: fraction of the stored value that is replaced, `b t h`.
      log_decay: natural logarithm of the decay, at most 0 and finite: `b t h k`, `b t h`, or `h` for a constant per
        head; `None`: no decay. One above 0 is an error inside of `checking_values`.
      erase: the keys that the state is read for, `b t h k`, heads as of k; `None`: k.
      scale: factor of the queries; `None`: one over the square root of the key channels.
      state: S before the first step, `b h k v`; zero when `None`. It belongs to the segment of the first token.
      segments: document of every token, integers `b t`; `None`: one document a row.
      implementation: `None` chooses; see `dispatch.select`.

    Returns:
      o, `b t h v`, in the type of `v`, and the last S, `b h k v`, in float32 at least.

    Raises:
      ValueError: for shapes that do not fit; where the reference is named, for log decays above 0, unless traced.
      TypeError: for arrays that are not floating point, non-integer `segments`, or a traced `scale`.
      NotImplementedError: for a named implementation that cannot serve the call.
    """
    call = canonical(CORE, q, k, v, log_decay, scale, state, segments, implementation, beta=beta)
    candidates = _candidates(q, k, v, call) if erase is None else _with_erase(q, k, v, erase, call)
    of = functools.partial(cost.delta_rule, erase=erase is not None)
    run = dispatch.select(CORE, implementation, candidates, call.cost(of, v))
    given = (q, k, v, beta.astype(call.dtype), call.log_decay, call.state, call.starts, call.scale)
    o, final = run(*given) if erase is None else run(*given, erase)
    return o.astype(v.dtype), final


def _candidates(q: jax.Array, k: jax.Array, v: jax.Array, call: Canonical) -> dict[str, dispatch.Candidate]:
    here = target.current()
    return {
        'reference': dispatch.Candidate(reference.delta_rule),
        'xla': dispatch.Candidate(xla.delta_rule),
        'mosaic_gpu': dispatch.kernel(CORE, 'mosaic_gpu', here, q, k, v, call.log_decay, call.state),
        'mosaic_tpu': dispatch.kernel(CORE, 'mosaic_tpu', here, k, v, call.state),
    }


def _with_erase(
    q: jax.Array, k: jax.Array, v: jax.Array, erase: jax.Array, call: Canonical
) -> dict[str, dispatch.Candidate]:
    """Raises as `delta_rule` for an `erase` that does not fit."""
    arguments.match(CORE, call.sizes, erase=(erase, 'b t he k'))
    arguments.check_multiple(CORE, 'erase', erase.shape[2], call.sizes['h'], 'the call')
    arguments.check_floating(CORE, erase=erase)
    here = target.current()
    kernel = functools.partial(dispatch.kernel, made_by='with_erase')
    return {
        'reference': dispatch.Candidate(reference.delta_rule),
        'xla': dispatch.Candidate(xla.delta_rule),
        'mosaic_gpu': kernel(CORE, 'mosaic_gpu', here, q, k, v, call.log_decay, call.state, erase),
        'mosaic_tpu': kernel(CORE, 'mosaic_tpu', here, k, v, call.state),
    }
