"""A linear head fused with the cross-entropy loss."""

import functools

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
      The loss, `n`, in float32 at least; under `jax.jit` NaN where there is no such class, which is an error under
      `jax.experimental.checkify`.

    Raises:
      ValueError: for shapes that do not fit, labels beyond the classes, or a `soft_cap` that is not positive.
      TypeError: for arrays that are not floating point, non-integer `labels`, or a traced `z_loss` or `soft_cap`.
      NotImplementedError: for a named implementation that cannot serve the call.
    """
    arguments.match(CORE, {}, hidden=(hidden, 'n d'), embedding=(embedding, 'o d'), labels=(labels, 'n'))
    arguments.check_floating(CORE, hidden=hidden, embedding=embedding)
    arguments.check_integer(CORE, labels=labels)
    if soft_cap is not None and soft_cap <= 0:
        raise ValueError(f'{CORE}: soft_cap is {soft_cap}; expected a positive number, or None')

    o = embedding.shape[0]
    labels = arguments.class_numbers(labels)
    arguments.check_classes(CORE, labels, o)
    labels = jnp.where(labels < -o, o, jnp.where(labels < 0, labels + o, labels))

    here = target.current()
    candidates = {
        'reference': dispatch.Candidate(reference.cross_entropy),
        'xla': dispatch.Candidate(xla.cross_entropy),
        'mosaic_gpu': dispatch.kernel(CORE, 'mosaic_gpu', here, hidden, embedding),
        'mosaic_tpu': dispatch.kernel(CORE, 'mosaic_tpu', here, hidden, embedding),
    }
    (n, d), itemsize = hidden.shape, jnp.result_type(hidden, embedding).itemsize
    size = functools.partial(cost.cross_entropy, n=n, d=d, o=o, itemsize=itemsize)
    run = dispatch.select(CORE, implementation, candidates, size)
    return run(hidden, embedding, labels, z_loss=z_loss, soft_cap=soft_cap)
