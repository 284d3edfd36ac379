import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from attnlab.metrics import Average
from attnlab.train.state import TrainState, initialize, split
from attnlab.train.step import make_step


class Line(nnx.Module):
    """y = w x."""

    def __init__(self, *, rngs: nnx.Rngs):
        self.w = nnx.Param(jnp.array([2.0, -1.0]))


@dataclasses.dataclass(frozen=True)
class Squares:
    """Weighted squared error of a line: its gradient is known."""

    packs: ClassVar[bool] = False
    labels: ClassVar[str] = 'targets'
    vocab: int = 0
    evaluated_split: str = 'valid'

    def source(self, split, length, tokens=None):
        raise NotImplementedError

    def example(self, length):
        raise NotImplementedError

    def describe(self):
        return {}

    def save(self, folder):
        raise NotImplementedError

    def restored(self, folder):
        raise NotImplementedError

    def measure(self, model, batch, dropout_key):
        losses = (batch['x'] @ model.w[...] - batch['y'][..., None] * jnp.ones((1, 1))) ** 2
        return {'loss': Average.of(losses, batch['weights'])}


def made(accumulate=1):
    transform = optax.sgd(0.1)
    graphdef, _, _ = split(Line(rngs=nnx.Rngs(0)))
    step = jax.jit(make_step(graphdef, Squares(), transform, seed=0, accumulate=accumulate))
    return step, initialize(lambda rngs: Line(rngs=rngs), transform, 0)


def batch(rows=4):
    x = np.random.default_rng(0).normal(size=(rows, 3, 2)).astype(np.float32)
    weights = np.ones((rows, 3), np.float32)
    weights[0, 1:] = 0
    return {'x': x, 'y': np.arange(rows, dtype=np.float32), 'weights': weights}


def weights_of(state: TrainState):
    return np.asarray(jax.tree.leaves(state.params)[0])


def test_one_step_is_the_weighted_mean_gradient():
    step, state = made()
    data = batch()
    after, metrics = step(state, data, jnp.int32(1))
    w = weights_of(state).astype(np.float64)
    error = data['x'] @ w - data['y'][:, None]
    gradient = 2 * np.einsum('bt,bt,bti->i', data['weights'], error, data['x']) / data['weights'].sum()
    np.testing.assert_allclose(weights_of(after), w - 0.1 * gradient, rtol=1e-5)
    np.testing.assert_allclose(
        metrics['loss'].mean(), (data['weights'] * error**2).sum() / data['weights'].sum(), rtol=1e-5
    )
    np.testing.assert_allclose(metrics['grad_norm'], np.linalg.norm(gradient), rtol=1e-5)
    assert int(after.step) == 1 and bool(metrics['good'])


@pytest.mark.parametrize('accumulate', [2, 4])
def test_accumulation_is_the_whole_batch_with_unequal_weights(accumulate):
    data = batch()
    after, metrics = made()[0](made()[1], data, jnp.int32(1))
    step, state = made(accumulate)
    in_parts, same = step(state, data, jnp.int32(1))
    np.testing.assert_allclose(weights_of(in_parts), weights_of(after), rtol=1e-6)
    np.testing.assert_allclose(same['loss'].total, metrics['loss'].total, rtol=1e-6)


def test_a_step_that_is_not_finite_and_all_after_it_change_nothing():
    step, state = made()
    state, _ = step(state, batch(), jnp.int32(1))
    before = weights_of(state)
    bad = batch() | {'y': np.array([0, np.inf, 0, 0], np.float32)}
    state, metrics = step(state, bad, jnp.int32(2))
    assert not bool(metrics['good'])
    state, metrics = step(state, batch(), jnp.int32(3))
    assert not bool(metrics['good']) and int(state.step) == 1
    np.testing.assert_array_equal(weights_of(state), before)


def test_the_recorded_norm_is_of_the_gradients_that_are_trained():
    """Of frozen parameters they are no part of it, and need not be finite."""
    for trained, norm in ((lambda grads: grads, np.nan), (lambda grads: jax.tree.map(jnp.zeros_like, grads), 0.0)):
        graphdef, _, _ = split(Line(rngs=nnx.Rngs(0)))
        step = jax.jit(make_step(graphdef, Finite(), optax.sgd(0.1), seed=0, trained=trained))
        _, metrics = step(made()[1], batch(), jnp.int32(1))
        np.testing.assert_array_equal(metrics['grad_norm'], norm)
        assert bool(metrics['good']) == (norm == 0)


class Finite(Squares):
    """A loss that is finite where its gradient is not."""

    def measure(self, model, batch, dropout_key):
        return {'loss': Average.of(jnp.sqrt(jnp.abs(model.w[...] * 0).sum()) * batch['weights'], batch['weights'])}


def test_a_model_that_holds_more_than_parameters_is_refused():
    model = Line(rngs=nnx.Rngs(0))
    model.seen = nnx.BatchStat(jnp.zeros(3))
    with pytest.raises(TypeError, match='variables that are neither parameters nor buffers'):
        split(model)
