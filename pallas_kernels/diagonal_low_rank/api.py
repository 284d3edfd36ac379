"""The recurrence whose state is multiplied by a diagonal matrix plus one of rank one."""

import functools

import jax

from pallas_kernels import arguments, cost, dispatch, target
from pallas_kernels.diagonal_low_rank import reference, xla
from pallas_kernels.matrix_state.arguments import canonical

CORE = 'diagonal_low_rank'


@arguments.checked
def diagonal_low_rank(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    a: jax.Array,
    b: jax.Array | None = None,
    log_decay: jax.Array | None = None,
    *,
    scale: float | None = None,
    state: jax.Array | None = None,
    segments: jax.Array | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Runs the linear recurrence with a diagonal and a low-rank part (Peng et al., 2025, arXiv 2503.14456).

    `S_t = (diag(exp(log_decay_t)) + b_t a_t^T) S_{t-1} + k_t v_t^T`, `o_t = scale S_t^T q_t`, the past forgotten where
    a new document begins. The state is read for `a` before it decays. Vectors are used as given: with `b = -c a`,
    `|a| = 1` and no decay, the recurrence is stable for `c` from 0 to 2. The delta rule is
    `a = -beta exp(log_decay) k`, `b = k` and values times beta.

    Args:
      q: queries, `b t h k`.
      k: keys, `b t h k`.
      v: values, `b t h v`.
      a: what the state is read for, `b t h k`. Each of q, k, v, a and b may have fewer heads, a divisor of `h`: head i
        then reads group `i // (h / groups)`. `h` is the largest of those of q, k and v.
      b: the keys under which what is read is written, `b t h k`; `None`: k, which takes half of the products.
      log_decay: natural logarithm of the decay, at most 0 and finite: `b t h k`, `b t h`, or `h` for a constant per
        head; `None`: no decay. One above 0 is an error inside of `checking_values`.
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
    call = canonical(CORE, q, k, v, log_decay, scale, state, segments, implementation)
    arguments.match(CORE, call.sizes, a=(a, 'b t ha k'), b=(b, 'b t hb k'))
    arguments.check_floating(CORE, a=a, b=b)
    for name, array in (('a', a), ('b', b)):
        if array is not None:
            arguments.check_multiple(CORE, name, array.shape[2], call.sizes['h'], 'the call')
    here, others = target.current(), (a,) if b is None else (a, b)
    candidates = {
        'reference': dispatch.Candidate(reference.diagonal_low_rank),
        'xla': dispatch.Candidate(xla.diagonal_low_rank),
        'mosaic_gpu': dispatch.kernel(CORE, 'mosaic_gpu', here, q, k, v, call.log_decay, call.state, *others),
        'mosaic_tpu': dispatch.kernel(CORE, 'mosaic_tpu', here, k, v, call.state),
    }
    of = functools.partial(cost.diagonal_low_rank, keys=1 if b is None else 2)
    run = dispatch.select(CORE, implementation, candidates, call.cost(of, v))
    o, final = run(q, k, v, a, b, call.log_decay, call.state, call.starts, call.scale)
    return o.astype(v.dtype), final
