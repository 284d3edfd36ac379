import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from attnlab.errors import UserError
from attnlab.metrics import Average
from attnlab.nn.feature_maps import PositiveRandomFeatures
from attnlab.nn.parameter import Buffer, Drawn, buffer
from attnlab.train.redraw import redrawn
from attnlab.train.state import initialize, split
from attnlab.train.step import make_step
from tests.train.test_step import Squares


class Layers(nnx.Module):
    """Two layers whose random features lie in one array, as those of a stack do, and features that stay."""

    def __init__(self, *, rngs: nnx.Rngs):
        layers = [PositiveRandomFeatures(4, heads=1, count=6, redraw=3, rngs=rngs).directions for _ in range(2)]
        self.stacked = Buffer(jnp.stack([each[...] for each in layers]), **layers[0].get_metadata())
        self.still = buffer(jnp.ones(3), axes=(None,))
        self.weight = nnx.Param(jnp.ones(2))


@dataclasses.dataclass(frozen=True)
class Task(Squares):
    def measure(self, model, batch, dropout_key):
        return {'loss': Average.of(jnp.square(model.weight[...] - batch['x']), jnp.ones(2))}


def test_features_are_drawn_anew_at_their_steps_and_by_the_seed_alone():
    def trained(seed):
        transform = optax.sgd(0.1)
        graphdef, _, _ = split(Layers(rngs=nnx.Rngs(0)))
        step = jax.jit(make_step(graphdef, Task(), transform, seed=seed))
        state = initialize(lambda rngs: Layers(rngs=rngs), transform, 0)
        found = [np.asarray(state.buffers['stacked'][...])]
        for number in range(1, 7):
            state, _ = step(state, {'x': jnp.zeros(2)}, jnp.int32(number))
            found.append(np.asarray(state.buffers['stacked'][...]))
        assert (np.asarray(state.buffers['still'][...]) == 1).all()
        return found

    found, again, other = trained(0), trained(0), trained(1)
    changed = [bool((after != before).any()) for before, after in itertools.pairwise(found)]
    assert changed == [False, False, True, False, False, True]
    np.testing.assert_array_equal(found, again)
    assert (found[3] != other[3]).all() and (found[3][0] != found[3][1]).all()
    for layer in found[3]:
        products = layer[:4] @ layer[:4].T
        np.testing.assert_allclose(products, np.diag(np.diag(products)), atol=1e-4)


def test_without_drawn_buffers_nothing_is_added():
    _, _, buffers = split(Layers(rngs=nnx.Rngs(0)))
    still = nnx.State({'still': buffers['still']})
    assert redrawn(still, jax.random.key(0), jnp.int32(3))['still'] is buffers['still']
    with pytest.raises(UserError, match='every of Drawn is 0; it must be a whole number of at least 1'):
        Drawn(0, lambda key, shape: key)
