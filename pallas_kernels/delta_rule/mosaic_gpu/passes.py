"""The Pallas forms of `delta_rule` for Hopper GPUs.

With one decay a head and step, or none, they are the passes of `scalar`, with decays of key channels those of
`channels`. With erase keys of their own they are those of `diagonal_low_rank`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels.delta_rule import erasing, vjp
from pallas_kernels.delta_rule.mosaic_gpu import channels, chunks, scalar
from pallas_kernels.diagonal_low_rank.mosaic_gpu.passes import form as diagonal_low_rank
from pallas_kernels.matrix_state.differentiation import Outputs, Passes
from pallas_kernels.matrix_state.mosaic_gpu.refusal import of_columns
from pallas_kernels.matrix_state.mosaic_gpu.tiles import TIME_FIRST
from pallas_kernels.target import Target


def refusal(
    here: Target,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array | None,
    state: jax.Array,
    *erase: jax.Array,
) -> str | None:
    """The reason why the call cannot be served, or `None`; with keys that erase, where these are its own."""
    if not erase and not _of_channels(log_decay) and state.shape[3] > chunks.MOST:
        expected = f'at most {chunks.MOST} with one decay a head, as one program holds all of a chunk'
        return f'v has {state.shape[3]} channels; expected {expected}'
    return of_columns(here, q, k, v, log_decay, state, *erase)


@functools.lru_cache
def form(here: Target) -> Callable[..., Outputs]:
    """The differentiable form for a device."""
    of_steps, of_channels = (
        vjp.differentiable(
            Passes(functools.partial(each.forward, here), functools.partial(each.backward, here)), TIME_FIRST.heads
        )
        for each in (scalar, channels)
    )

    def delta_rule(q: jax.Array, k: jax.Array, v: jax.Array, beta: jax.Array, log_decay: Any, *others: Any) -> Outputs:
        run = of_channels if _of_channels(log_decay) else of_steps
        return run(q, k, v, beta, log_decay, *others)

    return delta_rule


@functools.lru_cache
def with_erase(here: Target) -> Callable[..., Outputs]:
    """The differentiable form with erase keys of their own."""
    return erasing.by_kernels(diagonal_low_rank(here))


def _of_channels(log_decay: jax.Array | None) -> bool:
    return log_decay is not None and log_decay.shape[3] > 1
