"""Quartet: its numbers, the mean of its gradients, and keys that follow from the seed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.blocks.block import Block
from attnlab.config import build, spec
from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.nn.mlps import GatedMLP
from attnlab.nn.projections import Linear, drawing
from attnlab.quantize.quartet import Quartet, QuartetLinear, blocks, product, rotated, rounded, stochastic
from attnlab.zoo import ZOO

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


def block():
    mixer = ZOO['nope'].spec.copy_and_resolve_references()
    mixer.heads = 2
    made = build(spec(Block, mixer=mixer, mlp=spec(GatedMLP)))(32, rngs=nnx.Rngs(0))
    return Quartet()(made)


def test_keys_follow_from_that_of_the_step():
    made, x = block(), jax.random.normal(jax.random.key(0), (1, 4, 32))
    assert isinstance(made.mixer.query, QuartetLinear) and isinstance(made.mlp.down, QuartetLinear)
    graphdef, params = nnx.split(made)

    @jax.jit
    def slopes(key):
        ctx = Context.full(1, 4)
        ctx = Context(ctx.positions, deterministic=False, dropout_key=key)
        return jax.grad(lambda params: jnp.sum(nnx.merge(graphdef, params)(x, ctx)[0] ** 2))(params)

    first, again, other = (jax.tree.leaves(slopes(jax.random.key(n))) for n in (0, 0, 1))
    assert all((one == two).all() for one, two in zip(first, again, strict=True))
    assert any((one != two).any() for one, two in zip(first, other, strict=True))
    # Maps of one branch draw different numbers.
    with drawing(jax.random.key(0)):
        maps = [made.mlp.gate, made.mlp.gate]
        found = [jax.grad(lambda x, map_=map_: jnp.sum(map_(x)))(x) for map_ in maps]
    assert (found[0] != found[1]).any()


def test_a_model_without_blocks_is_refused():
    class Alone(nnx.Module):
        def __init__(self):
            self.map = Linear(2, 2, rngs=nnx.Rngs(0))

    with pytest.raises(UserError, match='no block of this model has a linear map'):
        Quartet()(Alone())
