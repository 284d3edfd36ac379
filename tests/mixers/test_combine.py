"""Mixers side by side: the sum of what they give alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import attnlab
from attnlab.config import build, spec
from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.mixers.combine import Backwards, SideBySide
from attnlab.mixers.convolution.gated import GatedConvolution
from attnlab.mixers.softmax.attention import Attention
from attnlab.nn.dense_maps import GumbelSoftmax
from attnlab.nn.norms import RMSNorm
from attnlab.nn.positions import Rope
from attnlab.testing.noise import noise, perturbed
from attnlab.zoo import ZOO
from attnlab.zoo.chosen import convolved

CONV = spec(GatedConvolution)


def made(**overrides) -> SideBySide:
    return perturbed(build(spec(SideBySide, mixers=(CONV, CONV), **overrides))(8, rngs=nnx.Rngs(0)), 0.1)


@pytest.mark.parametrize('norm', [None, spec(RMSNorm)])
def test_the_output_is_the_scaled_sum_and_states_are_those_of_the_mixers(norm):
    with jax.enable_x64(True):
        mixer = made(norm=norm, scales=(0.5, -2.0))
        x, ctx = noise(2, 6, 8, dtype=jnp.float64), Context.full(2, 6)
        state = mixer.init_state(2, 6, jnp.float64)
        y, advanced = mixer(x, ctx, state)
        expected = np.zeros(x.shape)
        for index, inner in enumerate(mixer.mixers):
            alone, inner_state = inner(x, ctx, state[index])
            found = np.asarray(alone, np.float64)
            if norm is not None:
                scale = np.asarray(mixer.norms[index].scale[...], np.float64)
                found = found / np.sqrt((found**2).mean(-1, keepdims=True) + mixer.norms[index].eps) * scale
            expected += mixer.scales[index] * found
            jax.tree.map(np.testing.assert_array_equal, advanced[index], inner_state)
        np.testing.assert_allclose(y, expected, rtol=1e-6 if norm is not None else 1e-12)


def test_a_mixer_of_scale_zero_is_left_out():
    mixer = made(scales=(1.0, 0.0))
    x, ctx = noise(1, 4, 8), Context.full(1, 4)
    np.testing.assert_array_equal(mixer(x, ctx)[0], mixer.mixers[0](x, ctx)[0])


def test_scales_are_a_mean_or_one_a_mixer():
    assert made().scales == (0.5, 0.5)
    with pytest.raises(UserError, match='2 mixers and 1 scales'):
        made(scales=(1.0,))


def test_hymba_without_its_attention_is_half_of_a_normed_mamba():
    mixer = perturbed(attnlab.make_mixer('hymba', 16, heads=2, state=4, rngs=nnx.Rngs(0)), 0.1)
    attention, mamba = mixer.mixers
    attention.output.weight[...] = jnp.zeros_like(attention.output.weight[...])
    x, ctx = noise(1, 4, 16), Context.full(1, 4)
    np.testing.assert_allclose(mixer(x, ctx)[0], mixer.norms[1](mamba(x, ctx)[0]) / 2, rtol=1e-6, atol=1e-7)


def test_convolutions_of_all_rows_reach_the_mixers_within():
    bare, canon = (convolved(ZOO['hymba'], conv).pattern[0].mixers for conv in ('none', 'B'))
    assert [part.prelude and part.prelude.target.rpartition('.')[2] for part in bare] == [None, 'Activation']
    assert [part.prelude.target.rpartition('.')[2] for part in canon] == ['Canon', 'ShortConv']


def test_backwards_reads_every_document_from_its_end():
    mixer = perturbed(
        build(spec(Backwards, mixers=(spec(GatedConvolution), spec(Attention, heads=2, position=Rope()))))(
            8, rngs=nnx.Rngs(0)
        ),
        0.1,
    )
    x, segments = noise(1, 7, 8), jnp.asarray([[1, 1, 1, 2, 2, 2, 2]])
    positions = jnp.asarray([[0, 1, 2, 0, 1, 2, 3]])
    found = mixer(x, Context(positions=positions, segments=segments))[0]
    for start, stop in ((0, 3), (3, 7)):
        turned, ctx = x[:, start:stop][:, ::-1], Context.full(1, stop - start)
        expected = sum(np.asarray(each(turned, ctx)[0]) for each in mixer.mixers)
        np.testing.assert_allclose(found[:, start:stop], expected[:, ::-1], rtol=1e-4, atol=1e-5)


def test_backwards_is_kept_from_the_tokens_that_it_is_cut_from():
    mixer = build(spec(Backwards, mixers=(spec(Attention, heads=2),)))(8, rngs=nnx.Rngs(0))
    x, cut = noise(1, 6, 8), jnp.zeros((1, 6, 6), bool).at[0, 1, 4].set(True)
    reach = jax.jacobian(lambda x, ctx: jnp.sum(mixer(x, ctx)[0], axis=-1))
    plain, kept = (
        np.abs(reach(x, dataclasses.replace(Context.full(1, 6), cut=each))).sum(axis=(0, 2, 4)) for each in (None, cut)
    )
    assert plain[1, 4] > 1e-4 and kept[1, 4] < 1e-9 and kept[1, 3] > 1e-4 and np.array_equal(plain[0] > 0, kept[0] > 0)


def test_backwards_needs_mixers_and_keeps_no_state():
    with pytest.raises(UserError, match='Backwards has no mixers'):
        build(spec(Backwards, mixers=()))(8, rngs=nnx.Rngs(0))
    with pytest.raises(UserError, match='cannot be streamed'):
        build(spec(Backwards, mixers=(CONV,)))(8, rngs=nnx.Rngs(0)).init_state(1, 4, jnp.float32)


@pytest.mark.parametrize('around', [SideBySide, Backwards])
def test_mixers_in_one_layer_draw_numbers_of_their_own(around):
    """Two mixers of the same parameters give the same in evaluation, and other samples of it in training."""

    def one(dim, rngs):
        return Attention(dim, heads=2, weights=GumbelSoftmax, rngs=nnx.Rngs(0))

    def opposite(dim, rngs):
        mixer = one(dim, rngs)
        mixer.output.weight[...] = -mixer.output.weight[...]
        return mixer

    mixer = around(8, mixers=(one, opposite), rngs=nnx.Rngs(1))
    x, ctx = jax.random.normal(jax.random.key(0), (2, 6, 8)), Context.full(2, 6)
    training = dataclasses.replace(ctx, deterministic=False, dropout_key=jax.random.key(1))
    np.testing.assert_allclose(mixer(x, ctx)[0], 0, atol=1e-6)
    assert np.abs(mixer(x, training)[0]).max() > 0.01
