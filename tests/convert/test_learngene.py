"""Layers that are linear in their place, and models of other depths made of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from rich.console import Console

from attnlab.analysis.between import symmetries
from attnlab.analysis.editing import Edit, Editor
from attnlab.blocks.block import Block
from attnlab.blocks.hyper_connections import HyperConnections
from attnlab.config import build, spec
from attnlab.context import Context
from attnlab.convert.learngene import expanded
from attnlab.errors import UserError
from attnlab.mixers.softmax.attention import Attention
from attnlab.models.heads.language import LanguageHead
from attnlab.models.model import Model
from attnlab.models.stack import LinearStack, Stack
from attnlab.nn.mlps import GatedMLP
from attnlab.quantize.formats import Affine, Symmetric
from attnlab.quantize.layers import Quantization
from attnlab.quantize.training import Rounded
from attnlab.runs.loading import load_run
from attnlab.train.launch import launch
from attnlab.train.setup import prepare
from attnlab.train.state import joined
from configs import images

DIM = 8
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 11, (2, 6)), jnp.int32)


def model(kind=LinearStack, depth=4, loop='unroll', period=1, **options):
    block = spec(Block, mixer=spec(Attention, heads=2, bias=True), mlp=spec(GatedMLP, hidden=12))
    stack = spec(kind, depth=depth, blocks=(block,) * period, loop=loop, **options)
    made = spec(Model, dim=DIM, stack=stack, head=spec(LanguageHead), dtype='float32')
    return build(made)(11, rngs=nnx.Rngs(0))


def moved(made):
    """The model with slopes that are not zero anywhere."""
    params = nnx.state(made, nnx.Param)
    nnx.update(made, jax.tree.map(lambda leaf: leaf + 0.1 * jnp.sin(jnp.arange(leaf.size)).reshape(leaf.shape), params))
    return made


def outputs(made):
    return made.logits(made.hidden(TOKENS, Context.full(2, 6))[0])


def assert_same(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_layers_are_linear_in_their_place():
    made = moved(model())
    pair = np.asarray(made.stack.blocks[0].mixer.query.weight)
    assert pair.shape[0] == 2
    for place, layer in enumerate(made.stack.layers()):
        np.testing.assert_allclose(layer.mixer.query.weight, pair[0] + place / 4 * pair[1], rtol=1e-5)
        bias = np.asarray(made.stack.blocks[0].mixer.query.bias)
        np.testing.assert_allclose(layer.mixer.query.bias, bias[0] + place / 4 * bias[1], rtol=1e-5)


def test_slopes_of_vectors_start_at_zero_and_those_of_matrices_do_not():
    block = model().stack.blocks[0]
    assert not np.asarray(block.mixer_norm.scale)[1].any() and np.asarray(block.mixer_norm.scale)[0].all()
    assert np.asarray(block.mixer.query.weight)[1].any()


def test_a_scan_is_the_unrolled_loop():
    assert_same(outputs(moved(model(loop='scan', period=2))), outputs(moved(model(period=2))))


@pytest.mark.parametrize('period', [1, 2])
def test_at_its_own_depth_the_expansion_is_the_model(period):
    made = moved(model(period=period))
    grown = expanded(made, 4)
    assert type(grown.stack) is Stack and isinstance(made.stack, LinearStack)
    assert_same(outputs(grown), outputs(made))


def test_other_depths_are_on_the_same_line():
    made = moved(model())
    pair = np.asarray(made.stack.blocks[0].mlp.up.weight)
    grown = expanded(made, 6)
    layers = list(grown.stack.layers())
    assert len(layers) == 6
    for place, layer in enumerate(layers):
        np.testing.assert_allclose(layer.mlp.up.weight, pair[0] + place / 6 * pair[1], rtol=1e-5)
    np.testing.assert_array_equal(expanded(made, 1).stack.blocks[0].mlp.up.weight[0], pair[0])


def test_both_have_gradients():
    made = moved(model())
    gradients = nnx.grad(lambda made: jnp.mean(jnp.square(outputs(made))))(made)
    for leaf in jax.tree.leaves(gradients['stack']):
        assert leaf.shape[0] == 2 and np.abs(np.asarray(leaf)).reshape(2, -1).max(axis=1).all()


@pytest.mark.slow
def test_a_run_begins_with_layers_of_another(tmp_path):
    """Of another depth: what it begins with is the expansion of what the other ended with, random features too."""
    arguments = 'data=digits,zoo=performer,layers=linear'
    first = shortened(images.get_config(arguments))
    launch(first, tmp_path / 'gene', console=Console(quiet=True))
    second = shortened(images.get_config(f'data=digits,zoo=performer,learngene={tmp_path / "gene"}'))
    with second.unlocked():
        second.model.stack.depth = 3
    gene = load_run(tmp_path / 'gene').model()
    setup = prepare(second)
    state = setup.initialize()
    made = nnx.merge(setup.graphdef, joined(state.params, state.buffers))
    grown = expanded(gene, 3)
    assert jax.tree.leaves(state.buffers)
    for mine, other in zip(jax.tree.leaves(nnx.state(made)), jax.tree.leaves(nnx.state(grown)), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-7)


def shortened(config):
    with config.unlocked():
        config.steps, config.batch_size, config.evals, config.checkpoint.every = 2, 4, (), 2
    return config


def test_mistakes_are_named():
    with pytest.raises(UserError, match='a Stack has no base and slope to expand; train one with layers=linear'):
        expanded(model(Stack), 2)
    with pytest.raises(UserError, match='depth is 1; the pattern of the stack has 2 layers'):
        expanded(model(period=2), 1)
    with pytest.raises(UserError, match='HyperConnections has a connection a layer'):
        model(residual=spec(HyperConnections))
    with pytest.raises(UserError, match='layers of a LinearStack share two sets of parameters'):
        model().stack.take_apart()
    for change in (
        Quantization(Symmetric(8)),
        Rounded(weights=Symmetric(8)).packed,
        symmetries,
        lambda made: Editor(made, Edit(layer=1), at=1, asked=3),
    ):
        with pytest.raises(UserError, match='layers of a LinearStack share two sets of parameters'):
            change(model())
    with pytest.raises(UserError, match='layers=linear is of layers of one width; it needs layout=flat, not pyramid'):
        images.get_config('layers=linear,layout=pyramid')


def test_inputs_of_few_bits_leave_layers_linear():
    """Parameters stay what they were; a model of layers of their own is quantized alike."""
    how = Quantization(inputs=Affine(8))
    made = moved(model())
    assert_same(outputs(how(nnx.clone(made))), outputs(how(expanded(made, 4))))
