"""Forecasters against their written definitions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from scipy.stats import norm

from attnlab.blocks.block import Block
from attnlab.context import Context
from attnlab.data.series.drawn import Autoregression, DrawnSeries
from attnlab.errors import UserError
from attnlab.mixers.softmax.attention import Attention
from attnlab.models.forecasters import LinearForecaster, PromptedForecaster, SegmentForecaster, StackForecaster
from attnlab.models.heads.affine import AffineHead, SparseAffineHead
from attnlab.models.heads.distributional import AtomsHead
from attnlab.models.heads.quantile import MixtureDensityHead, QuantileHead
from attnlab.models.heads.regression import RegressionHead
from attnlab.models.heads.segments import MixedSegmentHead, NextSegmentHead
from attnlab.models.inputs.series import VariatesApart, VariatesAsTokens, VariatesTogether
from attnlab.models.predictor import Distributional, Predictor, Stacked
from attnlab.models.stack import Stack
from attnlab.nn.norms import EvoNormB0
from attnlab.nn.positions import LearnedPlaces
from attnlab.nn.series_windows import Covariates, InstanceNorm, LastValue, Trend, WindowGain
from attnlab.testing.noise import noise, perturbed

LOOKBACK, HORIZON, VARIATES = 12, 4, 3
X = noise(2, LOOKBACK, VARIATES)
TARGETS = noise(2, VARIATES, HORIZON, seed=1)
CTX = Context.full(2, LOOKBACK)


def linear(**options):
    made = LinearForecaster(HORIZON, lookback=LOOKBACK, variates=VARIATES, dtype='float32', rngs=nnx.Rngs(0), **options)
    return perturbed(made)


def stacked(inputs=VariatesApart, causal=True, kind=StackForecaster, **options):
    stack = functools.partial(
        Stack,
        depth=1,
        blocks=(functools.partial(Block, mixer=functools.partial(Attention, heads=2, causal=causal), mlp=None),),
    )
    sizes = {'lookback': LOOKBACK, 'variates': VARIATES, 'dtype': 'float32', 'rngs': nnx.Rngs(0)}
    return perturbed(kind(HORIZON, dim=8, stack=stack, inputs=inputs, **sizes, **options))


def forecast(model, x=X):
    return np.asarray(model.logits(model.hidden(x, CTX)[0]))


def test_a_linear_forecast_is_a_map_along_time():
    model = linear()
    weight, bias = np.asarray(model.head.weight[...]), np.asarray(model.head.bias[...])
    np.testing.assert_allclose(forecast(model), np.asarray(X).swapaxes(1, 2) @ weight.T + bias, atol=1e-5)
    assert isinstance(model, Predictor) and not model.distributions and model.outputs == HORIZON
    assert [stage.name for stage in model.stages(X, CTX)] == ['window', 'head']


def test_every_variate_may_have_a_map_of_its_own():
    model = linear(head=functools.partial(AffineHead, variates=VARIATES))
    weight, bias = np.asarray(model.head.weight[...]), np.asarray(model.head.bias[...])
    expected = [np.asarray(X)[:, :, v] @ weight[v].T + bias[v] for v in range(VARIATES)]
    np.testing.assert_allclose(forecast(model), np.stack(expected, axis=1), atol=1e-5)


@pytest.mark.parametrize(('by', 'factor'), [(LastValue(), 1.0), (InstanceNorm(), 3.0), (InstanceNorm(), 1.0)])
def test_forecasts_follow_a_shift_and_instance_norm_a_factor(by, factor):
    model = linear(window_norm=by)
    x = 10 * X  # So that eps is small beside the variance.
    np.testing.assert_allclose(forecast(model, factor * x + 5), factor * forecast(model, x) + 5, rtol=1e-4, atol=1e-3)
    plain = linear()
    assert np.abs(forecast(plain, x + 5) - forecast(plain, x) - 5).max() > 1


def test_rest_and_trend_span_what_the_window_spans():
    """In closed form: DLinear is Linear, and has its forecasts where its two maps are that map."""
    plain, divided = linear(), linear(decomposition=Trend(5))
    weight = plain.head.weight[...]
    divided.head.weight[...] = jnp.concatenate([weight, weight], axis=1)
    divided.head.bias[...] = plain.head.bias[...]
    np.testing.assert_allclose(forecast(divided), forecast(plain), atol=1e-5)

    x, targets = (np.asarray(one, np.float64) for one in (noise(40, LOOKBACK, 1), noise(40, 1, seed=3)))
    parts = np.concatenate([np.asarray(part)[..., 0] for part in Trend(5).divide(jnp.asarray(x))], axis=1)
    fitted = [one @ np.linalg.lstsq(one, targets, rcond=1e-6)[0] for one in (x[..., 0], parts)]
    np.testing.assert_allclose(*fitted, atol=1e-4)


@pytest.mark.parametrize(('error', 'expected'), [('squared', jnp.square), ('absolute', jnp.abs)])
def test_the_loss_is_in_units_of_the_data(error, expected):
    model = linear(window_norm=InstanceNorm(), head=functools.partial(AffineHead, error=error))
    hidden, _ = model.hidden(X, CTX)
    losses = np.mean(expected(forecast(model) - TARGETS), axis=-1)
    np.testing.assert_allclose(model.losses(hidden, TARGETS), losses, rtol=1e-4)
    np.testing.assert_allclose(model.losses(hidden, TARGETS, jax.random.key(0)), losses, rtol=1e-4)
    model = linear(window_norm=InstanceNorm(), head=functools.partial(RegressionHead, error=error))
    losses = np.mean(expected(forecast(model) - TARGETS), axis=-1)
    np.testing.assert_allclose(model.losses(model.hidden(X, CTX)[0], TARGETS), losses, rtol=1e-4)


@pytest.mark.parametrize('unit', [0.1, 4.0])
def test_the_penalty_of_weights_has_no_unit(unit):
    """Where forecasts are right, the gradient is that of the penalty as it is written, whatever the size of windows."""
    model = linear(window_norm=InstanceNorm(), head=functools.partial(SparseAffineHead, share=0.3))
    hidden, _ = model.hidden(unit * X, CTX)
    right = model.logits(hidden)

    def objective(model):
        return jnp.mean(model.losses(hidden, right, jax.random.key(0)))

    def penalty(weight):
        return 0.02 * (1 / 0.3 - 1) * jnp.mean(2 / (1 + jnp.exp(-3 * jnp.abs(weight) ** (1 / 3))) - 1)

    found, written = nnx.grad(objective)(model).head.weight[...], jax.grad(penalty)(model.head.weight[...])
    np.testing.assert_allclose(found / written, 1, atol=0.02)


def test_variates_apart_do_not_see_each_other_and_variates_together_do():
    changed = X.at[:, :, 0].add(1.0)
    for inputs, sees in ((VariatesApart, False), (VariatesTogether, True)):
        model = stacked(functools.partial(inputs, patch=4, positions=LearnedPlaces))
        assert isinstance(model, Stacked) and isinstance(model, Distributional)
        apart = np.abs(forecast(model, changed) - forecast(model)).max(axis=(0, 2))
        assert apart[0] > 1e-3 and (apart[1:] > 1e-3).all() == sees and (apart[1:] == 0).all() != sees


def test_variates_as_tokens_have_no_order():
    model = stacked(VariatesAsTokens, causal=False, window_norm=InstanceNorm())
    order = np.array([2, 0, 1])
    np.testing.assert_allclose(forecast(model, X[:, :, order]), forecast(model)[:, order], atol=1e-5)
    assert model.layout(CTX).positions.shape == (2, VARIATES)


def test_patches_may_overlap_and_go_beyond_the_end():
    made = VariatesApart(
        1,
        8,
        lookback=LOOKBACK,
        variates=VARIATES,
        covariates=0,
        patch=4,
        stride=2,
        repeat_last=2,
        read_from='all',
        rngs=nnx.Rngs(0),
    )
    assert (made.places, made.width) == (6, 48)
    padded = np.concatenate([X, X[:, -1:], X[:, -1:]], axis=1)
    patches = np.stack([padded[:, 2 * i : 2 * i + 4, 1] for i in range(6)], axis=1)
    weight = np.asarray(made.linear.weight[...])
    np.testing.assert_allclose(made(X)[1::VARIATES], patches @ weight, atol=1e-5)
    hidden = noise(2 * VARIATES, 6, 8)
    np.testing.assert_array_equal(made.read(hidden)[1, 2], hidden[5].reshape(-1))
    with pytest.raises(UserError, match='patches of 5 steps, 5 apart, leave steps of 12 out'):
        VariatesApart(1, 8, lookback=LOOKBACK, variates=VARIATES, covariates=0, patch=5, rngs=nnx.Rngs(0))


COVARIATES = Covariates(observed=1, known=2)
W = noise(2, LOOKBACK + HORIZON, VARIATES + 3, seed=5)
"""Windows with covariates."""


def test_a_linear_forecast_reads_covariates_besides():
    model = linear(covariates=COVARIATES, window_norm=LastValue())
    w = np.asarray(W, np.float64)
    level = w[:, LOOKBACK - 1 : LOOKBACK, :4]
    own = w[:, :LOOKBACK, :4] - level
    weight, bias = np.asarray(model.head.weight[...]), np.asarray(model.head.bias[...])
    for variate in range(VARIATES):
        known = w[:, :LOOKBACK, 4:].swapaxes(1, 2).reshape(2, -1)
        ahead = w[:, LOOKBACK:, 4:].reshape(2, -1)
        features = np.concatenate([own[:, :, variate], own[:, :, 3], known, ahead], axis=1)
        expected = features @ weight.T + bias + level[:, :, variate]
        np.testing.assert_allclose(forecast(model, W)[:, variate], expected, atol=1e-5)


@pytest.mark.parametrize('inputs', [VariatesApart, VariatesTogether, VariatesAsTokens, None])
def test_covariates_reach_every_forecast_and_the_unknown_horizon_none(inputs):
    def made(**options):
        if inputs is None:
            return linear(covariates=Covariates(1, 2, **options))
        part = inputs if inputs is VariatesAsTokens else functools.partial(inputs, patch=4)
        return stacked(part, covariates=Covariates(1, 2, **options))

    reached = {'observed': (0, 3), 'known': (1, 4), 'ahead': (-1, 5)}
    for options, blind in (({}, set()), ({'ahead': False}, {'ahead'})):
        model = made(**options)
        before = forecast(model, W)
        for name, (row, column) in reached.items():
            apart = np.abs(forecast(model, W.at[:, row, column].add(3.0)) - before).max(axis=(0, 2))
            assert (apart == 0).all() if name in blind else (apart > 1e-4).all(), (name, options)
        np.testing.assert_array_equal(forecast(model, W.at[:, LOOKBACK:, :4].set(7.0)), before)
    if inputs is not None:
        *_, last = model.stages(W, CTX)
        assert last.value.shape == before.shape


def test_windows_of_other_sizes_are_named():
    with pytest.raises(UserError, match='of 12 rows and 4 of the horizon of 6 variates; windows of the task have 12'):
        linear(covariates=COVARIATES).hidden(W[:, :LOOKBACK], CTX)
    with pytest.raises(UserError, match='look-back of 12 rows of 3 variates; windows of the task have 11 rows'):
        linear().hidden(X[:, 1:], CTX)
    with pytest.raises(UserError, match='forecasts numbers, not distributions'):
        linear().quantiles(noise(2, 3, 14), jnp.array([0.5]))


class Spread(RegressionHead):
    """A head whose losses have a dimension too many."""

    def losses(self, hidden, targets):
        return super().losses(hidden, targets)[..., None]


@pytest.mark.parametrize('key', [None, jax.random.key(0)])
def test_a_head_gives_one_loss_per_variate(key):
    model = linear()
    hidden, _ = model.hidden(X, CTX)
    assert model.losses(hidden, TARGETS, key).shape == (2, VARIATES)
    model.head = Spread(LOOKBACK, HORIZON, rngs=nnx.Rngs(0))
    with pytest.raises(UserError, match=r'Spread gave losses of shape \(2, 3, 1\); expected .* state, \(2, 3\)'):
        model.losses(hidden, TARGETS, key)


def test_an_autoregression_without_penalty_is_least_squares_and_with_it_is_sparse():
    x = DrawnSeries(Autoregression(), rows=20_000).values()[:, 0]
    lags = np.lib.stride_tricks.sliding_window_view(x, 11)[:, :10]
    targets = x[10:, None]
    squares = np.linalg.lstsq(np.column_stack([lags, np.ones(len(lags))]), targets, rcond=None)[0][:10, 0]
    plain, sparse = fitted(lags, targets, share=1.0), fitted(lags, targets, share=0.3)
    np.testing.assert_allclose(plain, squares, atol=2e-3)
    spurious, known = sparse[:7], np.array([-0.5, 0.3, 0.2])
    assert np.abs(spurious).max() < 0.005 < np.abs(plain[:7]).max()
    np.testing.assert_allclose(sparse[7:], known, atol=0.03)


@pytest.mark.parametrize('wrong', [{'power': 0.0}, {'strength': -0.1}, {'share': 0.0}])
def test_a_sparse_head_names_numbers_that_make_no_penalty(wrong):
    """A power of 0 was a division by zero in the first step."""
    ((name, value),) = wrong.items()
    with pytest.raises(UserError, match=f'{name}.* of SparseAffineHead .*{value}'):
        SparseAffineHead(10, 1, **{'share': 0.3} | wrong, rngs=nnx.Rngs(0))


def fitted(lags, targets, **options):
    """The weights of a sparse head after steps of Adam on all rows."""
    graphdef, params = nnx.split(SparseAffineHead(10, 1, **options, rngs=nnx.Rngs(0)))
    # The derivative of the penalty is unbounded at 0: steps must forget the one that crossed it.
    optimizer = optax.adam(optax.cosine_decay_schedule(0.005, STEPS), b2=0.9)
    inputs, outputs = jnp.asarray(lags, jnp.float32), jnp.asarray(targets, jnp.float32)

    def loss(params):
        return jnp.mean(nnx.merge(graphdef, params).objective(inputs, outputs, jax.random.key(0)))

    def step(carry, _):
        params, state = carry
        updates, state = optimizer.update(jax.grad(loss)(params), state)
        return (optax.apply_updates(params, updates), state), None

    run = jax.jit(lambda params: jax.lax.scan(step, (params, optimizer.init(params)), length=STEPS)[0][0])
    return np.asarray(nnx.merge(graphdef, run(params)).weight[...])[0]


STEPS = 1000


@pytest.mark.parametrize(
    'head',
    [
        QuantileHead,
        pytest.param(MixtureDensityHead, marks=pytest.mark.slow),
        pytest.param(functools.partial(AtomsHead, low=-4.0, high=4.0), marks=pytest.mark.slow),
    ],
    ids=['quantiles', 'mixture', 'atoms'],
)
def test_quantiles_ascend_and_follow_the_window(head):
    model = linear(window_norm=InstanceNorm(), head=head)
    levels = jnp.array([0.1, 0.3, 0.5, 0.9])
    found = np.asarray(model.quantiles(model.hidden(X, CTX)[0], levels))
    assert model.distributions and found.shape == (2, VARIATES, 4, HORIZON)
    assert (np.diff(found, axis=2) >= 0).all()
    x = 10 * X
    moved = [np.asarray(model.quantiles(model.hidden(one, CTX)[0], levels)) for one in (x, 2 * x + 5)]
    np.testing.assert_allclose(moved[1], 2 * moved[0] + 5, rtol=1e-3, atol=1e-2)


def test_quantiles_of_a_negative_gain_are_those_of_the_other_tail():
    """`q(tau)` of `-z` is `-q(1 - tau)` of `z`."""
    model = linear(window_gain=WindowGain, head=functools.partial(QuantileHead, levels=(0.1, 0.5, 0.9)))
    levels = jnp.array([0.1, 0.3, 0.9])
    model.window_gain.gain[...] = jnp.array([2.0, -2.0, -0.5])
    hidden, _ = model.hidden(X, CTX)
    found = np.asarray(model.quantiles(hidden, levels))
    assert (np.diff(found, axis=2) > 0).all()
    features, level, scale = (np.asarray(one) for one in np.split(hidden, [-2, -1], axis=-1))
    asked = np.broadcast_to([[0.1, 0.3, 0.9], [0.9, 0.7, 0.1], [0.9, 0.7, 0.1]], (2, VARIATES, 3))
    inside = np.asarray(model.head.quantiles(jnp.asarray(features), jnp.asarray(asked)))
    np.testing.assert_allclose(found, inside * scale[..., None] + level[..., None], rtol=1e-4, atol=1e-4)


def test_quantiles_of_a_mixture_are_those_of_its_distribution():
    head = perturbed(MixtureDensityHead(8, 2, components=2, rngs=nnx.Rngs(0)))
    hidden, levels = noise(3, 8), jnp.tile(jnp.array([0.05, 0.5, 0.95]), (3, 1))
    found = head.quantiles(hidden, levels)
    log_weights, means, deviations = (np.asarray(one)[:, None] for one in head._mixture(hidden))
    weights = np.exp(log_weights)
    reached = np.sum(weights * norm.cdf(np.asarray(found)[..., None], means, deviations), axis=-1)
    np.testing.assert_allclose(reached, np.broadcast_to(levels[..., None], reached.shape), atol=1e-4)
    drawn = np.asarray(head.logits(hidden))
    np.testing.assert_allclose(drawn, np.sum(weights * means, axis=-1)[:, 0], rtol=1e-5)
    density = np.sum(weights[:, 0] * norm.pdf(0.3, means[:, 0], deviations[:, 0]), axis=-1)
    losses = head.losses(hidden, jnp.full((3, 2), 0.3))
    np.testing.assert_allclose(losses, -np.log(density).mean(axis=-1), rtol=1e-4)


def test_a_component_whose_weight_is_zero_in_float32_has_its_gradient():
    """Of weights 1 and e^-110 the second component explains what the first is 20 deviations from."""
    head = MixtureDensityHead(8, 1, components=2, rngs=nnx.Rngs(0))
    head.linear.weight[...] = jnp.zeros_like(head.linear.weight[...])
    # Logits, means, logarithms of deviations.
    head.linear.bias[...] = jnp.array([110.0, 0.0, 0.0, 20.0, 0.0, 0.0])
    loss, gradients = nnx.value_and_grad(lambda head: jnp.sum(head.losses(noise(1, 8), jnp.full((1, 1), 20.0))))(head)
    np.testing.assert_allclose(loss, 110 + np.log(2 * np.pi) / 2, rtol=1e-4)
    np.testing.assert_allclose(gradients.linear.bias[...], [1, -1, 0, 0, 0, 1], atol=1e-2)


def test_a_deviation_beyond_float32_has_a_finite_gradient():
    head = MixtureDensityHead(8, 1, components=2, rngs=nnx.Rngs(0))
    head.linear.weight[...] = jnp.zeros_like(head.linear.weight[...])
    # Logits, means, logarithms of deviations.
    head.linear.bias[...] = jnp.array([0.0, 0.0, 0.0, 1.0, 100.0, 0.0])
    loss, gradients = nnx.value_and_grad(lambda head: jnp.sum(head.losses(noise(1, 8), jnp.full((1, 1), 2.0))))(head)
    assert np.isfinite(loss) and all(np.isfinite(each).all() for each in jax.tree.leaves(gradients))
    np.testing.assert_allclose(gradients.linear.bias[...], [0.5, -0.5, 0, -1, 0, 0], atol=3e-3)


def test_between_levels_quantiles_are_interpolated():
    head = perturbed(QuantileHead(8, 2, levels=(0.2, 0.4, 0.8), rngs=nnx.Rngs(0)))
    hidden = noise(3, 8)
    at = [np.asarray(head.quantiles(hidden, jnp.full((3, 1), level)))[:, 0] for level in (0.01, 0.2, 0.3, 0.4, 0.8)]
    np.testing.assert_array_equal(at[0], at[1])
    np.testing.assert_allclose(at[2], (at[1] + at[3]) / 2, atol=1e-5)
    targets = noise(3, 2, seed=4)
    apart = np.asarray(targets)[..., None] - np.asarray(head.linear(hidden)).reshape(3, 2, 3)
    pinball = np.maximum(apart * np.array([0.2, 0.4, 0.8]), apart * (np.array([0.2, 0.4, 0.8]) - 1))
    np.testing.assert_allclose(head.losses(hidden, targets), pinball.mean(axis=(1, 2)), rtol=1e-4)
    with pytest.raises(UserError, match=r'levels is .* they must ascend'):
        QuantileHead(8, 2, levels=(0.5, 0.2), rngs=nnx.Rngs(0))


def segmented(**options):
    return stacked(
        functools.partial(VariatesApart, patch=4, read_from='all'),
        kind=SegmentForecaster,
        head=NextSegmentHead,
        **options,
    )


def test_every_segment_is_predicted_from_those_before():
    """Without normalisation prediction i depends on segments up to i, all of them, and the loss is over all."""
    model = segmented()

    def predictions(x):
        hidden = model.hidden(x, CTX)[0][..., :-2]
        return model.head.linear(model.head.divided(hidden)[0])

    assert predictions(X).shape == (2, VARIATES, 3, HORIZON)
    for place in range(3):
        gradient = jax.grad(lambda x, place=place: jnp.sum(jnp.sin(predictions(x)[:, :, place])))(X)
        seen = np.abs(gradient).reshape(2, 3, 4, VARIATES).max(axis=(0, 2, 3)) > 0
        np.testing.assert_array_equal(seen, np.arange(3) <= place)
    np.testing.assert_allclose(forecast(model), predictions(X)[:, :, -1], atol=1e-5)
    wanted = np.concatenate([np.asarray(X).swapaxes(1, 2)[:, :, 4:], TARGETS], axis=2).reshape(2, VARIATES, 3, 4)
    losses = ((np.asarray(predictions(X)) - wanted) ** 2).mean(axis=(2, 3))
    np.testing.assert_allclose(model.losses(model.hidden(X, CTX)[0], TARGETS), losses, rtol=1e-4)
    *_, last = model.stages(X, CTX)
    np.testing.assert_allclose(last.value, forecast(model), atol=1e-5)


def test_segments_have_the_units_of_their_window():
    """A shift and a factor of the window are those of the forecast, and the loss is in the units of the data."""
    model = segmented(window_norm=InstanceNorm())
    np.testing.assert_allclose(forecast(model, 30 * X + 5), 3 * forecast(model, 10 * X) + 5, rtol=1e-4, atol=1e-3)
    near, far = (
        np.asarray(model.losses(model.hidden(factor * X, CTX)[0], factor * TARGETS)) for factor in (10.0, 30.0)
    )
    np.testing.assert_allclose(far, 9 * near, rtol=1e-3)
    with pytest.raises(UserError, match='the look-back must be whole segments'):
        forecast(stacked(functools.partial(VariatesApart, patch=2), kind=SegmentForecaster, head=NextSegmentHead))


def test_a_look_back_of_more_segments_is_read_too():
    """What is put before the look-back is read as segments of it, and the forecast is of the last."""
    model = segmented()
    longer = jnp.concatenate([noise(2, 8, VARIATES, seed=9), X], axis=1)
    found = model.logits(model.hidden(longer, Context.full(2, LOOKBACK + 8))[0])
    assert found.shape == (2, VARIATES, HORIZON)
    assert not np.allclose(found, forecast(model), atol=1e-4)
    with pytest.raises(UserError, match='is for a look-back of 12 rows'):
        forecast(model, X[:, :10])


def prompted(**options):
    return stacked(
        functools.partial(VariatesApart, patch=4, read_from='all'),
        kind=PromptedForecaster,
        head=functools.partial(MixedSegmentHead, experts=2),
        **options,
    )


def test_texts_of_segments_are_read_by_the_same_layers():
    """Shares of segment and text by hand; a text is what the layers make of its last character."""
    model = prompted()
    share = 1 / (1 + np.exp(-float(model.gate[0])))
    steps = np.asarray(X).swapaxes(1, 2).reshape(-1, 4)
    texts = []
    for segment in steps:
        text = f'mean {segment.mean():+.2f} deviation {segment.std():+.2f} change {segment[-1] - segment[0]:+.2f}'
        letters = jnp.asarray([list(text.encode())], jnp.int32)
        out, _ = model.stack(model.embedding(letters), Context.full(*letters.shape))
        texts.append(np.asarray(model.norm(out))[0, -1])
    texts = np.stack(texts).reshape(2 * VARIATES, 3, 8)
    expected = share * np.asarray(model.patches(X)) + (1 - share) * texts
    np.testing.assert_allclose(model.embed(X, CTX), expected, rtol=1e-3, atol=1e-4)


def test_experts_are_weighed_by_the_token():
    head = prompted().head
    hidden = noise(5, 8)
    logits = np.asarray(hidden) @ np.asarray(head.gate.weight) + np.asarray(head.gate.bias)
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    mixed = sum(shares[:, [k]] * (np.asarray(hidden) @ np.asarray(head.experts)[k]) for k in range(2))
    expected = mixed @ np.asarray(head.linear.weight) + np.asarray(head.linear.bias)
    np.testing.assert_allclose(head.predicted(hidden), expected, rtol=1e-3, atol=1e-4)


def test_a_text_knows_no_later_segment_and_passes_no_gradient():
    model = prompted()
    changed = X.at[:, 8:].add(1.0)
    same = np.isclose(predictions(model), predictions(model, changed), atol=1e-6).all(axis=(0, 1, 3))
    np.testing.assert_array_equal(same, [True, True, False])
    gradients = nnx.grad(lambda model: jnp.sum(jnp.square(predictions(model))))(model)
    assert not np.any(gradients['embedding']['weight'][...])
    for name in ('patches', 'gate', 'head'):
        assert all(np.any(leaf) for leaf in jax.tree.leaves(gradients[name])), name


def predictions(model, x=X):
    return model.head.predicted(model.head.divided(model.hidden(x, CTX)[0][..., :-2])[0])


def test_segments_are_not_normalised_by_later_ones():
    block = functools.partial(Block, mixer=functools.partial(Attention, heads=2))
    with pytest.raises(UserError, match=r'^norm of SegmentForecaster is EvoNormB0, which looks at later tokens'):
        SegmentForecaster(
            4,
            dim=8,
            stack=functools.partial(Stack, depth=1, blocks=(block,)),
            lookback=8,
            variates=1,
            inputs=functools.partial(VariatesApart, patch=4, stride=4, read_from='all'),
            norm=EvoNormB0,
            head=NextSegmentHead,
            dtype=jnp.float32,
            rngs=nnx.Rngs(0),
        )
