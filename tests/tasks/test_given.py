"""What looks into models gives them the context that their task does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.analysis.lens import inputs_of
from attnlab.errors import UserError
from attnlab.evals.cadence import AtEnd
from attnlab.evals.experts import ExpertLoads
from attnlab.tasks.given import context_of
from attnlab.train.diagnose import first_nonfinite
from attnlab.train.rows import rows_of
from attnlab.train.setup import prepare
from configs import language, recall


def small(argument):
    config = language.get_config(argument)
    with config.unlocked():
        config.update(batch_size=2, length=32, steps=2)
        config.model.dim = 32
        config.model.stack.depth = 1
    return prepare(config)


def test_texts_that_are_read_as_one_have_no_documents():
    """`window_sinks` refuses segments: a step of it that diverged was reported as that refusal."""
    setup = small('zoo=window_sinks,mlp=moe')
    state = setup.initialize()
    (batch,) = rows_of(setup, 'train', 2, at_once=2)
    assert context_of(setup.task, batch).segments is None
    batch = jax.tree.map(jnp.asarray, batch)
    with jax.set_mesh(setup.mesh):
        assert first_nonfinite(setup.task, setup.graphdef, state, batch).startswith('nothing in a rerun')
    (loads,) = ExpertLoads(AtEnd(), batches=1).evaluate(setup, state.variables).layers
    assert loads.load.sum() == 2 * 32 * 2
    kept = small('zoo=mha')
    (batch,) = rows_of(kept, 'train', 2, at_once=2)
    found = context_of(kept.task, jax.tree.map(jnp.asarray, batch))
    np.testing.assert_array_equal(found.segments, batch['segments'])


@pytest.mark.slow
def test_a_task_that_gives_no_rows_says_so():
    setup = prepare(recall.get_config('task=signed_sums,thoughts=continuous'))
    (batch,) = rows_of(setup, 'train', 2, at_once=2)
    with pytest.raises(UserError, match='ContinuousThought gives its model thoughts, and no rows as they are'):
        inputs_of(setup.task, setup.make_model(nnx.Rngs(0)), jax.tree.map(jnp.asarray, batch))
