"""The penalty on turning: nothing outside of training, and in training its gradient."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from attnlab.blocks.alignment import Alignment
from attnlab.blocks.block import Block
from attnlab.config import build, spec, spec_of
from attnlab.context import Context
from attnlab.models.stack import Stack
from attnlab.zoo import ZOO


def stack(alignment, loop='unroll'):
    blocks = (spec(Block, mixer=ZOO['mingru'].spec),)
    penalty = None if alignment is None else spec_of(alignment)
    return build(spec(Stack, depth=2, blocks=blocks, loop=loop, alignment=penalty))(4, rngs=nnx.Rngs(0))


def slopes(model, x, ctx, added=None):
    graphdef, params = nnx.split(model)

    def value(params):
        model = nnx.merge(graphdef, params)
        y, _ = model(x, ctx)
        return jnp.sum(y**2) + (0 if added is None else added(model))

    return jax.jit(jax.grad(value))(params)


def test_its_gradient_is_that_of_the_cosines():
    x = jax.random.normal(jax.random.key(0), (1, 3, 4))
    segments = jnp.asarray([[1, 1, 0]])
    ctx = Context(Context.full(1, 3).positions, segments, deterministic=False, dropout_key=jax.random.key(0))

    def turned(model):
        total, before = 0.0, x
        for index, layer in enumerate(model.layers()):
            after, _ = layer(before, ctx.fold_in(index))
            sizes = jnp.linalg.norm(before, axis=-1) * jnp.linalg.norm(after, axis=-1)
            total += jnp.sum((1 - jnp.sum(before * after, axis=-1) / sizes)[0, :2])
            before = after
        return 0.5 * total

    expected = slopes(stack(None), x, ctx, turned)
    for loop in ('unroll', 'scan'):
        found = slopes(stack(Alignment(0.5), loop), x, ctx)
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    # What is computed is the same, and outside of training so is the gradient.
    plain, penalised = stack(None), stack(Alignment(0.5))
    np.testing.assert_array_equal(plain(x, ctx)[0], penalised(x, ctx)[0])
    calm = Context.full(1, 3)
    for one, other in zip(*(jax.tree.leaves(slopes(each, x, calm)) for each in (plain, penalised)), strict=True):
        np.testing.assert_array_equal(one, other)
