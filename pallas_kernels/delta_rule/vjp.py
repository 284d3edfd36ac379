"""The Pallas forms of `delta_rule` on the arguments of its definition, differentiable."""

from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels.matrix_state import differentiation
from pallas_kernels.matrix_state.differentiation import Outputs, Passes


def differentiable(passes: Passes, heads_axis: int = 1) -> Callable[..., Outputs]:
    """Returns the form on the arguments of `reference.delta_rule`: beta is what steps have besides."""
    run = differentiation.differentiable(passes, heads_axis)

    def delta_rule(q: jax.Array, k: jax.Array, v: jax.Array, beta: jax.Array, *others: Any) -> Outputs:
        return run(q, k, v, (), (beta,), *others)

    return delta_rule
