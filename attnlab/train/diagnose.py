"""Where a number that is not finite came from."""

import jax
import jax.numpy as jnp
from flax import nnx

from attnlab.tasks.task import Batch, Task, context
from attnlab.train.optimizer import named_parameters


def first_nonfinite(task: Task, graphdef: nnx.GraphDef, params: nnx.State, batch: Batch) -> str:
    """Names the first thing that is not finite, in the order: parameters, outputs of modules, loss, gradients.

    Runs the model once more, module by module, on the state and batch of the step that failed.
    """
    bad = _bad_leaf(params)
    if bad:
        return f'parameter {bad}'
    model = nnx.merge(graphdef, params)
    for stage in model.stages(batch['tokens'], context(batch)):
        if not bool(jnp.all(jnp.isfinite(stage.value))):
            return f'output of {stage.name}'
    if not bool(jnp.isfinite(task.measure(model, batch, None)['loss'].total)):
        return 'loss'
    grads = jax.grad(lambda p: task.measure(nnx.merge(graphdef, p), batch, None)['loss'].total)(params)
    bad = _bad_leaf(grads)
    return (
        f'gradient of {bad}'
        if bad
        else 'nothing when run again module by module (overflow that fusion hides, or dropout)'
    )


def _bad_leaf(params: nnx.State) -> str | None:
    named = named_parameters(params).items()
    return next((path for path, variable in named if not bool(jnp.all(jnp.isfinite(variable[...])))), None)
