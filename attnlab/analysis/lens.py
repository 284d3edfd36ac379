"""What a model would predict after each of its layers: the logit lens, and the tuned one."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float
from scipy.optimize import minimize

from attnlab.analysis.interventions import with_methods
from attnlab.analysis.prediction import what_is_asked
from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.models.layers import entered, layers
from attnlab.models.predictor import Stacked
from attnlab.tasks.task import Batch, Task
from attnlab.typing import Embedded, Features, Tokens

STEPS = 100
"""The most steps of a fit."""


def residuals(model: Stacked, inputs: Tokens | Features, ctx: Context) -> Float[Array, 'l b s d']:
    """The residual stream before the first layer and after each, `depth + 1` in all."""
    streams, ctx = entered(model, inputs, ctx)
    found = [streams]
    for index, layer in layers(model):
        own, ctx = model.stack.told(index, layer, streams, ctx)
        streams, _ = layer(streams, own.fold_in(index))
        found.append(streams)
    return jnp.stack(list(map(model.stack.residual.close, found)))


class Seen(NamedTuple):
    """Sums over what is predicted, by layer; of several batches they add up.

    Attributes:
      losses: the losses of predictions made from the stream after each layer, by the final norm and the head.
      agreeing: how many name the class that the last layer names.
      divergence: `KL(last | layer)` in nats.
      asked: how many predictions, by their weights in the loss.
    """

    losses: Float[Array, ' l']
    agreeing: Float[Array, ' l']
    divergence: Float[Array, ' l']
    asked: Float[Array, '']


def inputs_of(task: Task, model: Any, batch: Batch) -> tuple[Tokens | Features, Context]:
    """The inputs and the context that a task gives a model for a batch. Raises `UserError` where it gives none."""
    found = []

    def hidden(own: Any, inputs: Array, ctx: Context, state: Any = None) -> tuple[Embedded, Any]:
        found.append((inputs, ctx))
        return own(inputs, ctx, state)

    task.measure(with_methods(model, hidden=hidden), batch, None)
    if not found:
        raise UserError(f'{type(task).__name__} gives its model thoughts, and no rows as they are; this looks at rows')
    return found[0]


def logit_lens(task: Task, model: Any, batch: Batch) -> Seen:
    """Predictions from every layer, as if the layers after it were left out: `head(norm(h_l))`.

    nostalgebraist 2020, with the final norm, which some leave out. Where real numbers are predicted, none agree and
    divergences are zero.
    """
    streams = residuals(model, *inputs_of(task, model, batch))
    return _seen(*_predicted(task, model, batch, streams))


class Translator(NamedTuple):
    """An affine map that is added to a stream, `h + h A + c`; zeros are the logit lens."""

    matrix: Float[Array, 'd d']
    bias: Float[Array, ' d']

    def __call__(self, stream: Float[Array, '*b d']) -> Float[Array, '*b d']:
        """The stream as that of the last layer might be."""
        return stream + (stream @ self.matrix + jnp.broadcast_to(self.bias, stream.shape)).astype(stream.dtype)


def translated_divergence(
    task: Task, model: Any, batch: Batch, translator: Translator, stream: Embedded, last: Embedded
) -> tuple[Float[Array, ''], Float[Array, '']]:
    """`KL(last | head(norm(translated stream)))` in nats, summed over what is predicted, and how much that is."""
    seen = _seen(*_predicted(task, model, batch, jnp.stack([translator(stream), last])))
    return seen.divergence[0], seen.asked


def translated(task: Task, model: Any, batch: Batch, translators: Translator, streams: Float[Array, 'l b t d']) -> Seen:
    """The tuned lens: as `logit_lens`, through a translator of every stream but the last, stacked.

    Belrose et al. 2023, https://arxiv.org/abs/2303.08112.
    """
    moved = jax.vmap(lambda translator, stream: translator(stream))(translators, streams[:-1])
    return _seen(*_predicted(task, model, batch, jnp.concatenate([moved, streams[-1:]])))


def fitted(
    mean_divergence: Callable[[Translator, int], tuple[Array, Translator]], width: int, layers: int
) -> Translator:
    """The translators of the least divergence that L-BFGS finds from zeros, stacked over layers.

    `mean_divergence` gives it and its derivatives, of a translator and a layer.
    """

    def split(flat: np.ndarray) -> Translator:
        matrix, bias = np.split(flat.astype(np.float32), [width * width])
        return Translator(matrix.reshape(width, width), bias)  # type: ignore[arg-type]

    found = []
    for layer in range(layers):

        def value(flat: np.ndarray, layer: int = layer) -> tuple[float, np.ndarray]:
            divergence, slopes = mean_divergence(split(flat), layer)
            return float(divergence), np.concatenate([np.asarray(each, np.float64).ravel() for each in slopes])

        start = np.zeros(width * (width + 1))
        # Divergences may be thousandths of a nat, whose slopes scipy would take for none.
        options = {'maxiter': STEPS, 'gtol': 1e-9, 'ftol': 1e-12}
        best = minimize(value, start, jac=True, method='L-BFGS-B', options=options)
        found.append(split(best.x))
    return jax.tree.map(lambda *each: jnp.stack(each), *found)


def _predicted(
    task: Task, model: Any, batch: Batch, streams: Float[Array, 'l b t d']
) -> tuple[Array, Array, Array, bool]:
    """Logits, losses and weights of what is predicted from each stream, and whether these are classes."""
    discrete = []

    def asked(stream: Array) -> tuple[Array, Array, Array]:
        def hidden(own: Any, inputs: Array, ctx: Context, state: Any = None) -> tuple[Embedded, Any]:
            return model.norm(stream), state

        reading = with_methods(model, hidden=hidden)
        (_, logits, losses, targets), weights = what_is_asked(task, reading, batch)
        discrete.append(bool(jnp.issubdtype(targets.dtype, jnp.integer)))
        return logits, losses, weights

    return *jax.vmap(asked)(streams), discrete[-1]


def _seen(logits: Array, losses: Array, weights: Array, discrete: bool) -> Seen:
    """Sums of predictions, the last being the model's own."""
    shares = weights[-1:]

    def total(values: Array) -> Array:
        return jnp.sum(values * shares, axis=tuple(range(1, losses.ndim)))

    if not discrete:
        nothing = jnp.zeros(len(losses))
        return Seen(total(losses), nothing, nothing, jnp.sum(shares))
    logarithms = jax.nn.log_softmax(logits.astype(jnp.float32))
    last = logarithms[-1:]
    same = jnp.argmax(logits, axis=-1) == jnp.argmax(logits[-1:], axis=-1)
    apart = jnp.sum(jnp.exp(last) * (last - logarithms), axis=-1)
    return Seen(total(losses), total(same), total(apart), jnp.sum(shares))
