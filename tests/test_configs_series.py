"""The config of series: every system builds, and mistakes in its arguments are named."""

import jax
import numpy as np
import pytest
from flax import nnx

from attnlab.config import build, plain, save
from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.mixers.combine import within
from attnlab.sweep.sweep import read
from attnlab.train.cost import parameters
from attnlab.train.optimizer import named_parameters
from attnlab.train.setup import prepare
from configs import language, series
from configs.sweeps import series as sweeps_series


@pytest.mark.parametrize(
    'argument',
    [
        *(f'system={name}' for name, system in series.SYSTEMS.items() if not system.frozen),
        pytest.param('system=patch_tst,zoo=gla,form=causal,size=small', marks=pytest.mark.slow),
        'inputs=together,zoo=mamba,norm=last_value,head=mixture_density',
        'data=lorenz,system=linear,individual=1,lookback=24,horizon=8',
        'data=driven,targets=0,known=1,zoo=mingru',
        'system=itransformer,data=etth1,targets=OT,marks=1',
        'system=itransformer,data=eeg,targets=PG5,lookback=48,horizon=24',
    ],
)
def test_series_of_every_kind(argument):
    setup = prepare(series.get_config(argument))
    measured = jax.eval_shape(setup.measure, setup.abstract.variables, setup.abstract_batch())
    distribution = {'crps', 'coverage_80', 'width_80'} if 'head' in argument else set()
    by_step = {'position_mse', 'position_mae'}
    assert set(measured) == {'loss', 'mse', 'mae', 'mase', 'mse_original', 'mae_original'} | by_step | distribution
    assert measured['position_mse'].total.shape == (setup.task.horizon,)


@pytest.mark.parametrize(
    'argument',
    [
        'task=imputation,system=dlinear',
        'task=imputation,system=itransformer,data=lorenz',
        'task=anomalies,zoo=gla,lookback=24',
        pytest.param('task=imputation,system=patch_tst,size=small', marks=pytest.mark.slow),
    ],
)
def test_gaps_of_every_kind(argument):
    setup = prepare(series.get_config(argument))
    measured = jax.eval_shape(setup.measure, setup.abstract.variables, setup.abstract_batch())
    assert set(measured) == {'loss', 'mse', 'mae', 'mse_original', 'mae_original'}
    assert setup.task.steps == setup.length and setup.model.covariates.observed == setup.task.data.variates
    assert [type(one).__name__ for one in setup.evals][2:] == ['Anomalies'] * argument.startswith('task=anomalies')


def test_gaps_are_read_from_both_sides():
    both, ahead = (series.get_config(f'task={name},zoo=mha') for name in ('imputation', 'forecasting'))
    assert both.model.inputs.read_from == 'all' and not both.model.stack.blocks[0].mixer.causal
    assert ahead.model.inputs.read_from == 'last' and ahead.model.stack.blocks[0].mixer.causal


@pytest.mark.parametrize(
    'argument', ['zoo=mha', 'zoo=mamba,lookback=48', 'zoo=gla,form=causal,head=arcface', 'zoo=mingru,fast=s4']
)
def test_classification_of_regimes(argument):
    config = series.get_config(f'task=classification,{argument}')
    setup = prepare(config)
    measured = jax.eval_shape(setup.measure, setup.abstract.variables, setup.abstract_batch())
    assert {'loss', 'accuracy'} <= set(measured)
    assert setup.model.outputs == 4 and setup.length == setup.task.data.of.steps
    guesses = setup.task.trivial(setup.task.slices('test', setup.length, (1,), 200)['all'])
    assert guesses['accuracy'].keys() == {'chance', 'majority', 'linear'} and guesses['accuracy']['majority'] < 0.4


def test_classification_of_windows_of_ones_own(tmp_path):
    path = tmp_path / 'own.npz'
    np.savez(path, x=np.random.default_rng(0).normal(size=(40, 24, 3)), label=np.arange(40) % 2)
    setup = prepare(series.get_config(f'task=classification,zoo=mingru,data={path}'))
    assert setup.length == 24 and setup.model.outputs == 2
    assert setup.abstract_batch()['tokens'].shape[1:] == (24, 3)
    setup.trace()
    with pytest.raises(UserError, match=r'lookback=48 is not that of data=.*own\.npz, 24; leave it out'):
        series.get_config(f'task=classification,data={path},lookback=48')


