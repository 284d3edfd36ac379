"""Residual streams: the plain one adds, hyper-connections against their equations, and others that can be said."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.blocks.block import Block, steps
from attnlab.blocks.hyper_connections import HyperConnections
from attnlab.blocks.residual import Connection, Plain
from attnlab.blocks.softmax_only import SoftmaxOnlyBlock
from attnlab.config import build, spec
from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.mixers.softmax.attention import Attention
from attnlab.models.stack import Stack
from attnlab.nn.mlps import GatedMLP
from attnlab.nn.parameter import param
from attnlab.testing.noise import noise
from attnlab.testing.tolerances import assert_close
from attnlab.zoo import ZOO

DIM, DEPTH = 8, 3
HYPER = {
    'static': spec(HyperConnections, streams=3, dynamic=False),
    'dynamic': spec(HyperConnections, streams=3),
    'one stream': spec(HyperConnections, streams=1),
}


def stack(residual: Any, **settings: Any) -> Stack:
    """Three layers: two branches, one, two."""
    blocks = (
        spec(Block, mixer=spec(Attention, heads=2), mlp=spec(GatedMLP, hidden=12)),
        spec(Block, mixer=ZOO['mingru'].spec),
    )
    return build(spec(Stack, depth=DEPTH, blocks=blocks, residual=residual, **settings))(DIM, rngs=nnx.Rngs(0))


def moved(module: nnx.Module) -> nnx.Module:
    """The module with every parameter somewhere else than where it starts."""
    graphdef, state = nnx.split(module)
    leaves, tree = jax.tree.flatten(state)
    leaves = [leaf + 0.3 * noise(*leaf.shape, seed=number).astype(leaf.dtype) for number, leaf in enumerate(leaves)]
    return nnx.merge(graphdef, jax.tree.unflatten(tree, leaves))


@functools.partial(jax.jit, static_argnums=0)
def apply(graphdef: Any, params: Any, *args: Any) -> Any:
    return nnx.merge(graphdef, params)(*args)


def run(module: nnx.Module, *args: Any) -> Any:
    return apply(*nnx.split(module), *args)


def hyper_connected(made: Stack, x: jax.Array, ctx: Context) -> np.ndarray:
    """The stack by the equations of the paper, a token at a time but for the branches."""
    count = made.residual.streams
    h = np.stack([np.asarray(x)] * count, axis=2)
    for layer in made.layers():
        parts = [(layer.mixer_norm, lambda z, layer=layer: layer.mixer(z, ctx)[0])]
        parts += [(layer.mlp_norm, layer.mlp)] if layer.mlp is not None else []
        for (norm, branch), connection in zip(parts, layer.connections, strict=True):
            alpha, beta = (np.asarray(each[...]) for each in (connection.mixing, connection.writing))
            if connection.token is not None:
                token = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(connection.token)))
                z = h / np.sqrt(np.mean(h**2, axis=-1, keepdims=True) + 1e-6) * token['norm']['scale']
                alpha = alpha + token['mixing_scale'] * np.tanh(z @ token['mixing'])
                beta = beta + token['writing_scale'] * np.tanh(z @ token['writing'])[..., 0]
            mixed = np.swapaxes(alpha, -1, -2) @ h
            y = np.asarray(branch(norm(jnp.asarray(mixed[:, :, 0]))))
            h = mixed[:, :, 1:] + beta[..., None] * y[:, :, None]
    return h.sum(axis=2)


@pytest.mark.parametrize(
    'name', [name if name == 'dynamic' else pytest.param(name, marks=pytest.mark.slow) for name in HYPER]
)
def test_hyper_connections_are_their_equations_scanned_unrolled_and_streamed(name: str):
    x, ctx = noise(2, 6, DIM), Context.full(2, 6)
    made = moved(stack(HYPER[name]))
    expected = hyper_connected(made, x, ctx)
    close = functools.partial(assert_close, expected=expected, dtype=x.dtype, reduction=56 * DEPTH)
    for loop in ('unroll', 'scan'):
        made.loop = loop
        close(run(made, x, ctx)[0], what=loop)
    state = made.init_state(2, 6, x.dtype)
    first, state = run(made, x[:, :2], Context.full(2, 2), state)
    second, _ = run(made, x[:, 2:], Context.full(2, 4, start=2), state)
    close(jnp.concatenate([first, second], axis=1), what='streamed')


@pytest.mark.parametrize('name', HYPER)
def test_hyper_connections_start_as_a_plain_stack(name: str):
    x, ctx = noise(2, 6, DIM), Context.full(2, 6)
    made, plain = stack(HYPER[name]), stack(spec(Plain))
    expected, _ = run(plain, x, ctx)
    actual = run(made, x, ctx)[0] / made.residual.streams
    assert_close(actual, expected, dtype=x.dtype, reduction=56 * DEPTH, what='y')
    reads = [int(np.argmax(connection.mixing[:, 0])) for layer in made.layers() for connection in layer.connections]
    assert reads == [branch % made.residual.streams for branch in range(5)]


def test_every_coefficient_is_trained():
    x, ctx = noise(2, 6, DIM), Context.full(2, 6)
    graphdef, params = nnx.split(moved(stack(HYPER['dynamic'], remat=True)))
    found = jax.jit(jax.grad(lambda params: jnp.sum(nnx.merge(graphdef, params)(x, ctx)[0] ** 2)))(params)
    for place in (0, 1):
        leaves = jax.tree.leaves(found['blocks'][place]['connections'])
        assert len(leaves) == 7 * (2 - place) and all(np.all(np.any(leaf, axis=-1)) for leaf in leaves)


def test_a_plain_stack_has_the_parameters_of_its_blocks_alone():
    graphdef, params = nnx.split(stack(spec(Plain)))
    del graphdef
    paths = {
        jax.tree_util.keystr(path, simple=True, separator='/') for path, _ in jax.tree.flatten_with_path(params)[0]
    }
    assert paths and all(path.startswith('blocks/') and 'connections' not in path for path in paths)


class Scaled(Connection):
    """A branch's output times a number."""

    def __init__(self, gain: Any):
        self.gain = gain

    def read(self, streams: jax.Array) -> tuple[jax.Array, jax.Array]:
        return streams, streams

    def add(self, kept: jax.Array, y: jax.Array) -> jax.Array:
        return kept + self.gain * y


