"""Blocks with one set of attention weights: against plain blocks, and in a stack."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from ml_collections import ConfigDict

from attnlab.blocks.block import Block, mixer_of, stages
from attnlab.blocks.layer import WholeLayers
from attnlab.blocks.softmax_only import SoftmaxOnlyBlock
from attnlab.blocks.unified import UnifiedBlocks
from attnlab.config import build, spec
from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.mixers.softmax.attention import Attention
from attnlab.models.stack import stack_spec
from attnlab.nn.mlps import MLP, GatedMLP
from attnlab.nn.positions import Rope
from attnlab.testing.noise import noise
from attnlab.testing.tolerances import assert_close
from attnlab.zoo import ZOO


def blocks(layers: int, dim: int = 8, **kwargs) -> UnifiedBlocks:
    return UnifiedBlocks(dim, heads=2, layers=layers, rngs=nnx.Rngs(0), **kwargs)


@functools.partial(jax.jit, static_argnums=0)
def apply(graphdef, params, *args):
    return nnx.merge(graphdef, params)(*args)


def run(module: nnx.Module, *args):
    return apply(*nnx.split(module), *args)


def plain(unified: UnifiedBlocks, index: int) -> Block:
    """The block of attention that a layer would be, with queries and keys of the leader."""

    def mixer(dim: int, *, rngs: nnx.Rngs) -> Attention:
        return Attention(dim, heads=2, position=unified.position, rngs=rngs)

    made = Block(8, mixer=mixer, mlp=GatedMLP, rngs=nnx.Rngs(1))
    layer = unified.layers[index]
    made.mixer.query, made.mixer.key = unified.query, unified.key
    made.mixer.value, made.mixer.output = layer.value, layer.output
    made.mixer_norm, made.mlp_norm, made.mlp = layer.mixer_norm, layer.mlp_norm, layer.mlp
    return made


def test_one_layer_is_a_plain_block():
    made, x, ctx = blocks(1, position=Rope()), noise(2, 7, 8), Context.full(2, 7)
    assert_close(run(made, x, ctx)[0], run(plain(made, 0), x, ctx)[0], dtype=x.dtype, reduction=56, what='y')


def test_layers_after_the_first_read_their_values_by_its_weights():
    made, x, ctx = blocks(3, position=Rope()), noise(2, 7, 8), Context.full(2, 7)
    leader = plain(made, 0)
    weights, _ = leader.mixer.read_weights(leader.mixer_norm(x), ctx)
    expected, _ = leader(x, ctx)
    for index in (1, 2):
        layer = made.layers[index]
        assert not layer.compensation.weight[...].any()
        layer.compensation.weight[...] = noise(8, 8) / index
        normed = layer.mixer_norm(expected)
        v = layer.value(normed).reshape(2, 7, 2, 4)
        read = jnp.einsum('bhts,bshv->bthv', weights, v).reshape(2, 7, 8)
        expected = expected + layer.output(read) + normed @ (noise(8, 8) / index)
        expected = expected + layer.mlp(layer.mlp_norm(expected))
    assert_close(made(x, ctx)[0], expected, dtype=x.dtype, reduction=56 * 3, what='y')


def test_only_the_leader_keeps_keys():
    state = blocks(3).init_state(2, 9, jnp.bfloat16)
    assert [each.entries.keys.shape[-1] for each in state] == [4, 0, 0]
    assert [each.entries.values.shape[-1] for each in state] == [4, 4, 4]


@pytest.mark.parametrize(
    ('kwargs', 'message'),
    [
        ({'heads': 3}, 'heads is 3; it must divide dim, which is 8'),
        ({'heads': 2, 'kv_heads': 3}, 'kv_heads is 3; it must divide heads, which is 2'),
        ({'heads': 2, 'layers': 0}, 'layers is 0'),
    ],
)
def test_sizes_that_do_not_fit_are_named(kwargs: dict, message: str):
    with pytest.raises(UserError, match=message):
        UnifiedBlocks(8, **kwargs, rngs=nnx.Rngs(0))


def stack_of_unified(*, depth: int, mlp: ConfigDict | None) -> ConfigDict:
    (mixer,) = ZOO['uniattn'].sized(heads=2, window=4)
    mixer.layers = 2
    return stack_spec((mixer,), layer=WholeLayers(), depth=depth, mlp=mlp)


def test_a_stack_counts_the_layers_inside():
    stacks = [stack_of_unified(depth=depth, mlp=None) for depth in (1, 4, 5)]
    assert [stack.depth for stack in stacks] == [1, 2, 3]
    # Of a depth that groups do not divide the last group has what is left.
    assert [block.layers for stack in stacks for block in stack.blocks] == [1, 2, 2, 2, 1]
    (aero,), (unified,) = (ZOO[name].sized(heads=2, window=4) for name in ('aero', 'uniattn'))
    assert stack_spec((aero,), layer=WholeLayers(), depth=3, mlp=spec(GatedMLP)).depth == 3
    assert stack_spec((unified, aero), layer=WholeLayers(), depth=10, mlp=spec(GatedMLP)).depth == 4


@pytest.mark.parametrize(('mlp', 'kind'), [(spec(MLP, hidden=12), MLP), (None, type(None))], ids=['mlp', 'none'])
def test_a_stack_hands_its_channel_mixer_on(mlp: ConfigDict | None, kind: type):
    made = build(stack_of_unified(depth=2, mlp=mlp))(8, rngs=nnx.Rngs(0))
    assert [type(layer.mlp) for block in made.layers() for layer in block.layers] == [kind, kind]


def test_a_stack_of_whole_blocks_runs_scanned_and_unrolled_and_streams():
    x, ctx = noise(2, 7, 8), Context.full(2, 7)
    stack = build(stack_of_unified(depth=4, mlp=spec(MLP, hidden=12)))(8, rngs=nnx.Rngs(0))
    expected = x
    for block in stack.layers():
        expected, _ = run(block, expected, ctx)
    for loop in ('unroll', 'scan'):
        stack.loop = loop
        y, none = run(stack, x, ctx)
        assert none is None
        assert_close(y, expected, dtype=x.dtype, reduction=56 * 4, what=loop)
    state = stack.init_state(2, 7, x.dtype)
    first, state = run(stack, x[:, :3], Context.full(2, 3), state)
    second, state = run(stack, x[:, 3:], Context.full(2, 4, start=3), state)
    assert_close(jnp.concatenate([first, second], 1), expected, dtype=x.dtype, reduction=56 * 4, what='streamed')


def test_reports_name_the_layers_inside_and_take_other_whole_blocks_as_one_stage():
    made, x, ctx = blocks(2), noise(2, 7, 8), Context.full(2, 7)
    *inside, last = stages(made, x, ctx)
    branches = [f'layers[{index}].{branch}' for index in (0, 1) for branch in ('mixer', 'mlp')]
    assert [stage.name for stage in inside] == [name for branch in branches for name in (f'{branch}_norm', branch)]
    assert last.name == 'residual' and mixer_of(made) is made
    np.testing.assert_array_equal(last.value, made(x, ctx)[0])
    whole = SoftmaxOnlyBlock(8, heads=2, rngs=nnx.Rngs(0))
    (stage,) = stages(whole, x, ctx)
    assert stage.name == 'residual' and mixer_of(whole) is whole
    np.testing.assert_array_equal(stage.value, whole(x, ctx)[0])