def test_a_frozen_language_model_reads_segments(tmp_path):
    """Its layers and its last norm are in the config as they were, start from it, and have no learning rate."""
    made = language.get_config('zoo=mingru')
    save(made, tmp_path / 'config.json')
    config = series.get_config(f'system=autotimes,run={tmp_path},lookback=96,horizon=24,data=lorenz')
    assert plain(config.model.stack) == plain(made.model.stack) and config.model.dim == made.model.dim
    assert config.start.run == str(tmp_path) and tuple(config.start.leave) == ('embedding/*', 'head/*')
    setup = prepare(config)
    assert setup.model.embedding.places == 4
    assert [(one.pattern, one.lr, one.weight_decay) for one in setup.optimizer.overrides] == [
        ('stack/*', 0.0, 0.0),
        ('norm/*', 0.0, 0.0),
    ]
    measured = jax.eval_shape(setup.measure, setup.abstract.variables, setup.abstract_batch())
    assert measured['position_mse'].total.shape == (24,)
    with pytest.raises(UserError, match='lookback=96 is not a multiple of horizon=25'):
        series.get_config(f'system=autotimes,run={tmp_path},horizon=25')
    save(series.get_config('system=linear'), tmp_path / 'config.json')
    with pytest.raises(UserError, match='is no causal language model of one stack'):
        series.get_config(f'system=autotimes,run={tmp_path}')


def test_a_frozen_language_model_reads_texts_beside_segments(tmp_path):
    """Its table of bytes, its layers and its norm are its own; what it cannot have had is drawn anew."""
    save(language.get_config('zoo=mingru'), tmp_path / 'config.json')
    arguments = f'run={tmp_path},lookback=96,horizon=24,data=lorenz'
    config = series.get_config(f'system=smetimes,{arguments},prompt=48')
    assert tuple(config.start.leave) == ('patches/*', 'gate', 'head/*')
    setup = prepare(config)
    names = set(named_parameters(setup.abstract.params))
    assert {'embedding/weight', 'patches/linear/weight', 'gate', 'head/experts'} <= names
    assert [one.pattern for one in setup.optimizer.overrides] == ['stack/*', 'norm/*', 'embedding/*']
    measured = jax.eval_shape(setup.measure, setup.abstract.variables, setup.abstract_batch())
    assert measured['position_mse'].total.shape == (24,)
    slices = setup.task.slices('test', 96, (1,), 5)
    whole, longer = slices['1x'].source, slices['prompted'].source
    first = setup.task.source('train', 96)[0]['tokens']
    assert len(longer) == len(whole) == 5 and longer[3]['tokens'].shape == (144, 3)
    np.testing.assert_array_equal(longer[3]['tokens'], np.concatenate([first[:48], whole[3]['tokens']]))
    np.testing.assert_array_equal(longer[3]['targets'], whole[3]['targets'])
    assert setup.task.trivial(slices['prompted']) == setup.task.trivial(slices['1x'])
    save(language.get_config('zoo=mingru,tokens=bpe'), tmp_path / 'config.json')
    with pytest.raises(UserError, match='does not read bytes, as texts are given'):
        series.get_config(f'system=smetimes,{arguments}')
    series.get_config(f'system=autotimes,{arguments}')


