"""Quartet: its numbers, the mean of its gradients, and keys that follow from the seed."""

import contextlib
import dataclasses
import functools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.blocks.adaptive import AdaptiveBlock
from attnlab.blocks.block import Block
from attnlab.cli import main
from attnlab.config import build, spec
from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.models.stack import Stack
from attnlab.nn.projections import Linear
from attnlab.quantize.layers import linear_maps
from attnlab.quantize.quartet import Quartet, QuartetLinear, blocks, product, rotated, rounded, stochastic
from attnlab.runs.loading import load_run
from attnlab.testing.noise import perturbed
from attnlab.train.checkpoint import Checkpoints
from attnlab.train.redraw import redrawn
from attnlab.train.report import read_lines
from attnlab.train.run import saved_config
from attnlab.train.setup import prepare
from attnlab.train.state import joined, split
from attnlab.zoo import ZOO
from tests.bad_inputs.conftest import LANGUAGE, SMALL, originals

__all__ = ['originals']

GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def test_rotating_twice_is_nothing():
    x = jax.random.normal(jax.random.key(0), (3, 40))
    turned = rotated(blocks(x))
    assert turned.shape == (3, 2, 32)
    np.testing.assert_allclose(rotated(turned).reshape(3, -1)[:, :40], x, atol=1e-6)
    np.testing.assert_allclose(jnp.sum(turned**2), jnp.sum(x**2), rtol=1e-5)


@pytest.mark.parametrize('exponent', ['nearest', 'floor'])
def test_numbers_forward_are_the_nearest_with_a_scale_of_the_deviation(exponent):
    rng = np.random.default_rng(0)
    # Sizes of blocks over whole octaves, so that errors are over all alignments of scales.
    deviation = 2 ** rng.uniform(0, 4, (10_000, 1, 1))
    x = (rng.standard_normal((10_000, 1, 32)) * deviation).astype(np.float32)
    few, kept = rounded(jnp.asarray(x), exponent)
    power = np.log2(2.92247856 / 6 * np.sqrt((x**2).mean(-1, keepdims=True)))
    scale = 2.0 ** (np.round if exponent == 'nearest' else np.floor)(power)
    ratio = np.abs(x / scale)
    expected = GRID[np.abs(ratio[..., None] - GRID).argmin(-1)] * np.sign(x) * scale
    assert (few != expected).mean() < 1e-5
    np.testing.assert_array_equal(kept, ratio <= 6)
    assert jnp.isnan(rounded(jnp.full((1, 1, 32), jnp.nan), exponent)[0]).all()
    if exponent == 'nearest':
        assert (((few - x) / deviation) ** 2).mean() == pytest.approx(0.0134, rel=0.03)


def test_numbers_rounded_at_random_are_right_in_the_mean_and_on_the_grid():
    x = jax.random.normal(jax.random.key(1), (4, 2, 32)) * 5
    keys = jax.random.split(jax.random.key(2), 4000)
    draws = np.asarray(jax.vmap(lambda key: stochastic(x, key))(keys))
    most = np.abs(np.asarray(x)).max(-1, keepdims=True)
    ratio = np.abs(draws) / 2 ** (np.floor(np.log2(most)) - 2)
    assert np.isin(ratio, GRID).all()
    spread = draws.std(0) / np.sqrt(len(keys))
    assert np.abs((draws.mean(0) - 0.75 * np.asarray(x)) / np.where(spread > 0, spread, 1)).max() < 5
    np.testing.assert_array_equal(stochastic(jnp.zeros((1, 1, 32)), keys[0]), 0)


def test_gradients_are_right_in_the_mean():
    x, w, up = (jax.random.normal(jax.random.key(n), shape) for n, shape in enumerate([(5, 40), (40, 7), (5, 7)]))

    def gradients(key):
        return jax.vjp(lambda x, w: product('nearest', x, w, jax.random.key_data(key)), x, w)[1](up)

    keys = jax.random.split(jax.random.key(3), 1500)
    by_x, by_w = (np.asarray(each) for each in jax.lax.map(gradients, keys, batch_size=100))
    (x_few, x_kept), (w_few, w_kept) = (rounded(rotated(blocks(each)), 'nearest') for each in (x, w.T))
    for draws, few, kept, upstream in ((by_x, w_few, x_kept, up), (by_w.swapaxes(1, 2), x_few, w_kept, up.T)):
        exact = np.asarray(upstream) @ np.asarray(few).reshape(len(few), -1)
        exact = np.where(kept, exact.reshape(kept.shape), 0)
        exact = np.asarray(rotated(jnp.asarray(exact, jnp.float32))).reshape(len(exact), -1)[:, :40]
        spread = draws.std(0) / np.sqrt(len(keys))
        assert np.abs((draws.mean(0) - exact) / spread).max() < 5


