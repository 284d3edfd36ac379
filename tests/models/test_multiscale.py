"""A pretrained forecaster read at several scales."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.blocks.block import Block
from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.mixers.softmax.attention import Attention
from attnlab.models.forecasters import StackForecaster
from attnlab.models.heads.multiscale import MultiscaleHead, pooled
from attnlab.models.inputs.series import VariatesApart
from attnlab.models.multiscale import MultiscaleForecaster
from attnlab.models.stack import Stack
from attnlab.nn.adapters import LowRankChanges, linear_maps
from attnlab.nn.positions import LearnedPlaces
from attnlab.nn.series_windows import Covariates, InstanceNorm
from attnlab.quantize.formats import Symmetric
from attnlab.quantize.layers import Quantization
from attnlab.testing.noise import noise, perturbed

LOOKBACK, HORIZON, VARIATES, DIM, PATCH = 32, 8, 2, 8, 4
X = noise(3, LOOKBACK, VARIATES)
CTX = Context.full(3, LOOKBACK)
STACK = functools.partial(
    Stack,
    depth=2,
    blocks=(functools.partial(Block, mixer=functools.partial(Attention, heads=2, causal=False), mlp=None),),
)
INPUTS = functools.partial(VariatesApart, patch=PATCH, positions=LearnedPlaces, read_from='all')
SIZES = {'lookback': LOOKBACK, 'variates': VARIATES, 'dtype': 'float32'}


def multiscale(inputs=INPUTS, **options):
    return MultiscaleForecaster(
        HORIZON, dim=DIM, stack=STACK, inputs=inputs, rngs=nnx.Rngs(0), **SIZES | {'scales': 2, 'rank': 2} | options
    )


def vectors(model, x=X):
    """Of every scale, the tokens of a variate one after the other."""
    found = model.hidden(x, CTX)[0][..., :-2]
    return jnp.split(found, np.cumsum([DIM * count for count in model.counts()])[:-1], axis=-1)


def test_the_finest_scale_is_at_first_what_the_pretrained_model_is():
    """Its parameters have the same names, so that a start copies them; other scales are the same model without sums."""
    pretrained = perturbed(StackForecaster(HORIZON, dim=DIM, stack=STACK, inputs=INPUTS, rngs=nnx.Rngs(1), **SIZES))
    model = multiscale()
    assert model.counts() == [8, 4, 2]
    for part in ('embedding', 'stack', 'norm'):
        nnx.update(getattr(model, part), nnx.state(getattr(pretrained, part)))
    finest, middle, coarsest = vectors(model)
    np.testing.assert_allclose(finest, pretrained.hidden(X, CTX)[0][..., :-2], rtol=1e-5, atol=1e-5)
    assert (middle.shape, coarsest.shape) == ((3, VARIATES, 4 * DIM), (3, VARIATES, 2 * DIM))


def test_scales_are_means_of_rows_and_see_each_other_between_blocks():
    """Coarse tokens after the first block depend on their own patches alone, and on all of them."""
    model = perturbed(multiscale())

    def first(x, scale):
        stages = {stage.name: stage.value for stage in model.stages(x, CTX)}
        return stages[f'layers[0].scales[{scale}]']

    swapped = X.reshape(3, -1, 2, VARIATES)[:, :, ::-1].reshape(X.shape)
    for scale, same in ((0, False), (1, True), (2, True)):
        assert np.allclose(first(X, scale), first(swapped, scale), atol=1e-5) == same
    finest, middle, coarsest = vectors(model)
    for one, other in zip((finest, middle, coarsest), vectors(model, swapped), strict=True):
        assert not np.allclose(one, other, atol=1e-4)


def test_sums_between_blocks_are_those_of_the_definition():
    model = perturbed(multiscale())
    fine, middle, coarse = (noise(2, count, DIM, seed=count) for count in (8, 4, 2))
    to_middle, to_fine = (np.asarray(model.tuned.to_finer[0][scale].matrix(), np.float64) for scale in (1, 0))
    found = model.tuned.aggregated([fine, middle, coarse], 0)
    fine, middle, coarse = (np.asarray(one, np.float64) for one in (fine, middle, coarse))
    finer_middle = middle + np.repeat(coarse, 2, axis=1) @ to_middle
    finer_fine = fine + np.repeat(finer_middle, 2, axis=1) @ to_fine
    coarser_middle = middle + (fine[:, ::2] + fine[:, 1::2]) / 2
    coarser_coarse = coarse + (coarser_middle[:, ::2] + coarser_middle[:, 1::2]) / 2
    wanted = ((finer_fine + fine) / 2, (finer_middle + coarser_middle) / 2, (coarse + coarser_coarse) / 2)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_a_change_of_rank_two_is_added_to_every_matrix_of_a_mixer():
    mixer = Attention(DIM, heads=2, rngs=nnx.Rngs(0))
    changes = LowRankChanges(mixer, rank=2, rngs=nnx.Rngs(1))
    before = [np.asarray(linear.weight[...]) for linear in linear_maps(mixer)]
    assert len(before) == 4
    changes.add(mixer)
    for linear, weight in zip(linear_maps(mixer), before, strict=True):
        np.testing.assert_array_equal(linear.weight[...], weight)
    changes = perturbed(changes)
    changes.add(mixer)
    for linear, weight in zip(linear_maps(mixer), before, strict=True):
        assert np.linalg.matrix_rank(np.asarray(linear.weight[...]) - weight, tol=1e-4) == 2
    with pytest.raises(UserError, match='LearnedPlaces has no linear maps'):
        LowRankChanges(LearnedPlaces(DIM, grid=(1, 2), rngs=nnx.Rngs(0)), rank=2, rngs=nnx.Rngs(0))


def test_weights_that_are_added_to_are_not_stored_but_inputs_are_rounded():
    with pytest.raises(UserError, match='a linear map of Attention is a QuantizedLinear, to whose stored weight'):
        Quantization(Symmetric(8))(multiscale()).hidden(X, CTX)
    expected, _ = multiscale().hidden(X, CTX)
    found, _ = Quantization(inputs=Symmetric(8))(multiscale()).hidden(X, CTX)
    np.testing.assert_allclose(found, expected, atol=0.1)


def test_everything_new_has_a_gradient_and_one_scale_none_on_the_head_of_another():
    model = perturbed(multiscale(window_norm=InstanceNorm()))
    targets = noise(3, VARIATES, HORIZON, seed=5)
    graphdef, params = nnx.split(model)

    def loss(params):
        merged = nnx.merge(graphdef, params)
        return jnp.mean(merged.losses(merged.hidden(X, CTX)[0], targets))

    gradients = dict(nnx.to_flat_state(jax.jit(jax.grad(loss))(params)))
    new = [path for path in gradients if path[0] in ('tuned', 'head')]
    assert len(new) == 3 + 3 * 2 * 4 * 2 + 2 + 3 * 2 + 1
    for path in new:
        assert np.abs(gradients[path][...]).max() > 0, path


def test_a_head_mixes_the_forecasts_of_all_scales():
    """By hand: forecasts repeated and weighed; the loss of each is that of means of the target."""
    head = perturbed(MultiscaleHead(7 * 3, HORIZON, scales=2, rngs=nnx.Rngs(0)))
    hidden, targets = noise(5, 21), noise(5, HORIZON, seed=2)
    parts = (hidden[:, :12], hidden[:, 12:18], hidden[:, 18:])
    forecasts = [
        np.asarray(part) @ np.asarray(one.weight[...]).T + np.asarray(one.bias[...])
        for part, one in zip(parts, head.heads, strict=True)
    ]
    assert [one.shape[1] for one in forecasts] == [8, 4, 2]
    raw = np.exp(np.asarray(head.weights[...]))
    shares = raw / raw.sum()
    mixed = sum(
        share * np.repeat(one, 2**i, axis=1) for i, (share, one) in enumerate(zip(shares, forecasts, strict=True))
    )
    np.testing.assert_allclose(head.logits(hidden), mixed, rtol=1e-4, atol=1e-5)
    means = [np.asarray(targets).reshape(5, -1, 2**i).mean(axis=2) for i in range(3)]
    losses = sum(
        share * ((one - mean) ** 2).mean(axis=1) for share, one, mean in zip(shares, forecasts, means, strict=True)
    )
    np.testing.assert_allclose(head.losses(hidden, targets), losses, rtol=1e-4)
    np.testing.assert_allclose(pooled(targets, 4), means[2], rtol=1e-5, atol=1e-6)


def test_mistakes_are_named():
    with pytest.raises(UserError, match='horizon of 8 and vectors of 20 channels; these must be multiples of 4 and 7'):
        MultiscaleHead(20, HORIZON, scales=2, rngs=nnx.Rngs(0))
    with pytest.raises(UserError, match='tokens of a look-back of 32 rows are not halved 6 times'):
        multiscale(scales=6)
    with pytest.raises(UserError, match="read_from is 'last': go on from an encoder"):
        multiscale(inputs=functools.partial(VariatesApart, patch=PATCH))
    with pytest.raises(UserError, match='these are 1, and read_from'):
        multiscale(covariates=Covariates(observed=1))
