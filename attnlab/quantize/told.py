"""What layers tell of batches: sums that a quantization, or the curvature of a loss, is made from."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from attnlab.tasks.task import Batch
from attnlab.train.setup import Setup


def derivative_of(setup: Setup, model: Any, kind: type[nnx.Variable]) -> tuple[nnx.State, Callable[[Batch], nnx.State]]:
    """The variables of a kind, and a compiled function that gives the derivative of a batch's loss by them."""
    graphdef, variables, rest = nnx.split(model, kind, ...)  # type: ignore[misc]

    @setup.jit
    def of(variables: nnx.State, rest: nnx.State, batch: Batch) -> nnx.State:
        def loss(variables: nnx.State) -> Array:
            return setup.task.measure(nnx.merge(graphdef, variables, rest), batch, None)['loss'].total

        return jax.grad(loss)(variables)

    return variables, functools.partial(of, variables, rest)


def tell(setup: Setup, model: Any, kind: type[nnx.Variable], batches: Iterable[Batch]) -> None:
    """Sets the variables of a kind, zeros, to what layers tell of batches in them (`attnlab.functional.measured`).

    Sums over batches are in float64, and are rounded once to the types of the variables.
    """
    zeros, told_of = derivative_of(setup, model, kind)
    total = jax.tree.map(lambda leaf: np.zeros(leaf.shape), zeros)
    for batch in batches:
        total = jax.tree.map(lambda one, other: one + np.asarray(other, np.float64), total, told_of(batch))
    nnx.update(model, jax.tree.map(lambda zero, sums: jnp.asarray(sums, zero.dtype), zeros, total))