def test_an_encoder_reads_windows_in_the_units_that_it_was_trained_in(tmp_path):
    """Norm and gain are those of the run, and a gain is not trained on, as what reads its windows is not."""
    encoder, asked = 'zoo=mha,form=bidirectional,lookback=64,patch=8', f'system=msft,run={tmp_path},lookback=64'
    for norm, gain in (('last_value', '0'), ('none', '0'), ('instance', '1')):
        made = series.get_config(f'{encoder},norm={norm},gain={gain}')
        save(made, tmp_path / 'config.json')
        for given in ('', f',norm={norm},gain={gain}'):
            config = series.get_config(f'{asked}{given}')
            for part in ('window_norm', 'window_gain'):
                assert plain(config.model[part]) == plain(made.model[part])
        frozen = {one.pattern for one in prepare(config).optimizer.overrides if one.lr == one.weight_decay == 0}
        assert frozen == {'stack/*', 'norm/*', 'embedding/*'} | ({'window_gain/*'} if gain == '1' else set())
    for given, had in (('norm=none', 'InstanceNorm'), ('norm=last_value', 'InstanceNorm'), ('gain=0', 'WindowGain')):
        with pytest.raises(UserError, match=f'{given} is not that of run=.*, {had}; leave it out'):
            series.get_config(f'{asked},{given}')
    with pytest.raises(UserError, match=r'run=.* has a gain for every variate \(1\), and data=lorenz has 3'):
        series.get_config(f'{asked},data=lorenz')


def test_an_encoder_is_read_at_several_scales(tmp_path):
    """Patches, layers and norm are in the config as they were and are not trained; heads and adapters are new."""
    made = series.get_config('zoo=mha,form=bidirectional,lookback=64,patch=8,horizon=32')
    save(made, tmp_path / 'config.json')
    config = series.get_config(f'system=msft,run={tmp_path},lookback=64,horizon=16,data=lorenz')
    assert plain(config.model.stack) == plain(made.model.stack)
    assert plain(config.model.inputs) == plain(made.model.inputs)
    assert tuple(config.start.leave) == ('tuned/*', 'head/*')
    setup = prepare(config)
    assert setup.model.counts() == [8, 4, 2]
    frozen = [one.pattern for one in setup.optimizer.overrides if one.lr == 0]
    assert frozen == ['stack/*', 'norm/*', 'embedding/*']
    measured = jax.eval_shape(setup.measure, setup.abstract.variables, setup.abstract_batch())
    assert measured['position_mse'].total.shape == (16,)
    with pytest.raises(UserError, match=r'lookback=96 is not that of run=.*, 64'):
        series.get_config(f'system=msft,run={tmp_path},lookback=96')
    with pytest.raises(UserError, match='horizon of 18 and vectors'):
        assert prepare(series.get_config(f'system=msft,run={tmp_path},lookback=64,horizon=18')).model
    for other, sentence in (
        (series.get_config('zoo=mha,lookback=64'), 'reads its last token alone'),
        (series.get_config('system=linear,lookback=64'), 'is not a forecaster of this config with inputs=apart'),
        (series.get_config('system=hiss,lookback=64'), 'is not a forecaster of this config with inputs=apart'),
    ):
        save(other, tmp_path / 'config.json')
        with pytest.raises(UserError, match=sentence):
            series.get_config(f'system=msft,run={tmp_path},lookback=64')


def test_series_have_the_sizes_of_papers():
    """Parameters as published: of Linear at 336 to 96, and of patches at 336: 42 tokens."""
    assert parameters(prepare(series.get_config('system=linear,data=etth1,lookback=336'))) == 337 * 96
    assert parameters(prepare(series.get_config('system=dlinear,data=etth1,lookback=336'))) == (2 * 336 + 1) * 96
    patched = series.get_config('system=patch_tst,data=etth1,lookback=336')
    assert not patched.model.stack.blocks[0].mixer.causal and patched.model.inputs.read_from == 'all'
    assert prepare(patched).model.embedding.places == 42
    inverted = series.get_config('system=itransformer,data=exchange').model
    marked = series.get_config('system=itransformer,data=etth1,marks=1').model
    assert marked.covariates.known == 4 and not marked.covariates.ahead and marked.variates == 7
    assert inverted.variates == 8 and inverted.stack.blocks[0].mixer.position is None


@pytest.mark.parametrize('name', ['norm_lin', 'hyena'])
def test_mixers_of_a_length_are_made_for_all_tokens_of_a_grid(name):
    """Three variates of twelve patches each."""
    config = series.get_config(f'data=lorenz,zoo={name},inputs=grid')
    setup = prepare(config)
    setup.trace()
    assert setup.model.embedding.places == 12 and config.model.stack.blocks[0].mixer.length == 36