def test_every_map_of_every_layer_draws_for_itself_by_seed_and_step():
    mixer = ZOO['nope'].spec.copy_and_resolve_references()
    mixer.heads = 2
    block = spec(AdaptiveBlock, mixer=mixer)
    stack = Quartet()(build(spec(Stack, depth=2, blocks=(block,), loop='scan'))(32, rngs=nnx.Rngs(0)))
    # Gates that are zero would let no gradient through.
    graphdef, params, buffers = split(perturbed(stack, 0.1))
    x, told = jax.random.normal(jax.random.key(0), (1, 4, 32)), jax.random.normal(jax.random.key(1), (1, 32))
    ctx = dataclasses.replace(Context.full(1, 4), condition=told)

    @jax.jit
    def slopes(buffers):
        def total(params):
            return jnp.sum(nnx.merge(graphdef, joined(params, buffers))(x, ctx)[0] ** 2)

        return nnx.to_pure_dict(jax.grad(total)(params))['blocks'][0]

    def drawn(seed, count):
        return redrawn(buffers, jax.random.key(seed), jnp.int32(count))

    first, usual = drawn(0, 1), slopes(drawn(0, 1))
    jax.tree.map(np.testing.assert_array_equal, usual, slopes(drawn(0, 1)))
    keys = np.concatenate([leaf[...] for each in (first, drawn(1, 1)) for leaf in jax.tree.leaves(each)])
    assert len(keys) == 2 * 2 * 5 and len(np.unique(keys, axis=0)) == len(keys)
    # A map's own gradient depends on its own key, wherever the map is.
    for path in (('told',), *(('mixer', name) for name in ('query', 'key', 'value', 'output'))):
        other = jax.tree.map(jnp.copy, first)
        noise = at(other['blocks'][0], path)['noise']
        noise[...] = noise[...] + 1
        before, after = (at(each, path)['weight'] for each in (usual, slopes(other)))
        assert (before != after).any(axis=(1, 2)).all(), path


def test_a_run_goes_on_to_the_bit(originals, tmp_path):
    config = f'--config={LANGUAGE}:zoo=mingru,data={originals / "text.txt"},rounding=quartet'
    whole, broken = tmp_path / 'whole', tmp_path / 'broken'
    train = ['train', config, *(each for each in SMALL if 'dim' not in each), '--config.model.dim=32']
    assert main([*train, f'--workdir={whole}']) == 0
    maps = [linear for block in load_run(whole).model().stack.blocks for _, _, linear in linear_maps(block)]
    assert maps and all(isinstance(each, QuartetLinear) for each in maps)
    # As if it had been killed after the second step.
    shutil.copytree(whole, broken)
    shutil.rmtree(broken / 'checkpoints' / '4')
    assert main([*train, f'--workdir={broken}']) == 0
    one, other = (checkpoint(each) for each in (whole, broken))
    assert one.keys() == other.keys() and any('noise' in name for name in one)
    for name, array in one.items():
        assert array.tobytes() == other[name].tobytes(), name
    losses = [[line for line in read_lines(each / 'metrics.jsonl') if line['step'] > 2] for each in (whole, broken)]
    assert losses[0] and losses[0] == losses[1][-len(losses[0]) :]
    # Keys are drawn: with another seed the backward pass has others, and so have weights other values.
    third = tmp_path / 'third'
    assert main([*train, f'--workdir={third}', '--config.seed=1']) == 0
    assert any(checkpoint(third)[name].tobytes() != one[name].tobytes() for name in one if 'noise' in name)


def checkpoint(run):
    """The arrays of the state after the last step, by name."""
    setup = prepare(saved_config(run))
    with contextlib.closing(Checkpoints(run / 'checkpoints', notify=print)) as checkpoints:
        state, _ = checkpoints.restore(4, setup.abstract)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(state)}


def at(tree, path):
    return functools.reduce(lambda tree, name: tree[name], path, tree)


def test_latent_attention_goes_on_from_a_state_as_in_one_pass():
    block = Quartet()(Block(64, mixer=build(ZOO['mla'].reduced(heads=2)[0]), rngs=nnx.Rngs(0)))
    x = jax.random.normal(jax.random.key(1), (2, 4, 64))
    expected, _ = block(x, Context.full(2, 4))
    state, found = block.init_state(2, 4, x.dtype), []
    for place in range(4):
        y, state = block(x[:, place : place + 1], Context.full(2, 1, start=place), state)
        found.append(y)
    error = jnp.linalg.norm(jnp.concatenate(found, axis=1) - expected) / jnp.linalg.norm(expected - x)
    assert error < 1e-3


def test_a_model_without_blocks_is_refused():
    class Alone(nnx.Module):
        def __init__(self):
            self.map = Linear(2, 2, rngs=nnx.Rngs(0))

    with pytest.raises(UserError, match='no block of this model has a linear map'):
        Quartet()(Alone())
