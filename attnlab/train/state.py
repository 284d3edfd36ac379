"""What training changes: parameters, optimiser state, step. Everything else of a run is its config."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from attnlab.random import key_for


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The state of a run, all of it arrays, or what stands for arrays: shapes, shardings.

    Attributes:
      params: parameters, float32.
      opt_state: the state of the optax transformation.
      step: number of updates made, int32.
    """

    params: nnx.State
    opt_state: Any
    step: Any


def split(model: nnx.Module) -> tuple[nnx.GraphDef, nnx.State]:
    """The model's structure and its parameters. Raises TypeError for a model that holds anything else."""
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)  # type: ignore[misc]
    if jax.tree.leaves(rest):
        raise TypeError(f'the model holds variables that are not parameters, which a checkpoint would lose: {rest}')
    return graphdef, params


def initialize(
    make_model: Callable[[nnx.Rngs], nnx.Module], transform: optax.GradientTransformation, seed: int | jax.Array
) -> TrainState:
    """The state before the first step, a pure function of the seed."""
    _, params = split(make_model(nnx.Rngs(params=key_for(seed, 0, 'init'))))
    return TrainState(params, transform.init(params), jnp.int32(0))


def abstract_model(make_model: Callable[[nnx.Rngs], nnx.Module]) -> nnx.Module:
    """The model with shapes in place of arrays."""
    return nnx.eval_shape(lambda: make_model(nnx.Rngs(params=jax.random.key(0))))
