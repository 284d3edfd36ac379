"""The train state: parameters, their average, optimiser state, step, and buffers. All else follows from the config."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from attnlab.nn.parameter import Buffer
from attnlab.random import key_for


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The state of a run: a tree of arrays, or of their shapes or shardings.

    Attributes:
      params: parameters, float32.
      opt_state: the state of the optax transformation.
      step: number of updates made, int32.
      buffers: the model's other variables, which are not trained (see `attnlab.nn.parameter.Buffer`).
      average: the moving average of the parameters (`attnlab.train.average`), of the same structure; empty where the
        optimiser keeps none.
    """

    params: nnx.State
    opt_state: Any
    step: Any
    buffers: nnx.State = dataclasses.field(default_factory=lambda: nnx.State({}))
    average: nnx.State = dataclasses.field(default_factory=lambda: nnx.State({}))

    @property
    def variables(self) -> nnx.State:
        """Parameters and buffers, as `nnx.merge` takes them."""
        return joined(self.params, self.buffers)

    @property
    def averaged_variables(self) -> nnx.State | None:
        """The average in the place of the parameters, and buffers; `None` where there is no average."""
        return joined(self.average, self.buffers) if jax.tree.leaves(self.average) else None


def split(model: nnx.Module) -> tuple[nnx.GraphDef, nnx.State, nnx.State]:
    """The model's structure, its parameters, and its buffers. Raises TypeError for any other variable."""
    graphdef, params, buffers, rest = nnx.split(model, nnx.Param, Buffer, ...)  # type: ignore[misc]
    if jax.tree.leaves(rest):
        raise TypeError(f'the model holds variables that are neither parameters nor buffers, which are lost: {rest}')
    return graphdef, params, buffers


def joined(params: nnx.State, buffers: nnx.State) -> nnx.State:
    """All variables of a model."""
    return nnx.merge_state(params, buffers)


def initialize(
    make_model: Callable[[nnx.Rngs], nnx.Module],
    transform: optax.GradientTransformation,
    seed: int | jax.Array,
    *,
    average: bool = False,
) -> TrainState:
    """The state before the first step, a pure function of the seed; the average, if there is one, is zeros."""
    _, params, buffers = split(make_model(nnx.Rngs(params=key_for(seed, 0, 'init'))))
    zeros = jax.tree.map(jnp.zeros_like, params) if average else nnx.State({})
    return TrainState(params, transform.init(params), jnp.int32(0), buffers, zeros)


def abstract_model(make_model: Callable[[nnx.Rngs], nnx.Module]) -> nnx.Module:
    """The model with shapes in place of arrays."""
    return nnx.eval_shape(lambda: make_model(nnx.Rngs(params=jax.random.key(0))))