@pytest.mark.parametrize('name', ['mha', 'mla'])
def test_rows_of_several_variates_are_read_from_both_sides_without_places(name):
    model = series.get_config(f'data=lorenz,zoo={name},inputs=grid').model
    assert model.inputs.read_from == 'all'
    mixer, ctx = build(model.stack.blocks[0].mixer)(32, rngs=nnx.Rngs(0)), Context.full(1, 6)
    x = jax.random.normal(jax.random.key(0), (1, 6, 32))
    order = np.array([4, 5, 0, 1, 2, 3])
    np.testing.assert_allclose(mixer(x[:, order], ctx)[0], mixer(x, ctx)[0][:, order], rtol=1e-4, atol=1e-5)
    placed = series.get_config('data=lorenz,zoo=axial_rope,inputs=grid').model.stack.blocks[0].mixer
    assert placed.position.target.endswith('GridRope')


def test_mixers_side_by_side_have_no_places_of_variates_either():
    stack = series.get_config('zoo=mha+bi_mega,inputs=variates,data=seasonal').model.stack
    inner = [each for block in stack.blocks for each in within(block.mixer) if 'position' in each]
    assert inner and all(each.position is None for each in inner)
    with pytest.raises(UserError, match='zoo=cosformer tells keys by their places in a row, and variates have none'):
        series.get_config('zoo=cosformer,inputs=variates,data=seasonal')


def test_summaries_have_places_where_their_order_would_be_lost():
    asked = 'fast=s4,inputs=together,patch=1,form=bidirectional,data=seasonal'
    assert series.get_config(f'zoo=linear_transformer,{asked}').model.inputs.positions is not None
    assert series.get_config(f'zoo=mha,{asked}').model.inputs.positions is None


def test_windows_have_places_where_their_order_would_be_lost():
    """Of recipes without a causal form, which read windows both ways."""
    asked = 'inputs=together,patch=1,form=causal,data=seasonal,zoo=mamba'
    assert series.get_config(f'fast=polarized,{asked}').model.inputs.positions is not None
    assert series.get_config(f'fast=linear_transformer,{asked}').model.inputs.positions is None
    for fast, told in (('polarized', True), ('linear_transformer', False)):
        model = series.get_config(f'task=classification,zoo=mamba,fast={fast}').model
        assert (model.positions is not None) == told


def test_two_rates_are_two_stacks():
    stack = series.get_config('system=hiss,lookback=96').model.stack
    classes = [stack[name].blocks[0].mixer.target.rpartition('.')[2] for name in ('fast', 'slow')]
    assert stack.window == 10 and classes == ['StructuredSSM', 'SelectiveSSM']


