"""The Pallas form of `diagonal_low_rank` for TPUs: the passes of `matrix_state.mosaic_tpu.rule`."""

import functools
from collections.abc import Callable

import jax

from pallas_kernels import cost
from pallas_kernels.diagonal_low_rank import vjp
from pallas_kernels.diagonal_low_rank.chunk import Chunk
from pallas_kernels.diagonal_low_rank.step import step
from pallas_kernels.matrix_state.differentiation import Outputs
from pallas_kernels.matrix_state.mosaic_tpu.plan import solved_refusal as refusal
from pallas_kernels.matrix_state.mosaic_tpu.rule import Rule, Steps, passes
from pallas_kernels.matrix_state.products import Form
from pallas_kernels.target import Target

__all__ = ['form', 'refusal']


@functools.lru_cache
def form(here: Target) -> Callable[..., Outputs]:
    """The differentiable form for a device."""
    return vjp.differentiable(passes(here, Rule('diagonal_low_rank', _cost, _step)))


def _cost(vectors: int) -> Callable[..., cost.CallCost]:
    """Vectors besides q and k are a, and b where the keys under which its reads are written are not k."""
    return functools.partial(cost.diagonal_low_rank, keys=vectors)


def _step(
    steps: Steps, runs: jax.Array | None, form: Form, solved: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    a, *others = steps.vectors
    return step(Chunk(steps.q, a, (*others, steps.k), steps.log_decay, runs), steps.v, steps.state, form, solved)
