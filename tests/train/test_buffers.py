"""Variables that are not trained: kept by steps, checkpoints, meshes and runs that start from another."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.blocks.block import Block
from attnlab.config import spec
from attnlab.errors import UserError
from attnlab.mixers.mixer import Mixer
from attnlab.models.stack import Stack
from attnlab.nn.parameter import Buffer, buffer
from attnlab.nn.projections import Linear
from attnlab.train.checkpoint import Checkpoints
from attnlab.train.setup import prepare
from attnlab.train.start import FromRun
from configs.recall import get_config

PATH = 'stack/blocks/0/mixer/directions'
NAME = PATH.replace('/', '.')


class RandomFeatures(Mixer):
    """The mean so far of `relu(x D)`, `D` drawn once."""

    def __init__(self, dim, *, rngs):
        self.directions = buffer(jax.random.normal(rngs.params(), (dim, dim)), axes=('embed', None))
        self.output = Linear(dim, dim, rngs=rngs)

    def __call__(self, x, ctx, state=None):
        del ctx
        features = jax.nn.relu(x @ self.directions[...].astype(x.dtype))
        count = jnp.arange(1, x.shape[1] + 1, dtype=x.dtype)[None, :, None]
        return self.output(jnp.cumsum(features, axis=1) / count), state

    def init_state(self, batch, length, dtype):
        raise NotImplementedError


def setup_of(mixer, **changes):
    config = get_config('task=mqar,zoo=mingru')
    with config.unlocked():
        config.update(batch_size=4, steps=1, **changes)
        config.model.dim = 8
        config.model.streaming = False
        config.model.stack = spec(Stack, depth=2, blocks=(spec(Block, mixer=spec(mixer)),), loop='scan')
    return prepare(config)


@pytest.fixture(scope='module')
def setup():
    return setup_of(RandomFeatures)


@pytest.fixture(scope='module')
def stepped(setup):
    state = setup.initialize()
    before = jax.tree.map(np.asarray, state)
    source = setup.task.source('train', setup.length)
    rows = [source[index] for index in range(setup.batch_size)]
    batch = setup.place({name: np.stack([row[name] for row in rows]) for name in rows[0]})
    after, metrics = setup.step(state, batch, np.int32(1))
    assert bool(metrics['good'])
    return before, after


def test_a_step_trains_parameters_and_leaves_buffers(stepped):
    before, after = stepped
    ((path, variable),) = nnx.to_flat_state(before.buffers)
    assert '/'.join(map(str, path)) == PATH and isinstance(variable, Buffer) and variable.shape == (2, 8, 8)
    assert np.std(variable[...]) > 0.5 and not np.array_equal(variable[0], variable[1])
    jax.tree.map(np.testing.assert_array_equal, before.buffers, jax.tree.map(np.asarray, after.buffers))
    moved = jax.tree.map(lambda a, b: not np.array_equal(a, b), before.params, jax.tree.map(np.asarray, after.params))
    assert all(jax.tree.leaves(moved))
    assert not any('directions' in jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(after.opt_state))


def test_buffers_are_saved_restored_and_taken_over(setup, stepped, tmp_path):
    _, state = stepped
    checkpoints = Checkpoints(tmp_path / 'checkpoints')
    checkpoints.save(1, state, {'step': 1, 'sums': {}})
    found, _ = checkpoints.restore_latest(setup.abstract)
    checkpoints.close()
    assert jax.tree.structure(found) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, found, state)

    def started(leave):
        other = setup_of(RandomFeatures, seed=1)
        start = FromRun(str(tmp_path), leave=leave)
        return start.restore_into(other.initialize(), other.abstract)

    taken = started(('head/*',))
    jax.tree.map(np.testing.assert_array_equal, taken.buffers, state.buffers)
    np.testing.assert_array_equal(taken.params['norm']['scale'][...], state.params['norm']['scale'][...])
    drawn = started(('*/directions',))
    assert not np.array_equal(*(jax.tree.leaves(each.buffers)[0] for each in (drawn, state)))
    without = Checkpoints(tmp_path / 'without')
    without.save(1, {'params': state.params, 'opt_state': state.opt_state, 'step': state.step}, {'step': 1})
    with pytest.raises(UserError, match=f'has no array buffers.{NAME}'):
        without.restore_latest(setup.abstract)
    without.close()


def test_the_model_of_a_run_has_its_buffers(setup, stepped):
    _, state = stepped
    model = nnx.merge(setup.graphdef, state.variables)
    np.testing.assert_array_equal(model.stack.blocks[0].mixer.directions[...], jax.tree.leaves(state.buffers)[0])
    with pytest.raises(ValueError, match="axes \\('width',\\) must be among"):
        buffer(jnp.zeros(3), axes=('width',))
    with pytest.raises(ValueError, match=r'axes \(\) name 0 dimensions; the shape \(3,\) has 1'):
        buffer(jnp.zeros(3), axes=())


@pytest.mark.parametrize('lost', ['state', 'state/_METADATA', 'state/manifest.ocdbt'])
def test_a_start_passes_a_damaged_checkpoint_over_before_it_is_read(setup, stepped, tmp_path, capsys, lost):
    _, state = stepped
    checkpoints = Checkpoints(tmp_path / 'checkpoints')
    for step in (1, 2):
        checkpoints.save(step, state, {'step': step, 'sums': {}})
    checkpoints.close()
    path = tmp_path / 'checkpoints' / '2' / lost
    path.rename(tmp_path / 'lost')
    start = FromRun(str(tmp_path))
    start.check(setup.abstract)
    assert start.settled(None).step == 1 and 'checkpoint 2 is damaged' in capsys.readouterr().err
    with pytest.raises(UserError, match=r'checkpoint 2 in .* is damaged'):
        FromRun(str(tmp_path), step=2).check(setup.abstract)
