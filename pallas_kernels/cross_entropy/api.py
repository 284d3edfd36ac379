"""A linear head fused with the cross-entropy loss, and the part of it that some of the classes give."""

import functools
import math

import jax
import jax.numpy as jnp

from pallas_kernels import arguments, cost, dispatch, target
from pallas_kernels.cross_entropy import reference, xla

CORE = 'cross_entropy'


@arguments.checked
def cross_entropy(
    hidden: jax.Array,
    embedding: jax.Array,
    labels: jax.Array,
    *,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Returns the loss of a linear head for every token, in nats.

    `logits = hidden embedding^T`, capped to `soft_cap tanh(logits / soft_cap)` where that is given;
    `loss = log Z - logits[label] + z_loss (log Z)^2` with `Z` the sum of `exp(logits)`.

    Args:
      hidden: activations, `n d`.
      embedding: one row per class, `o d`.
      labels: class of every token, integers `n` of any type, from 0 to o - 1; negative ones count from the end.
      z_loss: weight of the squared log-normaliser (Chowdhery et al., 2022, arXiv 2204.02311).
      soft_cap: bound of the logits (Gemma team, 2024, arXiv 2408.00118); `None`: not bounded.
      implementation: `None` chooses; see `dispatch.select`.

    Returns:
      The loss, `n`, in float32 at least; under `jax.jit` NaN where there is no such class, which is an error inside
      of `checking_values`.

    Raises:
      ValueError: for shapes that do not fit, labels beyond the classes, or a `soft_cap` not positive and finite.
      TypeError: for arrays that are not floating point, non-integer `labels`, or a traced `z_loss` or `soft_cap`.
      NotImplementedError: for a named implementation that cannot serve the call.
    """
    _check(hidden, embedding, labels, soft_cap)
    o = embedding.shape[0]
    labels = arguments.class_numbers(labels)
    arguments.check_classes(CORE, labels, o)
    labels = jnp.where(labels < -o, o, jnp.where(labels < 0, labels + o, labels))
    log_normalizers, chosen = _statistics(hidden, embedding, labels, soft_cap, implementation)
    return log_normalizers - jnp.where(labels < o, chosen, jnp.nan) + z_loss * log_normalizers**2


@arguments.checked
def cross_entropy_part(
    hidden: jax.Array,
    embedding: jax.Array,
    labels: jax.Array,
    *,
    soft_cap: float | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns what some of the classes give to the loss of a linear head, for callers that have the others elsewhere.

    `log Z` of these classes, and `logits[label]`, 0 where the label is of another part: with all classes divided into
    parts p, `loss = logsumexp_p (log Z)_p - sum_p (logits[label])_p`. The gradient of the logits of a part is rounded
    once, as that of the loss is.

    Args:
      hidden: activations, `n d`.
      embedding: one row per class of the part, `o d`.
      labels: class of every token, integers `n`, counted from the first of the part: those below 0 or from o up are of
        other parts.
      soft_cap: as in `cross_entropy`.
      implementation: `None` chooses; see `dispatch.select`.

    Returns:
      Both, `n`, in float32 at least.

    Raises:
      ValueError: for shapes that do not fit, or a `soft_cap` that is not positive and finite.
      TypeError: for arrays that are not floating point, non-integer `labels`, or a traced `soft_cap`.
      NotImplementedError: for a named implementation that cannot serve the call.
    """
    _check(hidden, embedding, labels, soft_cap)
    labels, o = arguments.class_numbers(labels), embedding.shape[0]
    here = (labels >= 0) & (labels < o)
    log_normalizers, chosen = _statistics(hidden, embedding, jnp.where(here, labels, o), soft_cap, implementation)
    return log_normalizers, jnp.where(here, chosen, 0)


def _check(hidden: jax.Array, embedding: jax.Array, labels: jax.Array, soft_cap: float | None) -> None:
    arguments.match(CORE, {}, hidden=(hidden, 'n d'), embedding=(embedding, 'o d'), labels=(labels, 'n'))
    arguments.check_floating(CORE, hidden=hidden, embedding=embedding)
    arguments.check_integer(CORE, labels=labels)
    if soft_cap is not None and not 0 < soft_cap < math.inf:
        raise ValueError(f'{CORE}: soft_cap is {soft_cap}; expected a positive, finite number, or None')


def _statistics(
    hidden: jax.Array, embedding: jax.Array, labels: jax.Array, soft_cap: float | None, implementation: str | None
) -> tuple[jax.Array, jax.Array]:
    """See `reference.statistics`; labels from o up have no logit, and what is returned for it is not said."""
    here = target.current()
    candidates = {
        'reference': dispatch.Candidate(reference.statistics),
        'xla': dispatch.Candidate(xla.statistics),
        'mosaic_gpu': dispatch.kernel(CORE, 'mosaic_gpu', here, hidden, embedding),
        'mosaic_tpu': dispatch.kernel(CORE, 'mosaic_tpu', here, hidden, embedding),
    }
    (n, d), o, itemsize = hidden.shape, embedding.shape[0], jnp.result_type(hidden, embedding).itemsize
    size = functools.partial(cost.cross_entropy, n=n, d=d, o=o, itemsize=itemsize)
    run = dispatch.select(CORE, implementation, candidates, size)
    return run(hidden, embedding, labels, soft_cap=soft_cap)
