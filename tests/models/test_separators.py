"""Separators against their written definition: frames, what they see, gradients and sizes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.test_util import check_grads

from attnlab.blocks.block import Block
from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.functional.separation import si_snr
from attnlab.mixers.softmax.attention import Attention
from attnlab.models.predictor import Predictor, Stacked
from attnlab.models.separators import ConvTasNet, StackSeparator
from attnlab.models.stack import Stack
from attnlab.nn.convolutions import DilatedConv
from attnlab.nn.norms import CumulativeLayerNorm, GlobalLayerNorm, LayerNorm, RMSNorm
from attnlab.testing.noise import noise, perturbed

SIZES = {'dim': 4, 'features': 6, 'frame': 4, 'hidden': 5, 'skip': 3, 'blocks': 3, 'repeats': 2}
SAMPLES = 21


def conv(dtype='float32', **options):
    return perturbed(ConvTasNet(2, **{**SIZES, **options}, dtype=dtype, rngs=nnx.Rngs(0)))


def stacked(causal=False, norm=RMSNorm, **options):
    block = functools.partial(Block, mixer=functools.partial(Attention, heads=2, causal=causal), mlp=None, norm=norm)
    stack = functools.partial(Stack, depth=1, blocks=(block,))
    sizes = {'dim': 8, 'stack': stack, 'features': 6, 'frame': 4, 'causal': causal}
    return perturbed(StackSeparator(2, **sizes, **options, dtype='float32', rngs=nnx.Rngs(0)))


def separated(model, x):
    return model.hidden(x, Context.full(*x.shape[:2]))[0]


@pytest.mark.parametrize('samples', [SAMPLES, 20])
def test_frames_put_every_sample_into_two_and_are_added_up(samples):
    """With masks of one and a transform that is the identity, estimates are twice the mixture; by hand otherwise."""
    model, x = conv(features=4), noise(2, samples, 1)
    assert model.frames(samples) == -(-samples // 2) + 1
    encoded = model.encode(x)
    weight = np.asarray(model.encoder.weight[...])
    padded = np.pad(np.asarray(x)[:, :, 0], ((0, 0), (2, 4)))
    frames = np.stack([padded[:, first : first + 4] for first in range(0, 2 * model.frames(samples), 2)], axis=1)
    np.testing.assert_allclose(encoded, frames @ weight, atol=1e-5)

    for one in (model.encoder, model.decoder):
        one.weight[...] = jnp.eye(4)
    whole = jnp.broadcast_to(model.encode(x)[:, :, None], (2, model.frames(samples), 2, 4))
    np.testing.assert_allclose(model.decode(whole, samples), np.tile(2 * x.swapaxes(1, 2), (1, 2, 1)), atol=1e-5)


@pytest.mark.parametrize(('model', 'is_stacked'), [(conv, False), (stacked, True)])
def test_estimates_follow_the_protocol(model, is_stacked):
    model, x = model(), noise(2, SAMPLES, 1)
    assert isinstance(model, Predictor) and isinstance(model, Stacked) == is_stacked and model.outputs == 2
    found = separated(model, x)
    assert found.shape == (2, 2, SAMPLES) and found.dtype == jnp.float32
    *_, last = model.stages(x, Context.full(2, SAMPLES))
    np.testing.assert_allclose(last.value, found, atol=1e-5)
    # Of sources in any order.
    sources = noise(2, 2, SAMPLES, seed=1)
    losses = model.losses(found, sources)
    assert losses.shape == (2, 2)
    np.testing.assert_allclose(model.losses(found, sources[:, ::-1]), losses, atol=1e-4)
    kept, swapped = (-np.asarray(si_snr(found, one)).sum(axis=1) for one in (sources, sources[:, ::-1]))
    np.testing.assert_allclose(losses.sum(axis=1), np.minimum(kept, swapped), atol=1e-4)


def test_blocks_read_a_map_of_what_a_norm_made_of_the_transform():
    """The norm is over the features of the transform, as in the paper and the released code."""
    model, encoded = conv(), 3 * noise(2, 5, SIZES['features']) + 1
    wide = np.asarray(encoded, np.float64)
    mean, deviation = (of(wide, axis=(1, 2), keepdims=True) for of in (np.mean, np.std))
    scale, shift, weight, bias = (
        np.asarray(one[...])
        for one in (model.encoded_norm.scale, model.encoded_norm.bias, model.bottleneck.weight, model.bottleneck.bias)
    )
    first = next(model.reading(encoded, Context.full(2, 5)))
    assert first.name == 'bottleneck'
    np.testing.assert_allclose(first.value, ((wide - mean) / deviation * scale + shift) @ weight + bias, atol=1e-4)


@pytest.mark.parametrize('causal', [False, True])
def test_the_receptive_field_is_as_long_as_the_paper_says(causal):
    """By gradients, of frames: of norms of one frame each, `1 + repeats (width - 1) (2^blocks - 1)`, exactly."""
    field = 1 + 2 * 2 * (2**3 - 1)
    model = conv(causal=causal, norm=LayerNorm)
    encoded, middle = noise(1, 2 * field + 1, 6), field
    ctx = Context.full(1, encoded.shape[1])
    gradient = jax.grad(lambda one: jnp.sum(jnp.sin(model.read(one, ctx)[:, middle])))(encoded)
    seen = np.flatnonzero(np.abs(gradient).max(axis=(0, 2)))
    first = middle - (field - 1 if causal else field // 2)
    np.testing.assert_array_equal(seen, np.arange(first, first + field))


def test_norms_look_over_the_row_or_back_alone():
    x = 3 * noise(2, 5, 4) + 1
    wide = np.asarray(x, np.float64)
    whole, past = (perturbed(kind(4, rngs=nnx.Rngs(0))) for kind in (GlobalLayerNorm, CumulativeLayerNorm))
    for norm in (whole, past):
        scale, bias = np.asarray(norm.scale[...]), np.asarray(norm.bias[...])
        expected = np.empty_like(wide)
        for t in range(5):
            rows = wide if norm is whole else wide[:, : t + 1]
            mean, variance = rows.mean(axis=(1, 2)), rows.var(axis=(1, 2))
            expected[:, t] = (wide[:, t] - mean[:, None]) / np.sqrt(variance[:, None] + 1e-8) * scale + bias
        np.testing.assert_allclose(norm(x), expected, rtol=1e-4, atol=1e-4)
    # Numbers that are all the same have a variance that rounds to less than nothing.
    assert np.isfinite(past(jnp.full((1, 50, 4), 0.1))).all()


@pytest.mark.parametrize('make', [functools.partial(conv, norm=CumulativeLayerNorm), stacked])
def test_a_causal_model_does_not_look_ahead(make):
    """An estimate is of frames that end a frame later at most, less a sample."""
    model, x = make(causal=True), noise(1, SAMPLES, 1)
    gradient = jax.grad(lambda x: jnp.sum(separated(model, x)[:, :, 8]))(x)
    seen = np.flatnonzero(np.abs(gradient).max(axis=(0, 2)))
    assert seen[0] == 0 and seen[-1] == 11


@pytest.mark.parametrize(
    ('make', 'place'),
    [
        (functools.partial(conv, norm=GlobalLayerNorm), 'blocks.0.norms.0 of ConvTasNet'),
        (functools.partial(stacked, norm=GlobalLayerNorm), 'stack.blocks.0.mixer_norm of StackSeparator'),
    ],
)
def test_a_causal_model_has_no_part_that_looks_ahead(make, place):
    make(causal=False)
    said = f'{place} is GlobalLayerNorm, which looks at later tokens; causal=True needs another part'
    with pytest.raises(UserError, match=said):
        make(causal=True)


def test_a_dilated_convolution_by_hand():
    x = noise(1, 9, 2)
    for causal in (False, True):
        layer = perturbed(DilatedConv(2, width=3, dilation=2, causal=causal, rngs=nnx.Rngs(0)))
        taps, bias = np.asarray(layer.taps[...]), np.asarray(layer.bias[...])
        padded = np.pad(np.asarray(x[0]), ((4, 0) if causal else (2, 2), (0, 0)))
        expected = [sum(taps[i] * padded[t + 2 * i] for i in range(3)) + bias for t in range(9)]
        np.testing.assert_allclose(layer(x)[0], expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(UserError, match='width of DilatedConv is 4; it must be odd, to be centred'):
        DilatedConv(2, width=4, causal=False, rngs=nnx.Rngs(0))


def test_gradients_are_those_of_differences():
    with jax.enable_x64(True):
        model = conv('float64', blocks=2, repeats=1)
        graphdef, params = nnx.split(model)
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), params)
        x, sources = (noise(1, *shape, dtype=jnp.float64) for shape in ((9, 1), (2, 9)))

        def loss(params, x):
            model = nnx.merge(graphdef, params)
            return jnp.sum(model.losses(separated(model, x), sources))

        check_grads(jax.jit(loss), (params, x), order=1, modes=('rev',), rtol=1e-6, atol=1e-6, eps=1e-6)
        # Nothing is left without a gradient.
        leaves = jax.tree.leaves_with_path(jax.jit(jax.grad(loss))(params, x))
        assert [jax.tree_util.keystr(path) for path, leaf in leaves if np.abs(leaf).max() < 1e-6] == []


def test_the_sizes_of_the_paper_have_its_parameters():
    """5.1 million, of which the released code has a map that nothing reads."""
    abstract = nnx.eval_shape(lambda: ConvTasNet(2, dtype='float32', rngs=nnx.Rngs(0)))
    found = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(abstract, nnx.Param)))
    assert found + 128 * 512 + 128 == 5_050_545


@pytest.mark.parametrize(
    ('make', 'sentence'),
    [
        (lambda: conv(frame=5), 'frame of ConvTasNet is 5; it must be even'),
        (lambda: conv(activation='rel'), "there is no activation 'rel'"),
        (lambda: conv().encode(noise(1, 8, 2)), 'mixtures of the task have 2 channels; a ConvTasNet reads one'),
        (lambda: conv().sample(noise(1, 2), jax.random.key(0), temperature=1.0, top_p=1.0), 'predicts signals'),
    ],
)
def test_mistakes_are_named(make, sentence):
    with pytest.raises(UserError, match=sentence):
        make()
