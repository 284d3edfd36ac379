"""Projections, norms, channel mixers and embeddings against their equations."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.errors import UserError
from attnlab.models.inputs.embedding import Embedding
from attnlab.nn.activations import ACTIVATIONS, activation
from attnlab.nn.convolutions import Conv
from attnlab.nn.gates import SliceMLPGate
from attnlab.nn.mlps import MLP, GatedMLP, NormedGatedMLP
from attnlab.nn.norms import HeadOffsetRMSNorm, OffsetRMSNorm, RMSNorm
from attnlab.nn.projections import BlockDiagonal, Linear
from attnlab.testing.noise import noise, perturbed


def test_linear_is_a_product_and_a_bias():
    linear = Linear(3, 2, bias=True, rngs=nnx.Rngs(0))
    linear.weight[...] = jnp.asarray([[1.0, 0.0], [0.0, 2.0], [3.0, 0.0]])
    linear.bias[...] = jnp.asarray([10.0, 20.0])
    y = linear(jnp.asarray([[[1.0, 2.0, 3.0]], [[0.0, 0.0, 1.0]]]))
    np.testing.assert_array_equal(y, [[[20.0, 24.0]], [[13.0, 20.0]]])


def test_linear_takes_any_leading_axes_and_keeps_the_type():
    linear = Linear(3, 2, rngs=nnx.Rngs(0))
    assert linear(noise(3)).shape == (2,)
    assert linear(noise(2, 4, 5, 3)).shape == (2, 4, 5, 2)
    assert linear(noise(4, 3).astype(jnp.bfloat16)).dtype == jnp.bfloat16


def test_linear_keeps_the_scale_of_white_noise():
    y = Linear(512, 256, rngs=nnx.Rngs(0))(noise(64, 512))
    assert 0.95 < float(jnp.std(y)) < 1.05


@pytest.mark.parametrize(
    ('make', 'shape'),
    [
        (partial(Linear, 16, 4, bias=True), (64, 128, 16)),
        (partial(BlockDiagonal, 16, blocks=2), (64, 128, 16)),
        (partial(SliceMLPGate, 16, heads=2, channels=8), (64, 128, 16)),
        (partial(Conv, 3, 4, width=3, step=1), (4, 48, 48, 3)),
    ],
    ids=['linear', 'block_diagonal', 'slice_mlp_gate', 'conv'],
)
def test_gradients_of_biases_are_summed_over_tokens_in_float32(make, shape):
    """In bfloat16 a sum of ones stands still at 256."""
    module, x = make(rngs=nnx.Rngs(0)), (1 + noise(*shape)).astype(jnp.bfloat16)
    gradient = nnx.jit(nnx.grad(lambda module, x: jnp.sum(jnp.square(module(x)).astype(jnp.float32))))
    found, expected = (jax.tree.leaves(gradient(module, each)) for each in (x, x.astype(jnp.float32)))
    for ours, theirs in zip(found, expected, strict=True):
        assert np.linalg.norm(ours - theirs) < 0.06 * np.linalg.norm(theirs)


def test_linear_names_axes_and_groups():
    linear = Linear(3, 2, bias=True, axes=('embed', 'mlp'), rngs=nnx.Rngs(0))
    assert linear.weight.get_metadata()['axes'] == ('embed', 'mlp')
    assert linear.weight.get_metadata()['group'] == 'matrix'
    assert linear.bias.get_metadata()['axes'] == ('mlp',)
    assert linear.bias.get_metadata()['group'] == 'vector'


def test_block_diagonal_keeps_blocks_apart():
    linear = BlockDiagonal(4, blocks=2, rngs=nnx.Rngs(0))
    linear.weight[...] = jnp.asarray([[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]]])
    linear.bias[...] = jnp.asarray([0.0, 0.0, 0.5, 0.0])
    np.testing.assert_array_equal(linear(jnp.asarray([[[1.0, 10.0, 1.0, 100.0]]]))[0, 0], [31.0, 42.0, 705.5, 806.0])
    assert BlockDiagonal(512, blocks=2, rngs=nnx.Rngs(0)).weight[...].std() == pytest.approx(256**-0.5, rel=0.02)


def test_gradients_of_blocks_are_summed_in_float32():
    """Of ones, over more tokens than a sum in bfloat16 can count."""
    graphdef, params = nnx.split(BlockDiagonal(16, blocks=4, rngs=nnx.Rngs(0)))
    x = jnp.ones((1, 2048, 16), jnp.bfloat16)
    gradients = jax.jit(jax.grad(lambda params: jnp.sum(nnx.merge(graphdef, params)(x).astype(jnp.float32))))(params)
    assert (np.asarray(gradients['weight'][...]) == 2048).all() and (np.asarray(gradients['bias'][...]) == 2048).all()


def test_blocks_multiply_in_bfloat16():
    """With sums in float32, which XLA for CPUs cannot do in every order of the operands."""
    graphdef, params = nnx.split(BlockDiagonal(64, blocks=4, rngs=nnx.Rngs(0)))
    x = noise(2, 16, 64, seed=1, dtype=jnp.bfloat16)
    y = np.asarray(jax.jit(lambda params, x: nnx.merge(graphdef, params)(x))(params, x), np.float32)
    blocks = np.einsum('bthf,hfv->bthv', np.asarray(x, np.float32).reshape(2, 16, 4, 16), params['weight'][...])
    np.testing.assert_allclose(y, blocks.reshape(2, 16, 64), atol=0.05)


def test_rms_norm_by_hand():
    norm = RMSNorm(2, eps=0.0, rngs=nnx.Rngs(0))
    norm.scale[...] = jnp.asarray([1.0, 10.0])
    y = norm(jnp.asarray([[3.0, 4.0], [0.0, -2.0]]))
    root = 12.5**0.5
    np.testing.assert_allclose(y, [[3.0 / root, 40.0 / root], [0.0, -10.0 * 2.0**0.5]], rtol=1e-6)


def test_rms_norm_of_zeros_is_zero():
    np.testing.assert_array_equal(RMSNorm(4, rngs=nnx.Rngs(0))(jnp.zeros((2, 4))), 0)


def test_rms_norm_takes_its_statistics_in_float32():
    x = 300.0 * noise(3, 5, 2, 8).astype(jnp.float16)
    y = RMSNorm(8, rngs=nnx.Rngs(0))(x)
    assert y.dtype == jnp.float16
    wide = np.asarray(x, np.float64)
    expected = wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True))
    np.testing.assert_allclose(np.asarray(y, np.float64), expected, rtol=2e-3)


def test_gated_mlp_is_its_equation():
    mlp, x = GatedMLP(4, hidden=6, rngs=nnx.Rngs(0)), noise(2, 3, 4)
    gate, up = x @ mlp.gate.weight[...], x @ mlp.up.weight[...]
    np.testing.assert_allclose(mlp(x), (gate * jax.nn.sigmoid(gate) * up) @ mlp.down.weight[...], rtol=1e-5, atol=1e-6)


def test_normed_gated_mlp_is_its_equation():
    mlp, x = perturbed(NormedGatedMLP(4, hidden=6, rngs=nnx.Rngs(0))), noise(2, 3, 4)
    scale, bias = (np.asarray(each[...]) for each in (mlp.norm.scale, mlp.norm.bias))

    def mapped(part, y):
        return y @ np.asarray(part.weight[...]) + np.asarray(part.bias[...])

    def normed(y):
        unit = (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + 1e-5)
        return unit * scale + bias

    gate, up = (mapped(part, np.asarray(x)) for part in (mlp.gate, mlp.up))
    hidden = normed(np.asarray(jax.nn.gelu(gate, approximate=False))) * normed(up)
    np.testing.assert_allclose(mlp(x), mapped(mlp.down, hidden), rtol=1e-4, atol=1e-5)


def test_mlp_is_its_equation():
    mlp, x = MLP(4, activation='relu_squared', rngs=nnx.Rngs(0)), noise(2, 3, 4)
    hidden = jnp.maximum(x @ mlp.up.weight[...], 0) ** 2
    np.testing.assert_allclose(mlp(x), hidden @ mlp.down.weight[...], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(('dim', 'hidden'), [(24, 64), (128, 384), (192, 512), (768, 2048)])
def test_the_hidden_width_is_a_multiple_of_64(dim: int, hidden: int):
    assert nnx.eval_shape(lambda: GatedMLP(dim, rngs=nnx.Rngs(0))).up.weight.shape == (dim, hidden)


def test_an_unknown_activation_is_named_with_the_nearest():
    with pytest.raises(UserError, match="no activation 'gleu'; did you mean 'gelu'"):
        MLP(4, activation='gleu', rngs=nnx.Rngs(0))


@pytest.mark.parametrize('name', ACTIVATIONS)
def test_activations_keep_the_type(name: str):
    assert activation(name)(jnp.ones(2, jnp.bfloat16)).dtype == jnp.bfloat16


def test_an_embedding_looks_rows_up():
    embedding = Embedding(3, 2, rngs=nnx.Rngs(0))
    embedding.weight[...] = jnp.asarray([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]])
    y = embedding(jnp.asarray([[2, 0, 2]]), jnp.bfloat16)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(y, np.float32), [[[4.0, 5.0], [0.0, 1.0], [4.0, 5.0]]])
    assert embedding.weight.get_metadata()['group'] == 'embedding'


def test_a_token_outside_the_vocabulary_gives_nan_in_a_compiled_program():
    y = jax.jit(Embedding(3, 2, rngs=nnx.Rngs(0)))(jnp.asarray([[1, 3, -1]]))
    assert np.isfinite(y[0, 0]).all() and np.isnan(y[0, 1:]).all()


@pytest.mark.parametrize('norm', [OffsetRMSNorm(6, rngs=nnx.Rngs(0)), HeadOffsetRMSNorm(6, heads=3, rngs=nnx.Rngs(0))])
def test_gains_beside_one_are_gains(norm):
    x, plain = noise(2, 4, 3, 6), RMSNorm(6, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(norm(x), plain(x))
    norm.offset[...] = noise(6, seed=1)
    plain.scale[...] = 1 + noise(6, seed=1)
    np.testing.assert_array_equal(norm(x), plain(x))
