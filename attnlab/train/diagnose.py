"""Finds the origin of a non-finite number."""

import jax
import jax.numpy as jnp
from flax import nnx

from attnlab.tasks.given import given
from attnlab.tasks.task import Batch, Task
from attnlab.train.optimizer import named_parameters
from attnlab.train.state import TrainState, joined


def first_nonfinite(task: Task, graphdef: nnx.GraphDef, state: TrainState, batch: Batch) -> str:
    """Names the first non-finite value, in the order: parameters, buffers, outputs of modules, loss, gradients.

    Runs the model again, module by module, on the state and batch of the step that failed.
    """
    for kind, variables in (('parameter', state.params), ('buffer', state.buffers)):
        if bad := _bad_leaf(variables):
            return f'{kind} {bad}'
    model = nnx.merge(graphdef, state.variables)
    for stage in model.stages(*given(task, batch)):
        if not bool(jnp.all(jnp.isfinite(stage.value))):
            return f'output of {stage.name}'
    if not bool(jnp.isfinite(task.measure(model, batch, None)['loss'].total)):
        return 'loss'

    def loss(params: nnx.State) -> jax.Array:
        return task.measure(nnx.merge(graphdef, joined(params, state.buffers)), batch, None)['loss'].total

    bad = _bad_leaf(jax.grad(loss)(state.params))
    return (
        f'gradient of {bad}'
        if bad
        else 'nothing in a rerun module by module (an overflow hidden by fusion, or dropout)'
    )


def _bad_leaf(params: nnx.State) -> str | None:
    named = named_parameters(params).items()
    return next((path for path, variable in named if not bool(jnp.all(jnp.isfinite(variable[...])))), None)
