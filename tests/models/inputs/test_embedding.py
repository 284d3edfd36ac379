import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.blocks.block import Block
from attnlab.config import build
from attnlab.context import Context
from attnlab.models.inputs.embedding import Projection
from attnlab.models.stack import Stack
from attnlab.testing.noise import noise
from attnlab.zoo import ZOO


@pytest.mark.parametrize(('recipe', 'sizes'), [('mha', {'heads': 2}), ('s4d', {})])
def test_silence_at_the_start_of_a_row_leaves_gradients_as_they_are(recipe, sizes):
    """A token of zeros would be zero in all layers, whose norms multiply the gradient by a thousand each."""
    dim, length, silent = 32, 64, 16
    inputs = Projection(1, dim, features=1, rngs=nnx.Rngs(1))
    block = functools.partial(Block, mixer=functools.partial(build(ZOO[recipe].spec), **sizes))
    stack = Stack(dim, depth=6, blocks=(block,), rngs=nnx.Rngs(0))

    @nnx.jit
    def gradient(parts, x):
        def loss(parts):
            hidden, _ = parts[1](parts[0](x), Context.full(1, length))
            return jnp.sum(hidden * jax.lax.rsqrt(jnp.mean(hidden**2, axis=-1, keepdims=True) + 1e-6) * weights)

        return jax.tree.reduce(lambda total, leaf: total + jnp.sum(leaf**2), nnx.grad(loss)(parts), 0.0) ** 0.5

    weights = noise(1, length, dim, seed=1)
    sound = noise(1, length, 1, seed=2)
    silence = jnp.where(jnp.arange(length)[None, :, None] < silent, 0, sound)
    parts = nnx.List([inputs, stack])
    assert gradient(parts, silence) < 3 * gradient(parts, sound)
    np.testing.assert_allclose(np.abs(inputs.linear.bias[...]).max(), 1, atol=0.1)
