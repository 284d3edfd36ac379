"""Rows of training that a quantization is calibrated on, and what layers tell on them."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from attnlab.errors import UserError
from attnlab.tasks.task import Batch
from attnlab.train.setup import Setup


def training_rows(setup: Setup, rows: int, at_once: int = 1) -> list[Batch]:
    """The first rows of training, in batches of `at_once`; raises `UserError` where there are fewer."""
    source = setup.task.source('train', setup.length)
    if rows > len(source):
        raise UserError(f'{rows} rows are asked for; training has {len(source)} of {setup.length} tokens')
    found = [source[index] for index in range(rows)]
    return [
        {name: np.stack([row[name] for row in found[start : start + at_once]]) for name in found[0]}
        for start in range(0, rows, at_once)
    ]


def tell(setup: Setup, model: Any, kind: type[nnx.Variable], batches: Iterable[Batch]) -> None:
    """Sets the variables of a kind, zeros, to what layers tell of batches in them (`attnlab.functional.measured`).

    Sums over batches are in float64.
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
    nnx.update(model, total)
