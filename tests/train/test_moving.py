"""Moving buffers follow what steps measure, however a step is made."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from attnlab.blocks.block import Block
from attnlab.blocks.unified import UnifiedBlocks
from attnlab.config import build, spec
from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.metrics import Average
from attnlab.mixers.softmax.attention import Attention
from attnlab.models.model import Model
from attnlab.models.stack import LinearStack, Stack
from attnlab.nn.norms import EvoNormB0
from attnlab.nn.parameter import Moving
from attnlab.testing.noise import noise
from attnlab.train.moving import check_followed
from attnlab.train.setup import prepare
from attnlab.train.state import initialize, split
from attnlab.train.step import make_step
from configs import images
from tests.train.test_step import Squares

BLOCK = spec(Block, mixer=spec(Attention, heads=2, causal=False), norm=spec(EvoNormB0))
X = noise(4, 3, 8)


@dataclasses.dataclass(frozen=True)
class Task(Squares):
    def measure(self, model, batch, dropout_key):
        ctx = dataclasses.replace(Context.full(*batch['x'].shape[:2]), deterministic=False)
        y, _ = model(batch['x'], ctx)
        return {'loss': Average.of(jnp.sum(jnp.square(y), (1, 2)), jnp.ones(len(y)))}


def moments(*, kind=Stack, steps=1, x=X, accumulate=1, **options):
    """The moving averages of a stack of two layers after some steps, a row a layer."""

    def make(rngs):
        return kind(8, depth=2, blocks=(build(BLOCK),), rngs=rngs, **options)

    transform = optax.sgd(0.0)
    graphdef, _, _ = split(make(nnx.Rngs(0)))
    step = jax.jit(make_step(graphdef, Task(), transform, seed=0, accumulate=accumulate))
    state = initialize(make, transform, 0)
    for number in range(1, steps + 1):
        state, metrics = step(state, {'x': x}, jnp.int32(number))
    return np.asarray(state.buffers['blocks'][0]['mixer_norm']['moments'][...]), bool(metrics['good'])


def test_they_follow_the_batch_by_their_decay():
    spread, count = np.asarray(X, np.float64).var((0, 1)), 12
    for steps in (1, 3):
        found, _ = moments(steps=steps)
        kept = 0.9**steps
        np.testing.assert_allclose(found[0], [*(kept + (1 - kept) * spread * count / (count - 1)), 1], rtol=1e-5)
    assert np.abs(found[0] - found[1]).max() > 1e-3


@pytest.mark.parametrize('options', [{'loop': 'scan'}, {'remat': True}, {'loop': 'scan', 'remat': True}])
def test_scans_and_recomputation_measure_the_same(options):
    np.testing.assert_allclose(moments(**options)[0], moments(loop='unroll')[0], rtol=1e-6)


def test_parts_of_a_batch_and_uses_of_one_buffer_are_averaged():
    # Row i is in part i % 2.
    apart = np.mean([np.asarray(X[place::2], np.float64).var((0, 1)) * 6 / 5 for place in range(2)], axis=0)
    np.testing.assert_allclose(moments(accumulate=2)[0][0], [*(0.9 + 0.1 * apart), 1], rtol=1e-5)
    # Both layers of a linear stack have the buffer of its base.
    shared, _ = moments(kind=LinearStack)
    assert shared[0, -1] == 1 and (shared[0, :-1] < 1.5).all()
    np.testing.assert_array_equal(shared[1], 1)


def test_a_failed_step_leaves_them():
    found, good = moments(x=X.at[0, 0, 0].set(jnp.nan))
    assert not good
    np.testing.assert_array_equal(found, 1)


@pytest.mark.parametrize(
    ('parts', 'place', 'holder'),
    [
        ({'norm': build(spec(EvoNormB0))}, 'norm', 'Model'),
        (
            {'blocks': (build(spec(UnifiedBlocks, heads=2, layers=1, causal=False, norm=spec(EvoNormB0))),)},
            'stack.blocks.0.layers.0.mixer_norm',
            'UnifiedLayer',
        ),
        ({}, None, None),
    ],
)
def test_what_nothing_tells_of_training_is_refused(parts, place, holder):
    given = {'blocks': (build(BLOCK),)} | parts
    stack = functools.partial(Stack, depth=1, blocks=given.pop('blocks'))
    model = Model(10, dim=8, stack=stack, streaming=False, dtype=jnp.float32, rngs=nnx.Rngs(0), **given)
    if place is None:
        check_followed(model)
        return
    said = f'^{place} is EvoNormB0, which follows the batches of training; in a {holder} it is not told of training'
    with pytest.raises(UserError, match=said):
        check_followed(model)


class Untold(EvoNormB0):
    """A norm of one's own that does not say that it has another form in training."""

    learns_in_training = False


def test_a_norm_that_would_never_move_is_refused():
    block = Block(8, mixer=functools.partial(Attention, heads=2, causal=False), norm=Untold, rngs=nnx.Rngs(0))
    with pytest.raises(UserError, match=r'^mixer_norm is Untold, .* does not say that it learns_in_training; set that'):
        check_followed(block)


def test_a_run_with_such_a_part_is_refused_before_it_begins():
    config = images.get_config('zoo=mha,norm=evonorm_b0').unlock()
    prepare(config).check()
    config.model.norm = spec(EvoNormB0)
    with pytest.raises(UserError, match=r'^norm is EvoNormB0, which follows the batches of training; in a Model'):
        prepare(config).check()


def test_bad_input_is_named():
    with pytest.raises(UserError, match=r'decay of Moving is 1.0; it must be at least 0 and below 1'):
        Moving(1.0)
