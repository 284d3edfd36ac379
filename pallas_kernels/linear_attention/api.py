"""Linear attention with no, scalar or vector decay, and its memory read from the other side."""

from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels import arguments as checks
from pallas_kernels import cost, dispatch, target
from pallas_kernels.arguments import checked
from pallas_kernels.linear_attention import reference, xla
from pallas_kernels.matrix_state import arguments

CORE = 'linear_attention'
ROWS = 'linear_attention_rows'

Form = Callable[..., tuple[jax.Array, jax.Array]]


@checked
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
    begins. The decay acts only on the past, not on the token's own write.

    Args:
      q: queries, `b t h k`.
      k: keys, `b t h k`.
      v: values, `b t h v`. Each of q, k and v may have fewer heads, a divisor of `h`: head i then reads group
        `i // (h / groups)`. `h` is the largest of the three.
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
    call = arguments.canonical(CORE, q, k, v, log_decay, scale, state, segments, implementation)
    here = target.current()
    candidates = {
        'reference': dispatch.Candidate(_in_one_type(reference.linear_attention)),
        'xla': dispatch.Candidate(xla.linear_attention),
        'mosaic_gpu': dispatch.kernel(CORE, 'mosaic_gpu', here, q, k, v, call.log_decay, call.state),
        'mosaic_tpu': dispatch.kernel(CORE, 'mosaic_tpu', here, k, v, call.log_decay, call.state),
    }
    run = dispatch.select(CORE, implementation, candidates, call.cost(cost.linear_attention, v))
    o, final = run(q, k, v, call.log_decay, call.state, call.starts, call.scale)
    return o.astype(v.dtype), final


@checked
def linear_attention_rows(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array,
    *,
    scale: float | None = None,
    state: jax.Array | None = None,
    segments: jax.Array | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Runs the recurrence of `linear_attention` and reads its rows: `o_t = scale S_t q_t`, one number a key channel.

    `S_t = diag(exp(log_decay_t)) S_{t-1} + k_t v_t^T`. Where rows are slots, each with a decay of its own, these are
    their scores (Zhang et al., 2024, arXiv 2409.07146): products of queries and values serve all rows, where a call of
    `linear_attention` for every slot would weigh each by all decays between two steps.

    Args:
      q: queries, `b t h v`.
      k: keys, `b t h k`.
      v: values, `b t h v`.
      log_decay: as in `linear_attention`, of every key channel: `b t h k`.
      scale: factor of the queries; `None`: one over the square root of their channels.
      state: S before the first step, `b h k v`; zero when `None`.
      segments: document of every token, integers `b t`; `None`: one document a row.
      implementation: 'xla' or 'reference'; `None`: the former.

    Returns:
      o, `b t h k`, and the last S, `b h k v`, both in float32 at least.

    Raises:
      ValueError: for shapes that do not fit; where the reference is named, for log decays above 0, unless traced.
      TypeError: for arrays that are not floating point, non-integer `segments`, or a traced `scale`.
      NotImplementedError: for a named kernel; none reads rows.
    """
    memory: Any = {'q': (q, 'b t h v'), 'k': (k, 'b t h k'), 'v': (v, 'b t h v'), 'log_decay': (log_decay, 'b t h k')}
    sizes = checks.match(ROWS, {}, **memory)
    checks.check_floating(ROWS, q=q)
    scale = sizes['v'] ** -0.5 if scale is None else scale
    # A stand-in for queries, of the keys' shape: those of rows have the channels of values.
    call = arguments.canonical(ROWS, k, k, v, log_decay, scale, state, segments, implementation)
    candidates = {
        'reference': dispatch.Candidate(_in_one_type(reference.linear_attention_rows)),
        'xla': dispatch.Candidate(xla.linear_attention_rows),
    }
    run = dispatch.select(ROWS, implementation, candidates, call.cost(cost.linear_attention, v))
    return run(q, k, v, call.log_decay, call.state, call.starts, call.scale)


def _in_one_type(form: Form) -> Form:
    """Makes a form compute in the type of the state, on scaled queries."""

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