class Scaling(Plain):
    """By the number of branches there are, or learned and zero at first."""

    def __init__(self, dim: int, *, learned: bool, branches: int, rngs: nnx.Rngs):
        del dim, rngs
        self.learned, self.scale = learned, branches**-0.5

    def connection(self, index: Any, *, rngs: nnx.Rngs) -> Connection:
        if self.learned:
            return Scaled(param(nnx.initializers.zeros, (), axes=(), group='vector', rngs=rngs))
        return Scaled(self.scale)


@pytest.mark.parametrize('learned', [False, True], ids=['by depth', 'gated'])
def test_branches_may_be_scaled(learned: bool):
    x, ctx = noise(2, 6, DIM), Context.full(2, 6)
    made = stack(spec(Scaling, learned=learned))
    expected = x
    for layer in made.layers():
        for taken in steps(layer, expected, ctx):
            expected = expected + (0.0 if learned else 5**-0.5) * taken.output
            np.testing.assert_allclose(taken.streams, expected, rtol=1e-5, atol=1e-5)
    assert_close(run(made, x, ctx)[0], expected, dtype=x.dtype, reduction=56 * DEPTH, what='y')


def test_mistakes():
    with pytest.raises(UserError, match='streams is 0; it must be a whole number of at least 1'):
        stack(spec(HyperConnections, streams=0))
    whole = spec(Stack, depth=1, blocks=(spec(SoftmaxOnlyBlock, heads=2),), residual=HYPER['static'])
    with pytest.raises(UserError, match='SoftmaxOnlyBlock wires its own residual branches; use residual=Plain'):
        build(whole)(DIM, rngs=nnx.Rngs(0))
