"""The Pallas form of `delta_rule` for TPUs: the passes of `matrix_state.mosaic_tpu.rule`."""

import functools
from collections.abc import Callable

import jax

from pallas_kernels import cost
from pallas_kernels.delta_rule import erasing, vjp
from pallas_kernels.delta_rule.chunk import Chunk, step
from pallas_kernels.diagonal_low_rank.mosaic_tpu import form as diagonal_low_rank
from pallas_kernels.matrix_state.differentiation import Outputs
from pallas_kernels.matrix_state.mosaic_tpu.plan import solved_refusal as refusal
from pallas_kernels.matrix_state.mosaic_tpu.rule import Rule, Steps, passes
from pallas_kernels.matrix_state.products import Form
from pallas_kernels.target import Target

__all__ = ['form', 'refusal', 'with_erase']


@functools.lru_cache
def form(here: Target) -> Callable[..., Outputs]:
    """The differentiable form for a device."""
    return vjp.differentiable(passes(here, Rule('delta_rule', lambda vectors: cost.delta_rule, _step)))


@functools.lru_cache
def with_erase(here: Target) -> Callable[..., Outputs]:
    """The differentiable form with erase keys of their own."""
    return erasing.by_kernels(diagonal_low_rank(here))


def _step(
    steps: Steps, runs: jax.Array | None, form: Form, solved: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    (beta,) = steps.numbers
    return step(Chunk(steps.q, steps.k, beta, steps.log_decay, runs), steps.v, steps.state, form, solved)
