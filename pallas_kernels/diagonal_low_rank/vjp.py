"""The Pallas forms of `diagonal_low_rank` on the arguments of its definition, differentiable."""

from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels.matrix_state import differentiation
from pallas_kernels.matrix_state.differentiation import Outputs, Passes


def differentiable(passes: Passes, heads_axis: int = 1) -> Callable[..., Outputs]:
    """Returns the form on the arguments of `reference.diagonal_low_rank`: a and b are what key channels have besides.

    Where b is `None`, and k serves in its place, the form is given a alone.
    """
    run = differentiation.differentiable(passes, heads_axis)

    def diagonal_low_rank(
        q: jax.Array, k: jax.Array, v: jax.Array, a: jax.Array, b: jax.Array | None, *others: Any
    ) -> Outputs:
        return run(q, k, v, (a,) if b is None else (a, b), (), *others)

    return diagonal_low_rank
