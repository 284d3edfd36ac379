"""The Pallas forms of `linear_attention` on the arguments of its definition, differentiable."""

from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels.matrix_state import differentiation
from pallas_kernels.matrix_state.differentiation import Outputs, Passes


def differentiable(passes: Passes, heads_axis: int = 1) -> Callable[..., Outputs]:
    """Returns the form on the arguments of `reference.linear_attention`, q not scaled, followed by the scale."""
    run = differentiation.differentiable(passes, heads_axis)

    def linear_attention(q: jax.Array, k: jax.Array, v: jax.Array, *others: Any) -> Outputs:
        return run(q, k, v, (), (), *others)

    return linear_attention
