"""What looks into models gives them the context that their task does."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.analysis.lens import inputs_of
from attnlab.blocks.block import Block
from attnlab.config import build, spec
from attnlab.data.long_range.dataset import Dataset, Kind
from attnlab.errors import UserError
from attnlab.evals.cadence import AtEnd
from attnlab.evals.experts import ExpertLoads
from attnlab.mixers.linear.norm_lin import NormLin
from attnlab.models.heads.pairs import PairHead
from attnlab.models.model import Model
from attnlab.models.stack import Stack
from attnlab.nn.pools import MeanPool
from attnlab.tasks.given import context_of, given
from attnlab.tasks.long_range import Classification
from attnlab.train.diagnose import first_nonfinite
from attnlab.train.rows import rows_of
from attnlab.train.setup import prepare
from attnlab.train.state import TrainState, split
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


@dataclasses.dataclass(frozen=True)
class Pairs(Dataset):
    """A document of three tokens, and one of four."""

    kind = Kind(classes=2, length=8, vocab=4, documents=2)
    splits = {'train': 1, 'test': 1}  # noqa: RUF012

    def rows(self, split):
        return [{'x': np.full(3, 1, np.uint8), 'second': np.full(4, 2, np.uint8), 'label': np.int32(1)}]

    def describe(self):
        return {'source': 'pairs'}


def test_documents_of_a_pair_are_rows_of_their_own():
    """A mixer that is made for one document a row was named as the origin of a NaN, which is of the second one."""
    task = Classification(Pairs())
    batch = jax.tree.map(lambda x: jnp.asarray(x)[None], task.source('train', 8)[0])
    tokens, ctx = given(task, batch)
    assert tokens.tolist() == [[1, 1, 1, 0], [2, 2, 2, 2]] and ctx.segments.tolist() == [[1, 1, 1, 0], [2, 2, 2, 2]]
    stack = spec(Stack, depth=1, blocks=(spec(Block, mixer=spec(NormLin, length=8)),))
    made = spec(Model, dim=8, stack=stack, head=spec(PairHead, classes=2), pool=MeanPool(), streaming=False)
    graphdef, params, buffers = split(build(made)(4, dtype='float32', rngs=nnx.Rngs(0)))
    found = first_nonfinite(task, graphdef, TrainState(params, None, 0, buffers), batch)
    assert found.startswith('nothing in a rerun')


@pytest.mark.slow
def test_a_task_that_gives_no_rows_says_so():
    setup = prepare(recall.get_config('task=signed_sums,thoughts=continuous'))
    (batch,) = rows_of(setup, 'train', 2, at_once=2)
    with pytest.raises(UserError, match='ContinuousThought gives its model thoughts, and no rows as they are'):
        inputs_of(setup.task, setup.make_model(nnx.Rngs(0)), jax.tree.map(jnp.asarray, batch))
