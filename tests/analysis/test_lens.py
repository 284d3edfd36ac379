"""The logit lens: of the last layer what the model predicts, and of silent layers what the layers before them do."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.analysis.interventions import with_methods
from attnlab.analysis.lens import (
    Translator,
    fitted,
    inputs_of,
    logit_lens,
    residuals,
    translated,
    translated_divergence,
)
from attnlab.blocks.block import Block
from attnlab.config import build, spec
from attnlab.models.model import Model
from attnlab.models.stack import Stack
from attnlab.tasks.language import LanguageModelling
from attnlab.zoo import ZOO

TASK = LanguageModelling()
ROW = {
    'tokens': jnp.asarray([[3, 1, 4, 1, 5, 2]]),
    'targets': jnp.asarray([[1, 4, 1, 5, 2, 6]]),
    'segments': jnp.asarray([[1, 1, 1, 2, 2, 2]]),
    'positions': jnp.asarray([[0, 1, 2, 0, 1, 2]]),
    'bytes': jnp.ones((1, 6), jnp.int32),
    'weights': jnp.asarray([[1.0, 1, 0, 1, 1, 0.5]]),
}


@pytest.fixture(scope='module')
def split():
    """A model of three recurrent layers, the last of which adds nothing."""
    mixer = ZOO['mingru'].spec
    stack = spec(Stack, depth=3, blocks=(spec(Block, mixer=mixer),))
    model = build(spec(Model, dim=8, stack=stack))(7, dtype='float32', rngs=nnx.Rngs(0))
    for variable in (model.stack.blocks[0].mixer.output.weight, model.stack.blocks[0].mixer.output.bias):
        if variable is not None:
            variable[...] = variable[...].at[2].set(0)
    return nnx.split(model)


def test_the_last_layer_predicts_what_the_model_does(split):
    def both(state):
        return logit_lens(TASK, nnx.merge(split[0], state), ROW), TASK.measure(nnx.merge(split[0], state), ROW, None)

    seen, plain = jax.jit(both)(split[1])
    np.testing.assert_allclose(seen.asked, 4.5)
    np.testing.assert_allclose(seen.losses[-1], plain['loss'].total, rtol=1e-5)
    # A layer that adds nothing changes no prediction; the layers before it do.
    np.testing.assert_allclose(seen.losses[2], seen.losses[3], rtol=1e-6)
    np.testing.assert_allclose(seen.divergence[2:], 0, atol=1e-6)
    np.testing.assert_allclose(seen.agreeing[2:], 4.5)
    assert abs(float(seen.losses[1] - seen.losses[2])) > 1e-3 and float(seen.divergence[0]) > 1e-4
    # By the definition, from the embedding.
    model = nnx.merge(*split)
    hidden = model.norm(model.embed(ROW['tokens'], TASK.context(ROW, None)))
    losses = model.losses(hidden, ROW['targets'])
    np.testing.assert_allclose(seen.losses[0], jnp.sum(losses * ROW['weights']), rtol=1e-5)


def test_a_translator_that_exists_is_found(split):
    """Of streams that are the last one, turned and shifted, the tuned lens turns them back."""
    last = residuals(nnx.merge(*split), *inputs_of(TASK, nnx.merge(*split), ROW))[-1]
    rng = np.random.default_rng(0)
    turn = np.linalg.qr(rng.standard_normal((8, 8)))[0].astype(np.float32)
    stream = last @ turn + rng.standard_normal(8).astype(np.float32)[None, None]
    streams = jnp.stack([stream, last])

    model = nnx.merge(*split)

    @jax.jit
    @jax.value_and_grad
    def mean(translator):
        total, asked = translated_divergence(TASK, model, ROW, translator, stream, last)
        return total / asked

    found = fitted(lambda translator, layer: mean(translator), 8, 1)
    assert found.matrix.shape == (1, 8, 8)
    after = jax.jit(lambda found: translated(TASK, model, ROW, found, streams))(found)
    before = jax.jit(lambda found: translated(TASK, model, ROW, jax.tree.map(jnp.zeros_like, found), streams))(found)
    assert float(before.divergence[0]) > 1e-3 and float(after.divergence[0]) < 0.01 * float(before.divergence[0])
    np.testing.assert_allclose(after.losses[1], before.losses[1])
    # The map back is one that is known.
    exact = Translator(
        jnp.asarray(turn.T - np.eye(8, dtype=np.float32))[None], -((stream - last @ turn)[0, :1] @ turn.T)
    )
    known = translated(TASK, model, ROW, exact, streams)
    np.testing.assert_allclose(known.divergence, 0, atol=1e-5)


def test_the_task_says_what_the_model_is_given(split):
    model = nnx.merge(*split)
    inputs, ctx = inputs_of(TASK, model, ROW)
    np.testing.assert_array_equal(inputs, ROW['tokens'])
    np.testing.assert_array_equal(ctx.segments, ROW['segments'])
    found = residuals(nnx.merge(*split), inputs, ctx)
    assert found.shape == (4, 1, 6, 8)
    np.testing.assert_allclose(nnx.merge(*split).norm(found[-1]), nnx.merge(*split).hidden(inputs, ctx)[0], atol=1e-6)


def test_a_model_that_is_looked_into_stays_as_it_is(split):
    model = nnx.merge(*split)
    before = dict(vars(model))
    logit_lens(TASK, model, ROW)
    changed = with_methods(model, hidden=lambda own, *rest: (2 * own(*rest)[0], None))
    ctx = TASK.context(ROW, None)
    plain, doubled = (each.hidden(ROW['tokens'], ctx)[0] for each in (model, changed))
    np.testing.assert_array_equal(2 * plain, doubled)
    assert vars(model).keys() == before.keys() and not {'hidden', 'losses'} & vars(model).keys()
