"""The training step, a pure function of state and batch."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Int

from attnlab.errors import UserError, nearest
from attnlab.metrics import Average
from attnlab.random import key_for
from attnlab.tasks.task import Batch, Task
from attnlab.train.average import averaged
from attnlab.train.moving import apart, moved
from attnlab.train.redraw import redrawn
from attnlab.train.state import TrainState, joined

Metrics = dict[str, Any]
ACTIVATIONS = ('float32', 'bfloat16', 'float16')
PRODUCTS = ('default', 'high', 'highest')
Step = Callable[[TrainState, Batch, Int[Array, '']], tuple[TrainState, Metrics]]


def make_step(
    graphdef: nnx.GraphDef,
    task: Task,
    transform: optax.GradientTransformation,
    *,
    seed: Any,
    accumulate: int = 1,
    ema: float | None = None,
    trained: Callable[[nnx.State], nnx.State] = lambda gradients: gradients,
) -> Step:
    """Returns `step(state, batch, number) -> (state, metrics)`, where `number` counts steps from 1.

    The update is made only if loss and gradient norm are finite and `number` is the state's own count plus one. So a
    failed step, and any step dispatched after it, leave the last good state for diagnosis.

    With `accumulate=n` the batch is processed in n parts in turn; loss and gradient are those of the whole batch where
    rows do not depend on each other; a norm over the batch, the balance and the capacity of experts, or a head with
    `of_batch`, would see a part at a time. The penalty of a layer is a mean over tokens: that of a part counts by its
    labels, so that parts with other numbers of labels a token make it another mean.
    With `ema` the state's average of the parameters moves with them, by this decay (`attnlab.train.average`). Buffers
    that are drawn or measured follow (`attnlab.train.redraw`, `attnlab.train.moving`). The norm is of the gradients
    that `trained` leaves, as those of frozen parameters are not used.
    """

    def total_loss(
        params: nnx.State, moving: nnx.State, still: nnx.State, batch: Batch, key: jax.Array
    ) -> tuple[jax.Array, Metrics]:
        averages = task.measure(nnx.merge(graphdef, joined(params, joined(moving, still))), batch, key)
        kept = {name: average for name, average in averages.items() if average.total.ndim == 0}
        return averages['loss'].total, kept

    gradient = jax.grad(total_loss, argnums=(0, 1), has_aux=True)

    def update(state: TrainState, grads: nnx.State, measurements: nnx.State) -> TrainState:
        updates, opt_state = transform.update(grads, state.opt_state, state.params)
        params, count = optax.apply_updates(state.params, updates), state.step + 1
        average = state.average if ema is None else averaged(state.average, params, count, ema)
        moving, still = apart(state.buffers)
        buffers = joined(moved(moving, measurements), redrawn(still, key_for(seed, count, 'redraw'), count))
        return TrainState(params, opt_state, count, buffers, average)

    def step(state: TrainState, batch: Batch, number: Int[Array, '']) -> tuple[TrainState, Metrics]:
        key = key_for(seed, number, 'dropout')
        (summed, measurements), averages = _accumulated(gradient, state, batch, key, accumulate)
        count = jnp.maximum(averages['loss'].count, 1.0)
        grads = jax.tree.map(lambda g: g / count, summed)
        norm = optax.tree.norm(trained(grads))
        good = jnp.isfinite(averages['loss'].total) & jnp.isfinite(norm) & (state.step + 1 == number)
        state = jax.lax.cond(good, update, lambda state, *_: state, state, grads, measurements)
        return state, averages | {'grad_norm': norm, 'good': good}

    return step


def _accumulated(
    gradient: Callable[..., Any], state: TrainState, batch: Batch, key: jax.Array, parts: int
) -> tuple[tuple[nnx.State, nnx.State], dict[str, Average]]:
    """Sums of gradients, measurements and metrics over equal parts of the batch; row i is in part i % parts."""
    moving, still = apart(state.buffers)
    if parts == 1:
        return gradient(state.params, moving, still, batch, key)

    def part(carry: Any, item: tuple[Batch, jax.Array]) -> tuple[Any, None]:
        rows, index = item
        found = gradient(state.params, moving, still, rows, jax.random.fold_in(key, index))
        return jax.tree.map(jnp.add, carry, found), None

    strided = jax.tree.map(lambda x: x.reshape(x.shape[0] // parts, parts, *x.shape[1:]).swapaxes(0, 1), batch)
    first = jax.tree.map(lambda x: x[0], strided)
    shapes = jax.eval_shape(gradient, state.params, moving, still, first, key)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
    return jax.lax.scan(part, zeros, (strided, jnp.arange(parts)))[0]


@dataclasses.dataclass(frozen=True)
class Precision:
    """The numeric types of a run; parameters, optimiser state and statistics are always float32.

    Attributes:
      activations: 'float32', 'bfloat16' or 'float16'.
      matmul: JAX's precision of float32 matrix products: 'default', 'high', or 'highest'.
    """

    activations: str = 'float32'
    matmul: str = 'default'

    def __post_init__(self) -> None:
        """Raises `UserError` for a name that is none of these."""
        for name, valid in (('activations', ACTIVATIONS), ('matmul', PRODUCTS)):
            if getattr(self, name) not in valid:
                raise UserError(
                    f'config.precision.{name} is {getattr(self, name)!r}{nearest(str(getattr(self, name)), valid)}'
                )

    def scope(self) -> contextlib.AbstractContextManager[None]:
        """A context in which matrix products, traced or eager, have the precision `matmul`."""
        return jax.default_matmul_precision(self.matmul)

    def jit(self, function: Callable[..., Any], **options: Any) -> Any:
        """`jax.jit(function, **options)`, always traced inside `scope`."""

        @functools.wraps(function)
        def scoped(*args: Any, **kwargs: Any) -> Any:
            with self.scope():
                return function(*args, **kwargs)

        return jax.jit(scoped, **options)
