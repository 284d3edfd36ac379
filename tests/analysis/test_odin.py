"""ODIN's step is the one of its definition, taken where it is said to be: at inputs, or at their embeddings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.analysis import odin
from attnlab.analysis.outputs import reader
from attnlab.configs.images import get_config as images
from attnlab.configs.long_range import get_config as long_range
from attnlab.runs.loading import Loaded
from attnlab.train.setup import prepare


def small(config):
    config.model.dim, config.model.stack.depth, config.batch_size = 8, 1, 2
    return prepare(config)


def rows(task, length):
    """Two rows without padding, that count."""
    found = {name: np.stack([array] * 2) for name, array in task.example(length).items()}
    ones = {name: np.ones_like(found[name]) for name in ('segments', 'weights')}
    return {name: jnp.asarray(array) for name, array in {**found, **ones}.items()}


def test_the_step_is_along_the_sign_of_the_derivative_of_real_inputs():
    setup = small(images('data=count'))
    task, variables = setup.task, setup.initialize().variables
    batch = rows(task, setup.length)
    batch['tokens'] = jax.random.normal(jax.random.key(0), batch['tokens'].shape)
    unit = jax.jit(lambda variables: odin.spread(setup, variables, batch))(variables)
    np.testing.assert_allclose(unit, np.std(batch['tokens']), rtol=1e-4)

    def logits(tokens):
        model = nnx.merge(setup.graphdef, variables)
        return model.logits(task.vectors(model, {**batch, 'tokens': tokens}, None))

    def score(tokens):
        return jnp.sum(jnp.log(jnp.max(jax.nn.softmax(logits(tokens) / 1000), axis=1)))

    @jax.jit
    def both(tokens):
        step = unit * jnp.sign(jax.grad(score)(tokens))
        return logits(tokens), logits(tokens + odin.SIZES[-1] * step)

    plain, expected = (np.asarray(each, np.float64) for each in both(batch['tokens']))
    read = reader(Loaded(setup, variables, 0), odin.SIZES, float(unit))
    made = read({name: np.asarray(array) for name, array in batch.items()})
    np.testing.assert_allclose(made.logits, plain, rtol=1e-4, atol=1e-5)
    found = made.odin
    assert found.shape == (len(odin.SIZES), len(plain))
    # Scores at a temperature of a thousand hardly differ: what is compared is by how much they do.
    np.testing.assert_allclose(found[-1] * plain.shape[1] - 1, odin.odin(expected) * plain.shape[1] - 1, rtol=1e-3)
    # The further it goes, the surer it is, to first order.
    assert np.all(np.diff([odin.odin(plain), *found[:3]], axis=0) > 0)
    assert odin.best_size(found) == int(np.argmax(np.mean(found, axis=1)))


@pytest.mark.slow
def test_tokens_are_moved_in_their_embeddings():
    setup = small(long_range('task=listops,zoo=mingru,size=smoke'))
    task, variables = setup.task, setup.initialize().variables
    batch = rows(task, setup.length)
    batch['tokens'] = 1 + jnp.arange(batch['tokens'].size, dtype=jnp.int32).reshape(batch['tokens'].shape) % 8
    there = jnp.ones(2, bool)
    found = jax.jit(lambda variables: odin.moved(setup, variables, batch, there, jnp.float32(1)))(variables)
    scores = np.asarray([odin.odin(one) for one in np.asarray(found, np.float64)])
    assert np.all(np.diff(scores[:3], axis=0) > 0)
