"""Lower bounds of forget gates that rise from layer to layer, as their equation has them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.test_util import check_grads
from scipy.special import expit

from attnlab.blocks.block import Block
from attnlab.config import build, spec
from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.mixers.recurrent.hgrn import HGRN
from attnlab.mixers.softmax.attention import Attention
from attnlab.models.stack import LinearStack, Stack, stack_spec
from attnlab.nn.bounds import GREATEST, bounded_log_sigmoid, rising_bounds
from attnlab.nn.gates import TiedKeys
from attnlab.testing.noise import noise, perturbed
from attnlab.zoo import ZOO

DIM = 8
HGRN2 = ZOO['hgrn2'].reduced(heads=2)[0]
HGRN2.gates.bound = 'learned'
MIXERS = {'hgrn': spec(HGRN, bound='learned'), 'hgrn2': HGRN2}


def bounds_of(block: Block) -> np.ndarray:
    mixer = block.mixer
    return np.asarray((mixer if isinstance(mixer, HGRN) else mixer.gates).bound.bounds[...])


def stacked(*mixers, depth: int = 4, kind: type[Stack] = Stack, **settings) -> Stack:
    made = stack_spec(mixers, depth=depth, mlp=None, kind=kind)
    made.update(settings)
    return perturbed(build(made)(DIM, rngs=nnx.Rngs(0)))


def test_bounds_are_the_parts_of_the_layers_below():
    logits = np.asarray(noise(5, 3))
    parts = np.exp(logits) / np.exp(logits).sum(0)
    np.testing.assert_allclose(rising_bounds(jnp.asarray(logits)), np.cumsum(parts, 0) - parts, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(rising_bounds(jnp.zeros((4, 1)))[:, 0], [0, 0.25, 0.5, 0.75], rtol=1e-6)
    assert rising_bounds(jnp.asarray([[200.0], [0.0]]))[:, 0].tolist() == [0, GREATEST]


@pytest.mark.parametrize('name', MIXERS)
@pytest.mark.parametrize('depth', [1, 3, 4])
def test_every_layer_of_a_stack_has_its_own(name, depth):
    """Attention between them has none, and does not count."""
    stack = stacked(MIXERS[name], spec(Attention, heads=2), depth=2 * depth)
    blocks = [block for block in stack.layers() if not isinstance(block.mixer, Attention)]
    logits = stack.blocks[0].mixer
    logits = (logits if isinstance(logits, HGRN) else logits.gates).bound.logits[...]
    np.testing.assert_array_equal(np.stack([bounds_of(block) for block in blocks]), rising_bounds(logits))
    assert not bounds_of(blocks[0]).any() and (depth == 1 or bounds_of(blocks[-1]).all())


def test_they_rise_over_all_blocks_of_a_pattern():
    """Layers 0, 1, 3, 4 of a pattern of three have a bound."""
    stack = stacked(MIXERS['hgrn'], MIXERS['hgrn'], spec(Attention, heads=2), depth=5)
    layers = list(stack.layers())
    logits = [layers[place].mixer.bound.logits[...] for place in (0, 1, 3, 4)]
    wanted = rising_bounds(jnp.stack(logits))
    np.testing.assert_array_equal(np.stack([bounds_of(layers[place]) for place in (0, 1, 3, 4)]), wanted)


@pytest.mark.parametrize('name', MIXERS)
@pytest.mark.parametrize('kind', [Stack, LinearStack])
def test_bounds_are_the_same_in_a_loop_recomputed_and_in_pieces(name, kind):
    x, ctx = noise(2, 6, DIM), Context.full(2, 6)
    whole, _ = stacked(MIXERS[name], kind=kind, loop='unroll')(x, ctx)
    for settings in ({'loop': 'scan'}, {'loop': 'scan', 'remat': True}):
        found, _ = stacked(MIXERS[name], kind=kind, **settings)(x, ctx)
        np.testing.assert_allclose(found, whole, rtol=1e-5, atol=1e-5)
    stack = stacked(MIXERS[name], kind=kind)
    state, pieces = stack.init_state(2, 6, x.dtype), []
    for start, stop in ((0, 2), (2, 3), (3, 6)):
        y, state = stack(x[:, start:stop], Context(ctx.positions[:, start:stop]), state)
        pieces.append(y)
    np.testing.assert_allclose(jnp.concatenate(pieces, axis=1), whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('name', MIXERS)
def test_they_are_learned(name):
    with jax.enable_x64(True):
        graphdef, params, rest = nnx.split(stacked(MIXERS[name], depth=3), nnx.Param, ...)
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), params)
        x, ctx = noise(2, 5, DIM, dtype=jnp.float64), Context.full(2, 5)

        def loss(params: nnx.State) -> jax.Array:
            return jnp.sum(jnp.sin(nnx.merge(graphdef, params, rest)(x, ctx)[0]))

        mixer = jax.grad(loss)(params)['blocks'][0]['mixer']
        logits = (mixer if name == 'hgrn' else mixer['gates'])['bound']['logits'][...]
        assert jnp.isfinite(logits).all() and logits.any(axis=tuple(range(1, logits.ndim))).all()
        check_grads(loss, (params,), order=1, modes=['rev'], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('name', MIXERS)
def test_at_the_start_layers_have_the_numbers_of_their_place(name):
    """Learned bounds are those that `lower_bound` gives to a mixer of the same parameters."""
    x, ctx = noise(2, 6, DIM), Context.full(2, 6)
    stack = build(stack_spec((MIXERS[name],), depth=4, mlp=None))(DIM, rngs=nnx.Rngs(0))
    third = list(stack.layers())[2].mixer
    fixed = MIXERS[name].copy_and_resolve_references()
    (fixed if name == 'hgrn' else fixed.gates).update(bound='constant', lower_bound=0.5)
    fixed = build(fixed)(DIM, rngs=nnx.Rngs(0))
    own = dict(nnx.to_flat_state(nnx.state(fixed, nnx.Param)))
    learned = {path: value for path, value in nnx.to_flat_state(nnx.state(third, nnx.Param)) if path in own}
    nnx.update(fixed, nnx.from_flat_state(learned))
    np.testing.assert_allclose(third(x, ctx)[0], fixed(x, ctx)[0], rtol=1e-5, atol=1e-6)


def test_log_decays_of_bounds_of_zero_have_gradients():
    logits, bound = jnp.asarray([-200.0, -3.0, 0.0, 90.0]), jnp.asarray([0.0, 0.0, 0.25, GREATEST])
    value, gradients = jax.value_and_grad(lambda *z: bounded_log_sigmoid(*z).sum(), (0, 1))(logits, bound)
    kept = np.asarray(bound, np.float64) + (1 - np.asarray(bound, np.float64)) * expit(np.asarray(logits, np.float64))
    np.testing.assert_allclose(value, np.log(np.maximum(kept, np.exp(-200))).sum(), rtol=1e-6)
    assert all(jnp.isfinite(gradient).all() for gradient in gradients)
    for number in (0.0, 0.25):
        np.testing.assert_allclose(
            bounded_log_sigmoid(logits, number), bounded_log_sigmoid(logits, jnp.full(4, number)), rtol=1e-6, atol=1e-7
        )


def test_errors():
    with pytest.raises(UserError, match=r'the lower_bound of HGRN is 0\.5, and bound=learned starts at 0'):
        HGRN(DIM, lower_bound=0.5, bound='learned', rngs=nnx.Rngs(0))
    with pytest.raises(UserError, match='the lower_bound of TiedKeys is -1'):
        TiedKeys(DIM, heads=2, key_dim=4, value_dim=4, lower_bound=-1.0, rngs=nnx.Rngs(0))
