"""ODIN: logits after inputs were moved a little to where the model is surer, by which known inputs gain most."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Bool, Float

from attnlab.analysis.interventions import with_methods
from attnlab.analysis.prediction import loss_and_head_calls
from attnlab.analysis.scores import max_probability
from attnlab.tasks.task import Batch
from attnlab.train.setup import Setup

TEMPERATURE = 1000.0
"""Of the paper."""

SIZES = (0.0025, 0.005, 0.01, 0.02, 0.04, 0.08)
"""Sizes of a step that are tried, those of Hsu et al. 2020, in standard deviations of what is moved."""


def moved(
    setup: Setup,
    variables: nnx.State,
    batch: Batch,
    there: Bool[Array, '*s'],
    unit: Array,
    sizes: tuple[float, ...] = SIZES,
) -> Float[Array, 'n *s o']:
    """Logits of `f(x')`, `x' = x + e unit sign(grad_x log S(x))`, for every size `e`.

        S(x) = max_o softmax(f(x) / T)_o

    `x` are the inputs where these are real numbers, and their embeddings where they are tokens. A row has one step,
    whatever is predicted in it: along the gradient of the sum of `log S` over its predictions, those that are `there`.
    Liang et al. 2018, https://arxiv.org/abs/1706.02690, who write the sign with two minuses.
    """

    def log_probability(more: Array) -> Array:
        logits, _ = _forward(setup, variables, batch, more)
        return jnp.sum(jnp.max(jax.nn.log_softmax(logits / TEMPERATURE), axis=-1), where=there)

    place = jax.eval_shape(lambda: _forward(setup, variables, batch, None)[1])
    step = unit.astype(place.dtype) * jnp.sign(jax.grad(log_probability)(jnp.zeros(place.shape, place.dtype)))
    return jax.lax.map(lambda size: _forward(setup, variables, batch, size * step)[0], jnp.asarray(sizes, place.dtype))


def spread(setup: Setup, variables: nnx.State, batch: Batch) -> Float[Array, '']:
    """The standard deviation of what is moved, over a batch."""
    return jnp.std(_forward(setup, variables, batch, None)[1].astype(jnp.float32))


def best_size(scores: Float[np.ndarray, 'n b']) -> int:
    """The size, by its place, whose scores of known inputs are the largest on average.

    It needs no example of what is not known. Hsu et al. 2020, https://arxiv.org/abs/2002.11297.
    """
    return int(np.argmax(np.mean(scores, axis=1)))


def odin(logits: Float[np.ndarray, 'b o']) -> Float[np.ndarray, 'b']:
    """`max_o softmax(f(x') / T)_o` of logits after the step."""
    return max_probability(logits / TEMPERATURE)


def _forward(setup: Setup, variables: nnx.State, batch: Batch, more: Array | None) -> tuple[Array, Array]:
    """Logits, with `more` added to inputs or embeddings, and what it is added to."""
    model = nnx.merge(setup.graphdef, variables)
    places: list[Array] = []

    def embed(own: Any, inputs: Array, ctx: Any) -> Array:
        if jnp.issubdtype(inputs.dtype, jnp.floating):
            places.append(inputs)
            return own(inputs if more is None else inputs + more, ctx)
        places.append(own(inputs, ctx))
        return places[0] if more is None else places[0] + more

    _, (_, logits, _, _) = loss_and_head_calls(setup.task, with_methods(model, embed=embed), batch)
    return logits, places[0]
