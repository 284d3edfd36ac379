"""What layers tell of batches: sums that a quantization, or the curvature of a loss, is made from."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from attnlab.tasks.task import Batch
from attnlab.train.setup import Setup


def tell(setup: Setup, model: Any, kind: type[nnx.Variable], batches: Iterable[Batch]) -> None:
    """Sets the variables of a kind, zeros, to what layers tell of batches in them (`attnlab.functional.measured`).

    Sums over batches are in float64, and are rounded once to the types of the variables.
    """
    graphdef, told, rest = nnx.split(model, kind, ...)  # type: ignore[misc]

    @setup.jit
    def of(told: nnx.State, rest: nnx.State, batch: Batch) -> nnx.State:
        def loss(told: nnx.State) -> Array:
            return setup.task.measure(nnx.merge(graphdef, told, rest), batch, None)['loss'].total

        return jax.grad(loss)(told)

    zeros = jax.tree.map(jnp.zeros_like, told)
    total = jax.tree.map(lambda leaf: np.zeros(leaf.shape), told)
    for batch in batches:
        total = jax.tree.map(lambda one, other: one + np.asarray(other, np.float64), total, of(zeros, rest, batch))
    nnx.update(model, jax.tree.map(lambda zero, sums: jnp.asarray(sums, zero.dtype), zeros, total))