@pytest.mark.parametrize(
    ('argument', 'sentence'),
    [
        ('data=etth3', "there is no data=etth3; did you mean 'etth"),
        ('data=no.csv', r'there is no file no\.csv'),
        ('system=dlinar', "there is no system=dlinar; did you mean 'dlinear'"),
        ('horizon=0', "horizon is '0'; it must be a whole number from 1"),
        ('zoo=swin', 'zoo=swin mixes tokens on a grid'),
        ('zoo=mamba,form=bidirectional', 'form=bidirectional is not one of zoo=mamba'),
        ('system=linear,head=quantiles,individual=1', 'head=quantiles is one for all variates; leave individual=1 out'),
        ('system=ar_net,head=quantiles', 'head=quantiles is not that of system=ar_net, which has one of its own'),
        ('system=olinear,head=quantiles', 'head=quantiles is not that of system=olinear, which has one of its own'),
        ('system=olinear,head=affine', 'head=affine is not that of system=olinear'),
        ('system=olinear,individual=1', 'the head of system=olinear is one for all variates; leave individual=1 out'),
        ('data=lorenz,marks=1', 'the series has no dates'),
        ('known=load', 'leave none to forecast'),
        ('targets=banana', "the series has no column 'banana'; valid names: 0"),
        ('data=etth1,targets=OTT', "the series has no column 'OTT'; did you mean 'OT'"),
        ('data=etth1,known=ot', "the series has no column 'ot'"),
        ('data=exchange,targets=OT', "the series has no column 'OT'"),
        ('ahead=1', 'ahead=1 is of known=NAMES and marks=1, which are not given'),
        ('rate=10', 'rate=10 is of fast=RECIPE, which is not given'),
        ('system=dlinear,zoo=gla', 'zoo=gla has layers, and system=dlinear divides windows for a linear map'),
        ('system=olinear,inputs=apart', 'inputs=apart has no whole windows; system=olinear needs inputs=variates'),
        ('data=driven,known=1,ahead=2', 'there is no ahead=2'),
        ('head=quantile', "there is no head=quantile; did you mean 'quantiles'"),
        ('system=hiss,inputs=variates', 'fast=s4 reads windows of time, and rows of inputs=variates go on from one'),
        ('zoo=s4,fast=s4,inputs=grid', 'rows of inputs=grid go on from one variate .* choose inputs=apart'),
        ('system=hiss,fast=chimera', '--config=series:inputs=grid,zoo=chimera on variates by times'),
        ('task=classification,zoo=chimera', '--config=series:inputs=grid,zoo=chimera on variates by times'),
        ('zoo=elitekv,inputs=grid', 'zoo=elitekv tells keys by their places in a row, and variates have none'),
        ('system=hiss,rate=none', "rate is 'none'; it must be a whole number from 1"),
        ('rate=banana', 'rate=banana is of fast=RECIPE, which is not given'),
        ('task=classification,rate=5', 'rate=5 is of fast=RECIPE, which is not given'),
        ('system=dlinear,inputs=nonsense', 'inputs=nonsense is of layers; system=dlinear has none: leave it out'),
        ('system=dlinear,patch=8', 'patch=8 is of layers; system=dlinear has none'),
        ('system=itransformer,patch=banana', 'patch=banana is of patches; with inputs=variates a variate is a token'),
        ('inputs=variates,stride=3', 'stride=3 is of patches; with inputs=variates a variate is a token'),
        ('head=quantiles,individual=yes', 'there is no individual=yes'),
        ('system=hiss,fast=swin', 'zoo=swin mixes tokens on a grid'),
        ('system=autotimes', 'system=autotimes needs run=WORKDIR, that of a causal language model'),
        ('system=msft', 'system=msft needs run=WORKDIR, that of a forecaster'),
        ('system=msft,run=none,patch=8', 'patch=8 does not go with system=msft'),
        ('task=imputation,system=msft,run=none', 'system=msft is for task=forecasting'),
        ('system=dlinear,run=runs/first', 'other systems take no run'),
        ('system=autotimes,run=none,zoo=mha', 'zoo=mha does not go with system=autotimes'),
        ('system=autotimes,run=none', 'none is not a run'),
        ('prompt=96', 'prompt=96 is for systems whose tokens are segments: autotimes and smetimes'),
        ('system=smetimes', 'system=smetimes needs run=WORKDIR, that of a causal language model of bytes'),
        ('task=imputaton', "there is no task=imputaton; did you mean 'imputation'"),
        ('task=imputation,horizon=96', 'horizon=96 is for task=forecasting'),
        ('task=anomalies,head=quantiles', 'head=quantiles is for task=forecasting'),
        ('task=imputation,system=olinear', 'system=olinear is for task=forecasting'),
        ('task=imputation,system=ar_net', 'system=ar_net is for task=forecasting'),
        ('task=classification,data=seasonal', 'data=seasonal is for other tasks'),
        ('task=classification,head=quantiles', 'there is no head=quantiles'),
        ('task=classification,zoo=window_sinks', 'zoo=window_sinks takes no segments'),
    ],
)
def test_series_names_mistakes(argument, sentence):
    with pytest.raises(UserError, match=sentence):
        series.get_config(argument)


def test_a_sweep_chooses_on_validation():
    made = sweeps_series.get_config('system=nlinear,horizon=24,seeds=2')
    assert made.metric == 'valid/1x/mse' and made.goal == 'min' and made.seeds == (0, 1)
    assert read(made).base.task.horizon == 24
    assert sweeps_series.get_config('task=classification').metric == 'valid/all/loss'
    with pytest.raises(UserError, match=r'seeds is .*; it must be a whole number from 1'):
        sweeps_series.get_config('seeds=0')
