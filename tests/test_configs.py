"""Every config builds, its training step and evaluation are traced with shapes in place of arrays, and every recipe
takes two steps by every config that offers it."""

import dataclasses
import fnmatch
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from ml_collections.config_flags import config_path
from PIL import Image
from scipy.special import erf, expit

from attnlab.compare.equality import unmatched
from attnlab.config import build, plain, spec, spec_of, value_at
from attnlab.data.text.text import TextFiles
from attnlab.data.text.tfds import TfdsText
from attnlab.errors import UserError
from attnlab.evals.by_slice import WHOLE
from attnlab.experiment.experiment import SIZES, Experiment
from attnlab.experiment.studies import TOLERANCE
from attnlab.mixers.combine import within
from attnlab.models.stack import Stack, missing_layers
from attnlab.module import modules_of
from attnlab.nn.bounds import RisingBound
from attnlab.nn.mlps import GatedMLP, gated_width
from attnlab.nn.norms import RMSNorm
from attnlab.nn.positions import Rope
from attnlab.quantize.formats import Affine
from attnlab.quantize.layers import linear_maps
from attnlab.quantize.training import Learned, Rounded, RoundedLinear
from attnlab.sweep.sweep import read
from attnlab.testing.noise import noise
from attnlab.train.cost import flops_per_token, implementations, parameters, state_bytes
from attnlab.train.optimizer import Group, named_parameters
from attnlab.train.programs import structure
from attnlab.train.schedule import Constant, Cosine
from attnlab.train.setup import prepare
from attnlab.train.state import initialize
from attnlab.zoo import ZOO
from configs import dynamics, grokking, images, language, long_range, recall, separation, series
from configs.sweeps import images as sweeps_images
from configs.sweeps import recall as sweeps_recall

KINDS = {
    (type(recipe.layer), recipe.causal, recipe.bidirectional, recipe.mirrored, recipe.grid): name
    for name, recipe in reversed(ZOO.items())
    if not recipe.slow
}
"""The first recipe with each of the claims that configs read: traced at full width in every run of the tests."""


def any_of(names):
    """A test of each recipe."""
    kinds = KINDS.values()
    return pytest.mark.parametrize(
        'name', [pytest.param(name, marks=() if name in kinds else pytest.mark.slow) for name in names]
    )


zoo = any_of(ZOO)
causal = any_of([name for name, recipe in ZOO.items() if recipe.causal])
padded = any_of([name for name, recipe in ZOO.items() if recipe.causal and recipe.packed])
sequences = any_of([name for name, recipe in ZOO.items() if recipe.packed and not recipe.grid])

COSINE, CONSTANT = spec(Cosine).target, spec(Constant).target

TRAINED = ('mingru', 'window_sinks')
"""The recipes that take two steps in every run of the tests, packed and one document a row; the others do nightly."""

OFFERS = (
    *((language, f'zoo={name}') for name, recipe in ZOO.items() if recipe.causal),
    *((recall, f'zoo={name}') for name, recipe in ZOO.items() if recipe.causal and recipe.packed),
    *((long_range, f'zoo={name},size=smoke') for name, recipe in ZOO.items() if recipe.packed and not recipe.grid),
    *((images, f'zoo={name},data=count') for name in ZOO),
    *((series, f'zoo={name}') for name, recipe in ZOO.items() if not recipe.grid),
    *((separation, f'zoo={name}') for name, recipe in ZOO.items() if not recipe.grid),
    *((grokking, f'method={name}') for name in grokking.METHODS),
    (dynamics, 'data=henon'),
)
"""What each config has to train, at its smallest size."""


def prepared(config):
    """The setup of a config of which a layer a place and two rows are left: shapes are all there is to check."""
    with config.unlocked():
        config.model.stack.depth = len(config.model.stack.blocks)
        config.batch_size = 2
    return prepare(config)


@causal
def test_language(name):
    config = language.get_config(f'zoo={name}')
    with config.unlocked():
        config.length = 32
    prepared(config).trace()


@pytest.fixture(scope='module')
def text(tmp_path_factory):
    """A few short documents."""
    folder = tmp_path_factory.mktemp('text')
    for name in range(20):
        (folder / f'{name}.txt').write_text('one and two and three and four\n' * (name + 1))
    return folder


def smallest(config, text):
    """Cuts a config down: one layer of each kind, two short rows, few data."""
    with config.unlocked():
        if 'stack' in config.model:
            stack = config.model.stack
            stack.blocks = tuple(block for i, block in enumerate(stack.blocks) if block not in stack.blocks[:i])
            stack.depth = len(stack.blocks)
            config.batch_size = 2
            if 'horizon' in config.task or 'gaps' in config.task:
                config.task.data.rows = 400
            elif 'frame' in config.model:
                config.length = 256
            elif 'patch' in config.model.inputs:
                config.model.inputs.patch = 4  # 8 x 8 patches, no fewer than the windows of papers reach.
            else:
                config.length = 32
        if 'text' in config.task:
            config.task.text = spec(TextFiles, path=str(text))
        if 'data' in config.task and 'held_out' in config.task.data:
            config.task.data.train = config.task.data.held_out = 16
        config.evals = ()
    return config


@pytest.mark.parametrize(
    ('module', 'argument'),
    [
        (language, 'zoo=mingru'),
        (recall, 'zoo=mingru'),
        (recall, 'task=signed_sums,thoughts=continuous'),
        (long_range, 'zoo=mingru,task=digits,size=smoke'),
        (long_range, 'zoo=mingru,task=digits,size=smoke,protocol=pretrain'),
        (images, 'zoo=bi_mingru,data=count'),
        (series, 'zoo=mingru'),
        (series, 'zoo=bi_mingru,task=imputation'),
        (separation, 'zoo=mingru'),
    ],
)
def test_layers_are_told_what_the_loss_counts(module, argument, text, monkeypatch):
    setup = prepare(smallest(module.get_config(argument), text))
    source = setup.task.source('train', setup.length)
    batch = jax.tree.map(lambda *rows: np.stack(rows), *(source[index] for index in range(2)))
    batch['weights'] = np.where(np.arange(2).reshape(2, *[1] * (batch['weights'].ndim - 1)), batch['weights'], 0)
    called, told = Stack.__call__, []

    def asked(stack, x, ctx, state=None):
        told.append(ctx.labels)
        return called(stack, x, ctx, state)

    monkeypatch.setattr(Stack, '__call__', asked)

    @jax.jit
    def counts(batch):
        """All else is left out of what is compiled."""
        found = setup.task.measure(setup.make_model(nnx.Rngs(0)), batch, jax.random.key(0))
        return found['loss'].count, told

    count, labels = counts(batch)
    assert labels and count > 0
    np.testing.assert_array_equal(labels, np.full(len(labels), count))


def nightly(module, argument):
    """Whether two steps of a recipe are taken by nightly tests alone."""
    trained = TRAINED[:1] if module in (series, separation) else TRAINED
    return module not in (grokking, dynamics) and argument.split(',')[0].removeprefix('zoo=') not in trained


@pytest.mark.parametrize(
    ('module', 'argument'),
    [pytest.param(*case, marks=pytest.mark.slow if nightly(*case) else ()) for case in OFFERS],
    ids=lambda value: value if isinstance(value, str) else value.__name__.removeprefix('configs.'),
)
def test_two_steps(module, argument, text):
    """From the config's own initial values and data; a step is refused where loss or gradient is not finite.

    Language is modelled in bfloat16, as on accelerators: XLA for CPUs lacks some of its products.
    """
    config = smallest(module.get_config(argument), text)
    if module is language:
        with config.unlocked():
            config.precision.activations = 'bfloat16'
    take_two_steps(prepare(config))


@pytest.mark.parametrize(
    ('module', 'argument'),
    [
        (language, 'zoo=mingru'),
        (recall, 'zoo=mingru'),
        (long_range, 'zoo=s4d,size=smoke'),
        (images, 'zoo=mha,data=count'),
        (series, 'zoo=mingru'),
        (series, 'task=classification,zoo=mingru'),
        (separation, 'system=conv_tasnet'),
        (grokking, ''),
        (dynamics, 'data=henon'),
    ],
    ids=lambda value: value if isinstance(value, str) else value.__name__.removeprefix('configs.'),
)
def test_every_config_trains_with_few_bits(module, argument, text):
    config = smallest(module.get_config(f'{argument},rounding=learned4+affine8'.lstrip(',')), text)
    assert plain(config.rounding) == plain(spec_of(Rounded(Learned(4), Affine(8))))
    setup = prepare(config)
    # Every map has a step for each of its outputs, and is packed in bytes after training.
    added = [path for path in named_parameters(setup.abstract.params) if fnmatch.fnmatch(path, '*/log_code_step')]
    maps = [value for _, _, value in linear_maps(nnx.merge(setup.graphdef, setup.abstract.variables))]
    assert len(added) == len({id(each) for each in maps}) > 0
    assert all(isinstance(each, RoundedLinear) for each in maps)


@pytest.mark.parametrize('module', [language, long_range])
def test_what_rounding_adds_is_not_taken_of_another_run(module):
    argument = {language: 'zoo=s4d,run=runs/before', long_range: 'protocol=finetune,run=runs/before,zoo=s4d'}
    config = module.get_config(f'{argument[module]},rounding=learned4')
    plain_start = module.get_config(argument[module]).start
    assert config.start.leave == (*plain_start.leave, '*/log_code_step')
    assert module.get_config(f'{argument[module]},rounding=int4').start.leave == plain_start.leave
    assert module.get_config(f'{argument[module]},rounding=quartet').start.leave == (*plain_start.leave, '*/noise')


def take_two_steps(setup):
    """Takes two steps from the config's own start and data, which must change parameters; returns the state."""
    setup.load_data()
    source = setup.task.source('train', setup.length)
    # Drawn operation by operation: the whole would take longer to compile than a step.
    state = jax.device_put(
        initialize(setup.make_model, setup.transform, setup.seed),
        jax.tree.map(lambda leaf: leaf.sharding, setup.abstract),
    )
    before = jax.tree.map(np.asarray, state.params)
    for number in (1, 2):
        rows = [source[(number * setup.batch_size + row) % len(source)] for row in range(setup.batch_size)]
        batch = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
        state, metrics = setup.step(state, setup.place(batch), np.int32(number))
        assert metrics['good'] and metrics['loss'].count > 0 and metrics['grad_norm'] > 0
    assert int(state.step) == 2
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), before, jax.tree.map(np.asarray, state.params))
    assert any(jax.tree.leaves(moved))
    return state


@pytest.mark.parametrize(
    'argument', ['norm=dyt,mlp=plain,activation=pau', 'norm=evonorm_s0,mlp=moe_hierarchical,optimizer=muon']
)
def test_language_with_other_norms_and_channel_mixers(argument):
    config = language.get_config(argument)
    with config.unlocked():
        config.length = 32
    assert plain(config.model.norm) == plain(config.model.stack.blocks[0].norm)
    assert config.model.norm is not config.model.stack.blocks[0].norm
    prepared(config).trace()


VARIANTS = {
    'swiglu': lambda x: x * expit(x),
    'geglu': lambda x: x * (1 + erf(x / np.sqrt(2))) / 2,
    'reglu': lambda x: np.maximum(x, 0),
    'glu': expit,
    'bilinear': lambda x: x,
}


@pytest.mark.parametrize('name', VARIANTS)
def test_a_gated_channel_mixer_has_the_nonlinearity_of_its_name(name):
    mlp = build(language.MLPS[name])(8, rngs=nnx.Rngs(0))
    x = noise(1, 5, 8)
    gate, up, down = (np.asarray(each.weight[...], np.float64) for each in (mlp.gate, mlp.up, mlp.down))
    wide = np.asarray(x, np.float64)
    # The GELU of the layer may be the approximation by a tanh, which is within 1e-3 of it; others are further apart.
    np.testing.assert_allclose(mlp(x), (VARIANTS[name](wide @ gate) * (wide @ up)) @ down, atol=3e-3)


@pytest.mark.parametrize(
    ('argument', 'sentence'),
    [
        ('norm=layernrm', "there is no norm=layernrm; did you mean 'layernorm'"),
        ('mlp=moe2', 'there is no mlp=moe2'),
        ('activation=prel', "there is no activation=prel; did you mean 'prelu'"),
        ('zoo=uniattn,norm=dyt', 'norm=dyt is for blocks that take one; those of zoo=uniattn have their own'),
        ('zoo=aero,mlp=plain', 'mlp=plain is for blocks with an MLP; those of zoo=aero have none'),
        ('zoo=aero,mlp=swiglu', 'mlp=swiglu is for blocks with an MLP; those of zoo=aero have none'),
        ('zoo=uniattn,norm=rmsnorm', 'norm=rmsnorm is for blocks that take one; those of zoo=uniattn have their own'),
        (
            'zoo=mamba,conv=AC',
            'C and D of conv=AC are at channel mixers, and layers of this model have none; choose AB',
        ),
    ],
)
def test_language_names_mistakes_in_its_parts(argument, sentence):
    with pytest.raises(UserError, match=sentence):
        language.get_config(argument)


def test_a_variant_of_a_catalogued_text_is_no_path_unless_it_is_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = 'wiki40b/de'
    assert build(language.get_config(f'data={asked}').task.text) == TfdsText(asked)
    (tmp_path / asked).mkdir(parents=True)
    assert build(language.get_config(f'data={asked}').task.text) == TextFiles(asked)


@pytest.mark.parametrize(
    ('argument', 'depths'), [('zoo=mamba,fast=s4,rate=6', [3, 6]), ('zoo=bi_mingru,fast=mha', [3, 3])]
)
def test_long_range_at_two_rates(argument, depths):
    """Mambas stand alone, twice as many as other layers."""
    config = long_range.get_config(f'task=listops,size=smoke,{argument}')
    with config.unlocked():
        config.update(length=32, batch_size=2)
    setup = prepare(config)
    setup.trace()
    assert [stack.depth for stack in setup.model.stack.parts] == depths and state_bytes(setup, 32) == 0
    for more, sentence in ((',protocol=pretrain', 'fast=s4 summarises windows'), (',rate=0', "rate is '0'; it must")):
        with pytest.raises(UserError, match=sentence):
            long_range.get_config(f'task=listops,size=smoke,zoo=mamba,fast=s4{more}')


def test_long_range_trains_what_is_published_of_a_recipe_in_its_own_stack_alone():
    """At two rates, `D` of the other recipe has no weight decay, as without `fast`."""
    config = long_range.get_config('task=listops,zoo=s4,fast=mamba')
    with config.unlocked():
        config.model.dim = 8
    setup = prepare(config)
    found = setup.optimizer.multipliers(setup.abstract.params)
    slow, fast = ({p: g for p, g in found.items() if p.startswith(f'stack/{name}/')} for name in ('slow', 'fast'))
    decayed = {path.rpartition('/')[2] for path, group in slow.items() if group.weight_decay}
    assert {'C', 'D'} <= decayed and slow['stack/slow/blocks/0/mixer/system/log_step'].lr == 1.0
    assert fast['stack/fast/blocks/0/mixer/D'] == setup.optimizer.groups.dynamics


def test_a_rate_is_of_a_second_recipe():
    for rate in ('banana', '10'):
        with pytest.raises(UserError, match=f'rate={rate} is of fast=RECIPE, which is not given'):
            long_range.get_config(f'task=listops,rate={rate},size=smoke')


def test_long_range_with_another_head():
    config = long_range.get_config('task=digits,size=smoke,head=arcface')
    assert config.model.head.classes == 10
    prepared(config).trace()
    for argument, sentence in (
        ('task=digits,size=smoke,head=arcfac', "there is no head=arcfac; did you mean 'arcface'"),
        ('task=aan,head=arcface', 'head=arcface is for one document'),
        ('task=aan,head=linear', 'head=linear is for one document'),
        ('task=listops,size=smoke,head=linear,protocol=pretrain', 'head=linear is not for protocol=pretrain'),
        ('task=digits,size=smoke,head=linear,protocol=pretrain', 'there is no head=linear'),
        ('task=digits,size=smoke,head=arcface,protocol=pretrain', 'there is no head=arcface'),
        ('task=listops,size=smoke,head=c51,protocol=pretrain', 'head=c51 is not for protocol=pretrain of tokens'),
    ):
        with pytest.raises(UserError, match=sentence):
            long_range.get_config(argument)


@pytest.mark.parametrize('name', ['hierarchical', 'sampled_softmax'])
def test_language_with_other_heads(name):
    config = language.get_config(f'head={name}')
    with config.unlocked():
        config.length = 32
    prepared(config).trace()


@pytest.mark.parametrize('name', [name for name in language.RESIDUALS if name != 'plain'])
def test_language_with_other_residuals(name):
    config = language.get_config(f'residual={name},optimizer=muon')
    with config.unlocked():
        config.length = 32
    prepared(config).trace()


@pytest.mark.parametrize('argument', ['zoo=mha,conv=canon', 'zoo=mamba,conv=none'])
def test_language_with_other_convolutions(argument):
    config = language.get_config(argument)
    with config.unlocked():
        config.length = 32
    prepared(config).trace()


@pytest.mark.parametrize(
    ('module', 'argument'),
    [
        (series, 'zoo=gla,conv=canon'),
        (series, 'task=classification,zoo=mamba,conv=A'),
        (separation, 'zoo=mamba,conv=A'),
        (images, 'zoo=swin,conv=AC,data=count'),
    ],
    ids=lambda each: each if isinstance(each, str) else '',
)
def test_other_configs_with_convolutions(module, argument):
    setup = prepared(module.get_config(argument))
    setup.trace()
    assert any(type(module).__name__ == 'Canon' for _, module in nnx.iter_modules(setup.model))


@pytest.mark.parametrize(
    ('module', 'argument', 'message'),
    [
        (series, 'system=linear,conv=1', 'conv=1 is of layers; system=linear has none'),
        (series, 'system=chimera,inputs=apart', 'zoo=chimera mixes tokens on a grid; choose inputs=grid'),
        (series, 'zoo=gla,inputs=grid,conv=AC', 'conv=AC reads neighbours, and variates have none'),
        (series, 'system=itransformer,conv=canon', 'conv=canon reads neighbours, and variates have none'),
        (recall, 'conv=AD', 'C and D of conv=AD are at channel mixers, and layers of this model have none; choose AB'),
        (long_range, 'size=full,zoo=s4,conv=CD', 'conv=CD are at channel mixers, and layers of this model have none'),
        (separation, 'conv=canon', 'conv=canon is of the layers of a recipe; give zoo=NAME'),
        (images, 'zoo=swin,conv=canon', 'point B of conv=canon needs a mixer with a prelude'),
        (images, 'zoo=swin,conv=AD,layout=paper', r'point D .* within a GatedMLP; the channel mixer is .*\.MLP'),
    ],
)
def test_where_there_are_no_convolutions(module, argument, message):
    with pytest.raises(UserError, match=message):
        module.get_config(argument)


@padded
def test_recall_by_any_recipe(name):
    prepared(recall.get_config(f'zoo={name}')).trace()


@pytest.mark.parametrize('name', [name for name, recipe in ZOO.items() if not recipe.causal])
def test_what_is_only_bidirectional_predicts_no_next_token(name):
    for module in (language, recall):
        config = ZOO[name].config
        with pytest.raises(UserError, match=f'zoo={name} is only bidirectional .* --config={config}:zoo={name} '):
            module.get_config(f'zoo={name}')


@pytest.mark.parametrize('name', [name for name, recipe in ZOO.items() if not (recipe.packed or recipe.grid)])
def test_what_takes_no_segments_reads_no_padding(name):
    for module in (recall, long_range):
        with pytest.raises(UserError, match=f'zoo={name} takes no segments.* --config=language:zoo={name} trains'):
            module.get_config(f'zoo={name}')


@pytest.mark.parametrize('name', [name for name, recipe in ZOO.items() if recipe.grid])
def test_what_needs_a_grid_reads_no_sequence(name):
    with pytest.raises(UserError, match=f'zoo={name} mixes tokens on a grid, .* --config=images:zoo={name} trains it'):
        long_range.get_config(f'zoo={name}')


@pytest.mark.parametrize('name', recall.TINY)
def test_recall_on_every_task(name):
    setup = prepared(recall.get_config(f'task={name}'))
    setup.trace()
    for part in setup.task.slices('test', setup.length, (1,), 2).values():
        batch = {name: jax.ShapeDtypeStruct((2, *value.shape), value.dtype) for name, value in part.source[0].items()}
        measured = jax.eval_shape(setup.measure, setup.abstract.params, batch)
        assert all(average.total.dtype == jnp.float32 for average in measured.values())


@pytest.mark.parametrize('argument', [f'task={name},size={size}' for size in recall.SIZES for name in recall.TINY])
def test_recall_draws_what_it_says(argument):
    setup = prepared(recall.get_config(argument))
    setup.load_data()
    row = setup.task.source('train', setup.length)[0]
    example = setup.task.example(setup.length)
    assert {name: (value.shape, value.dtype) for name, value in row.items()} == {
        name: (value.shape, value.dtype) for name, value in example.items()
    }
    assert not any(value.any() for value in example.values())


@pytest.mark.parametrize(
    ('argument', 'message'),
    [
        ('task=mqra', "there is no task=mqra; did you mean 'mqar'"),
        ('zoo=glaa', "there is no zoo=glaa; did you mean 'gla'"),
        ('size=large', 'there is no size=large; valid names: paper, tiny'),
        ('tsk=mqar', "did you mean 'task'"),
    ],
)
def test_mistakes_name_the_nearest(argument, message):
    with pytest.raises(UserError, match=message):
        recall.get_config(argument)


@pytest.mark.parametrize(
    'argument', [f'method={name},size={size}' for size in grokking.SIZES for name in grokking.METHODS]
)
def test_grokking(argument):
    setup = prepare(grokking.get_config(argument))
    setup.check()
    setup.load_data()
    assert len(setup.task.source('train', setup.length)) == setup.batch_size


def test_grokking_has_the_constants_of_the_released_scripts():
    """Of figure 1: the second moment of StableMax alone is slower, and 80,000 epochs of 40 % of the sums modulo 113."""
    for method in grokking.METHODS:
        config = grokking.get_config(f'method={method},size=paper')
        table = config.task.table
        assert (table.modulus, table.share, config.steps) == (113, 0.4, 80_000)
        assert config.optimizer.b2 == (0.999 if method == 'stablemax' else 0.99)
        assert (config.optimizer.peak_lr, config.optimizer.eps, config.optimizer.clip) == (1e-2, 1e-25, None)
    small = grokking.get_config('method=stablemax,size=tiny')
    # 0.701 of 59^2 sums, and not 0.7, because eight devices share 2,440 of them.
    assert (small.task.table.modulus, small.task.table.share, small.batch_size) == (59, 0.701, 2440)
    assert small.batch_size % 8 == 0


def test_grokking_is_traced():
    config = grokking.get_config('method=perpendicular')
    with config.unlocked():
        config.model.loss = 'stablemax'
    prepare(config).trace()


@pytest.mark.parametrize(('task', 'fewest', 'most'), [('parity', 2, 39), ('arithmetic', 4, 40)])
def test_languages_as_published_have_their_lengths(task, fewest, most):
    config = recall.get_config(f'task={task},size=paper')
    found, rng = build(config.task), np.random.default_rng(0)
    (beyond,) = (extra for extra in found.extra if extra.name == 'length=40-256')
    for problem, length, ends in (
        (found.problem, config.length, (fewest, most)),
        (beyond.problem, beyond.length, (40, 256)),
    ):
        drawn = [len(problem.generate(rng, length).tokens) for _ in range(3000)]
        assert (min(drawn), max(drawn)) == ends


@pytest.mark.parametrize('task', ['mqar', 'mqar_mixed', 'induction', 'parity', 'arithmetic', 's5', 'regression'])
def test_recall_as_published_has_the_adam_of_the_released_code(task):
    optimizer = recall.get_config(f'task={task},size=paper').optimizer
    assert (optimizer.b1, optimizer.b2, optimizer.clip) == (0.9, 0.999, None)


@pytest.mark.parametrize(('task', 'random'), [('mqar', False), ('mqar_mixed', True)])
def test_recall_as_published_has_the_fillers_of_the_released_configs(task, random):
    """Zeros in the sizes of Zoology's figure 2, random tokens in the five kinds of Based's; the table says which."""
    problem, rng = build(recall.get_config(f'task={task},size=paper').task.problem), np.random.default_rng(0)
    for part in problem.parts if random else [problem]:
        (pairs,) = part.pairs
        # Queries are at even distances from the pairs, so that fillers have the odd ones to themselves.
        fillers = part.generate(rng, 4 * pairs + 200).tokens[2 * pairs + 1 :: 2]
        assert len(set(fillers.tolist())) > 90 if random else not fillers.any()
    assert f'fillers are {"random tokens" if random else 0}' in recall.DEPARTURES[task]


def test_mixed_recall_as_published_says_what_every_size_weighs():
    problem, said = recall.PAPER['mqar_mixed'].problem, recall.DEPARTURES['mqar_mixed']
    pairs, examples = np.array([part.pairs[0] for part in problem.parts]), np.array(problem.shares)
    of_examples, of_loss = examples / examples.sum(), examples * pairs / (examples @ pairs)
    assert (pairs[0], pairs[-1]) == (4, 64)
    assert f'4 pairs are {of_examples[0]:.2f} of the examples and {of_loss[0]:.2f} of the loss' in said
    assert f'of 64 pairs {of_examples[-1]:.2f} and {of_loss[-1]:.2f},' in said


@pytest.mark.parametrize(('task', 'examples'), [('mqar', '3,000'), ('mqar_mixed', '1,000')])
def test_recall_as_published_names_what_the_config_has_in_place(task, examples):
    """What is no longer so is no longer said."""
    config, said = recall.get_config(f'task={task},size=paper,zoo=mha'), recall.DEPARTURES[task]
    (block,), model, schedule = config.model.stack.blocks, config.model, config.optimizer.schedule
    so = {
        'one of four learning rates': config.optimizer.peak_lr in sweeps_recall.RATES + sweeps_recall.MIXED,
        'no dropout': block.dropout == 0,
        'one cosine to a tenth, not one to 0 an epoch': (schedule.target, schedule.final) == (COSINE, 0.1),
        'a warm-up over a tenth of the steps, not none': schedule.warmup == 0.1,
        'norms are RMSNorm, not LayerNorm': block.norm.target == model.norm.target == spec(RMSNorm).target,
        'attention has no biases': not block.mixer.bias,
        'the head is its own, not tied to the embedding': model.head is not None,
        'initial values are ours': model.inputs.scale == recall.EMBEDDING,
        'positions are rotary': block.mixer.position.target == spec(Rope).target,
        '512': config.evals[0].examples == 512 != int(examples.replace(',', '')),
        examples: True,
    }
    assert all(so.values()) and [words for words in so if words not in said] == []


@pytest.mark.parametrize('task', recall.REGRESSION)
def test_regression_as_published_names_what_the_config_has_in_place(task):
    config, said = recall.get_config(f'task={task},size=paper,zoo=mha'), recall.DEPARTURES[task]
    (block,), model, schedule = config.model.stack.blocks, config.model, config.optimizer.schedule
    norms, mlp = {block.norm.target, model.norm.target}, block.mlp
    so = {
        'rotary positions': block.mixer.position.target == spec(Rope).target,
        'RMSNorm and gated MLPs without biases, not the layers of GPT-2': norms == {spec(RMSNorm).target}
        and mlp.target == spec(GatedMLP).target
        and not block.mixer.bias,
        'a warm-up over a fiftieth of the steps, not none': (schedule.target, schedule.warmup) == (CONSTANT, 0.02),
        '512 test prompts, not 1,280': config.evals[0].examples == 512,
    }
    assert all(so.values()) and [words for words in so if words not in said] == []


@pytest.mark.parametrize('task', ['selective_copying', 'delayed_copying', 'induction'])
def test_copying_and_induction_as_published_have_a_rate_that_is_constant(task):
    config = recall.get_config(f'task={task},size=paper')
    optimizer = config.optimizer
    assert (optimizer.schedule.target, optimizer.schedule.warmup) == (CONSTANT, 0.0)
    rates = build(optimizer.schedule)(config.steps, optimizer.peak_lr)
    assert {float(rates(step)) for step in (0, 1, config.steps - 1)} == {float(np.float32(optimizer.peak_lr))}


@pytest.mark.parametrize('task', recall.GROUPS)
def test_word_problems_as_published_name_what_the_config_has_in_place(task):
    config, said = recall.get_config(f'task={task},size=paper,zoo=mha'), recall.DEPARTURES[task]
    (block,), schedule = config.model.stack.blocks, config.optimizer.schedule
    assert (config.batch_size, config.optimizer.peak_lr, config.optimizer.weight_decay) == (32, 1e-4, 0.01)
    so = {
        '50,000 steps': config.steps == 50_000,
        'a warm-up over a tenth of the steps, then a cosine to a tenth of the rate': (
            (schedule.target, schedule.warmup, schedule.final) == (COSINE, 0.1, 0.1)
        ),
        'gated MLPs of 1,408 channels': block.mlp.hidden is None and gated_width(config.model.dim) == 1408,
    }
    assert all(so.values()) and [words for words in so if words not in said] == []


def test_every_task_has_every_size():
    assert recall.TINY.keys() == recall.PAPER.keys() == recall.DEPARTURES.keys()


@sequences
def test_long_range_by_any_recipe(name):
    for protocol in ('scratch', 'pretrain'):
        config = long_range.get_config(f'zoo={name},size=smoke,protocol={protocol}')
        with config.unlocked():
            config.length = 32
        setup = prepared(config)
        setup.trace()
        assert (state_bytes(setup, 32) == 0) == (protocol == 'scratch' or ZOO[name].bidirectional)


@sequences
def test_long_range_gives_positions_to_what_cannot_tell_left_from_right(name):
    model = long_range.get_config(f'zoo={name},size=smoke').model
    assert (model.positions is not None) == ZOO[name].mirrored


def test_long_range_gives_positions_to_windows_that_cannot_tell_left_from_right():
    for fast in ('gla', 's4'):
        model = long_range.get_config(f'zoo=mamba,fast={fast},size=smoke').model
        assert (model.positions is not None) == ZOO[fast].mirrored


@pytest.mark.parametrize('name', ['norm_lin', 'hyena', 'gau'])
def test_long_range_makes_mixers_of_a_length_for_one_document(name):
    """Of a pair each is a row of its own; at two rates a row has a summary for every ten tokens."""
    for task, more, lengths in (
        ('listops', '', [2_000]),
        ('aan', '', [4_000]),
        ('aan', f',fast={name}', [10, 400]),
        ('aan', ',protocol=pretrain', [4_000]),
    ):
        stack = long_range.get_config(f'task={task},zoo={name}{more}').model.stack
        stacks = [stack.fast, stack.slow] if 'fast' in stack else [stack]
        assert [each.blocks[0].mixer.length for each in stacks] == lengths


def test_what_runs_on_pairs_is_asked_of_one_document():
    """Of as many tokens as the mixer is made for."""
    assert implementations(prepare(long_range.get_config('task=aan,zoo=norm_lin'))) == []


LONG_RANGE = [f'task={name},size={size}' for size, runs in long_range.SIZES.items() for name in runs]


@pytest.mark.parametrize('argument', LONG_RANGE)
def test_long_range_on_every_task(argument):
    config = long_range.get_config(argument)
    with config.unlocked():
        config.length = 32
    setup = prepared(config)
    batch = setup.abstract_batch()
    measured = jax.eval_shape(setup.measure, setup.abstract.params, batch)
    assert set(measured) == {'loss', 'accuracy', 'accuracy_products'}


@pytest.mark.parametrize('name', long_range.PUBLISHED)
def test_long_range_has_the_sizes_of_papers(name):
    """Of every task: what the paper has is in the config, and a mixer can be made of it."""
    for task, published in long_range.PUBLISHED[name].items():
        config, of_s4 = long_range.get_config(f'task={task},zoo={name},size=full'), long_range.FULL[task]
        assert config.steps == published.get('steps', of_s4.steps)
        assert config.optimizer.peak_lr == published.get('peak_lr', of_s4.peak_lr)
        assert config.model.dim == published.get('dim', of_s4.dim)
        assert config.model.stack.depth == published.get('depth', of_s4.depth)
        block = config.model.stack.blocks[0]
        assert (block.mlp is None) == (published['mlp']() is None)
        assert all(config_path.get_value(key, block.mixer) == size for key, size in published.get('sizes', {}).items())
        jax.eval_shape(lambda block=block, dim=config.model.dim: nnx.state(build(block.mixer)(dim, rngs=nnx.Rngs(0))))


BY_HAND = {
    # Batch, weight decay, dropout, steps of warm-up, all steps, greatest rate and that of the dynamics.
    ('s4', 'listops'): (50, 0.05, 0.0, 1_000, 76_800, 0.01, 0.001),
    ('s4', 'imdb'): (16, 0.05, 0.0, 1_000, 50_000, 0.01, 0.001),
    ('s4', 'aan'): (64, 0.05, 0.0, 2_500, 46_000, 0.01, 0.001),
    ('s4', 'cifar10'): (50, 0.05, 0.1, 900, 180_000, 0.01, 0.001),
    ('s4d', 'pathfinder'): (64, 0.03, 0.0, 2_500, 500_000, 0.004, 0.001),
    ('s4d', 'pathfinder128'): (16, 0.05, 0.0, 10_000, 500_000, 0.0005, 0.0005),
    ('s4', 'speech_commands'): (16, 0.05, 0.0, 1_000, 212_000, 0.01, 0.001),
    ('s5', 'listops'): (50, 0.04, 0.0, 1_920, 76_800, 0.003, 0.001),
    ('s5', 'imdb'): (50, 0.07, 0.1, 0, 17_500, 0.004, 0.001),
    ('s5', 'aan'): (32, 0.05, 0.0, 4_600, 92_000, 0.002, 0.001),
    ('s5', 'cifar10'): (50, 0.07, 0.1, 900, 225_000, 0.0045, 0.001),
    ('s5', 'pathfinder'): (64, 0.03, 0.05, 2_500, 500_000, 0.0045, 0.0009),
    ('s5', 'pathfinder128'): (32, 0.06, 0.0, 5_000, 375_000, 0.0018, 0.0006),
    ('s5', 'speech_commands'): (16, 0.04, 0.1, 5_303, 212_000, 0.008, 0.002),
    ('lru', 'pathfinder128'): (32, 0.05, 0.0, 25_000, 250_000, 0.002, 0.0005),
    ('hgrn', 'listops'): (128, 0.01, 0.0, 5_000, 50_000, 0.0005, 0.0005),
    ('bi_hgrn', 'imdb'): (32, 0.0, 0.1, 10_000, 50_000, 0.005, 0.005),
    ('hgrn', 'aan'): (64, 0.0, 0.0, 312, 50_000, 0.005, 0.005),
    ('bi_hgrn', 'cifar10'): (50, 0.0, 0.0, 30_000, 50_000, 0.003, 0.003),
    ('hgrn', 'pathfinder'): (128, 0.0, 0.0, 50_000, 500_000, 0.002, 0.002),
    ('hgrn', 'pathfinder128'): (16, 0.0, 0.0, 150_000, 500_000, 0.00075, 0.00075),
    ('mega', 'listops'): (64, 0.01, 0.1, 3_000, 90_000, 0.001, 0.001),
    ('bi_mega', 'imdb'): (50, 0.01, 0.1, 10_000, 25_000, 0.004, 0.004),
    ('mega', 'cifar10'): (50, 0.02, 0.0, 9_000, 180_000, 0.01, 0.01),
    ('mega', 'pathfinder128'): (16, 0.01, 0.0, 25_000, 125_000, 0.01, 0.01),
    ('seqboat', 'listops'): (64, 0.001, 0.1, 27_000, 90_000, 0.004, 0.004),
    ('bi_seqboat', 'aan'): (64, 0.04, 0.1, 10_000, 91_960, 0.003, 0.003),
    ('seqboat', 'pathfinder'): (128, 0.01, 0.0, 50_000, 250_000, 0.01, 0.01),
    ('mha', 'listops'): (32, 0.1, 0.1, 1_000, 5_000, 0.0016, 0.001),
    ('mha', 'imdb'): (32, 0.1, 0.1, 8_000, 20_000, 0.00056, 0.00056),
    ('mha', 'aan'): (32, 0.1, 0.1, 4_500, 5_000, 0.00035, 0.00035),
    ('mha', 'cifar10'): (256, 0.0, 0.3, 175, 35_000, 0.0005, 0.0005),
    ('mha', 'pathfinder'): (512, 0.0, 0.2, 312, 62_400, 0.001, 0.001),
    ('mha', 'pathfinder128'): (64, 0.0, 0.1, 2_500, 500_000, 0.001, 0.001),
}


def test_time_scales_have_a_rate_of_their_own_on_long_ranges_and_images_alone():
    for config in (
        language.get_config('zoo=s5'), recall.get_config('zoo=s5'), series.get_config('zoo=s5'),
        series.get_config('task=classification,zoo=s5'),
    ):  # fmt: skip
        assert build(config.optimizer).groups.dynamics == Group(weight_decay=0.0)
    for config in (long_range.get_config('zoo=s5,size=smoke'), images.get_config('zoo=s5,data=count')):
        optimizer = build(config.optimizer)
        # As it was where configs named the fraction: to the bit, so that runs at the config's own rate are the same.
        assert optimizer.rates.shares == (0.5,)
        for peak_lr in (1e-2, 5e-4):
            (share,) = dataclasses.replace(optimizer, peak_lr=peak_lr).rates.shares
            assert share * peak_lr == pytest.approx(min(1e-3, peak_lr))
    lion = build(images.get_config('zoo=s5,data=count,optimizer=lion').optimizer)
    assert lion.rates.shares == pytest.approx((0.5,)) and lion.peak_lr == pytest.approx(4e-4)


@pytest.mark.parametrize(('name', 'task'), BY_HAND)
def test_long_range_is_trained_as_papers_do(name, task):
    config = long_range.get_config(f'task={task},zoo={name},size=full')
    block, run = config.model.stack.blocks[0], config.optimizer
    warmup = run.schedule.warmup
    found = (config.batch_size, run.weight_decay, block.dropout, warmup if warmup >= 1 else warmup * config.steps)
    limit, dynamics = run.groups.dynamics.most, run.groups.dynamics.lr * run.peak_lr
    found = (*found, config.steps, run.peak_lr, dynamics if limit is None else min(limit, dynamics))
    assert found == pytest.approx(BY_HAND[name, task])
    linear = name.removeprefix('bi_') in ('mega', 'seqboat')
    assert run.schedule.target.endswith('.LinearDecay' if linear else '.Cosine')
    assert run.groups.dynamics.weight_decay == 0


def test_long_range_gives_both_readings_what_is_published_for_one():
    """Both mixers of a layer have the sizes and the window, and Path-X of S4D and CIFAR-10 of S4 their own systems."""
    config = long_range.get_config('task=pathfinder128,zoo=bi_seqboat,size=full')
    (block,) = config.model.stack.blocks
    ahead, back = (mixer for mixer in within(block.mixer) if 'mixers' not in mixer)
    assert config.model.dim == 128 and block.mlp is None
    for mixer in (ahead, back):
        assert (mixer.key_dim, mixer.value_dim, mixer.temperature, mixer.window) == (64, 256, 1.0, 256)
    systems = [
        long_range.get_config(f'task={task},zoo={name},size=full').model.stack.blocks[0].mixer.system
        for task, name in (('pathfinder128', 's4d'), ('pathfinder', 's4d'), ('cifar10', 's4'), ('listops', 's4'))
    ]
    assert [system.starts for system in systems] == [('inv',), ('lin',), ('legs',), ('legs',)]
    assert [system.copies for system in systems] == [None, None, 2, None] and systems[0].low == 1e-4


def test_long_range_has_the_heads_of_the_arena():
    """Widths of keys of all heads: 512, 256, 128, 64, 16 and 16."""
    found = []
    for task in ('listops', 'imdb', 'aan', 'cifar10', 'pathfinder', 'pathfinder128'):
        config = long_range.get_config(f'task={task},zoo=mha,size=full')
        (block,) = config.model.stack.blocks
        mixer = nnx.eval_shape(lambda block=block, dim=config.model.dim: build(block.mixer)(dim, rngs=nnx.Rngs(0)))
        found.append(mixer.query.weight.shape[1:])
    assert [int(np.prod(shape)) for shape in found] == [512, 256, 128, 64, 16, 16]


RATES_BY_HAND = {
    # Greatest rate and weight decay of steps of time, inputs B and outputs C; those of D are those of C.
    ('s4', 'imdb'): ((0.01, 0.0), (0.001, 0.0), (0.01, 0.05)),
    ('s4', 'pathfinder'): ((0.001, 0.0), (0.001, 0.0), (0.004, 0.03)),
    ('s4', 'pathfinder128'): ((0.0005, 0.0), (0.0005, 0.0), (0.0005, 0.05)),
    ('s4d', 'cifar10'): ((0.01, 0.0), (0.001, 0.0), (0.01, 0.05)),
    ('s4', 'speech_commands'): ((0.001, 0.0), (0.001, 0.0), (0.01, 0.05)),
    # BfastandCdecay, standard with dt_global, standard, BandCdecay and noBCdecay of the released code.
    ('s5', 'listops'): ((0.001, 0.0), (0.003, 0.04), (0.003, 0.04)),
    ('s5', 'aan'): ((0.002, 0.05), (0.001, 0.0), (0.002, 0.05)),
    ('s5', 'pathfinder'): ((0.0009, 0.0), (0.0009, 0.0), (0.0045, 0.03)),
    ('s5', 'pathfinder128'): ((0.0006, 0.0), (0.0006, 0.06), (0.0018, 0.06)),
    ('s5', 'speech_commands'): ((0.002, 0.0), (0.002, 0.0), (0.002, 0.0)),
}


@pytest.mark.parametrize(('name', 'task'), RATES_BY_HAND)
def test_long_range_trains_single_parameters_as_papers_do(name, task):
    config = long_range.get_config(f'task={task},zoo={name},size=full')
    (block,), optimizer = config.model.stack.blocks, build(config.optimizer)
    params = nnx.state({'mixer': nnx.eval_shape(lambda: build(block.mixer)(8, rngs=nnx.Rngs(0)))})
    found = []
    for part in ('system/log_step', 'system/B', 'system/C', 'system/C_later', 'D'):
        group = optimizer.multipliers(params)[f'mixer/{part}']
        rate = group.share(optimizer.peak_lr) * optimizer.peak_lr
        found.append(pytest.approx((rate, group.weight_decay * optimizer.weight_decay)))
    assert found == [*RATES_BY_HAND[name, task], *(RATES_BY_HAND[name, task][-1],) * 2]


def test_long_range_bounds_the_gates_of_hgrn_from_layer_to_layer():
    """They are learned as in the paper, in mixers of both readings, and start at the layers below over all."""
    for name, conv in (('hgrn', '0'), ('bi_hgrn', '0'), ('hgrn', '1')):
        config = long_range.get_config(f'task=imdb,zoo={name},size=full,conv={conv}')
        assert (config.model.stack.depth, config.model.dim) == (4, 128)
        made = list(build(config.model.stack)(8, rngs=nnx.Rngs(0)).layers())
        found = [{float(bound.bounds[...].mean()) for bound in modules_of(layer, RisingBound)} for layer in made]
        assert found == ([{0.0}, {0.25}, {0.5}, {0.75}] if conv == '0' else [set(), {0.0}, set(), {0.5}])
        assert all(block.mlp.hidden == 128 for block in config.model.stack.blocks)
    (block,) = long_range.get_config('task=listops,zoo=hgrn,size=smoke').model.stack.blocks
    assert block.mixer.lower_bound == 0


def test_long_range_has_what_s5_starts_as_and_is_read_by():
    """`C_init`, `activation_fn` and `clip_eigs` of the released scripts."""
    found = {}
    for task in long_range.PUBLISHED['s5']:
        (block,) = long_range.get_config(f'task={task},zoo=s5,size=full').model.stack.blocks
        found[task] = (block.mixer.system.outputs, block.mixer.readout.multiplied, block.mixer.system.greatest)
    assert found == {
        'listops': ('map', 'given', None),
        'imdb': ('map', 'given', None),
        'aan': ('states', 'activated', None),
        'cifar10': ('map', 'activated', -1e-4),
        'pathfinder': ('states', 'activated', None),
        'pathfinder128': ('modes', 'activated', None),
        'speech_commands': ('map', 'activated', None),
    }


def test_long_range_has_published_sizes_beside_convolutions_that_take_none():
    convolution, block = long_range.get_config('task=cifar10,zoo=s4,size=full,conv=1').model.stack.blocks
    assert block.mixer.system.copies == 2 and 'system' not in convolution.mixer


def test_long_range_has_the_sizes_of_s4_for_others():
    config, of_s4 = long_range.get_config('task=listops,zoo=gla,size=full'), long_range.FULL['listops']
    assert (config.model.dim, config.steps, config.optimizer.peak_lr) == (of_s4.dim, of_s4.steps, of_s4.peak_lr)
    assert config.model.stack.blocks[0].mlp is not None


@pytest.mark.parametrize('name', long_range.SMOKE)
def test_long_range_without_preparation(name):
    if name == 'digits':
        pytest.importorskip('sklearn')
    setup = prepared(long_range.get_config(f'task={name},size=smoke'))
    setup.task.source('train', setup.length)
    row, example = setup.task.source('train', setup.length)[0], setup.task.example(setup.length)
    assert {name: (np.shape(value), value.dtype) for name, value in row.items()} == {
        name: (np.shape(value), value.dtype) for name, value in example.items()
    }


@pytest.mark.parametrize('name', long_range.FULL)
def test_long_range_evaluates_whole_splits_at_full_size(name):
    """Documents of `imdb` are 25,000 in the test split."""
    (evaluator,) = long_range.get_config(f'task={name},size=full').evals
    assert evaluator.examples == WHOLE


def test_long_range_says_what_to_prepare(tmp_path):
    config = long_range.get_config('task=pathfinder')
    with config.unlocked():
        config.task.data.data_dir = str(tmp_path)
    with pytest.raises(UserError, match=f'run: attnlab data prepare pathfinder --data_dir={tmp_path}'):
        prepared(config).load_data()
    with pytest.raises(UserError, match='there is no task=digits; valid names: aan, cifar10'):
        long_range.get_config('task=digits,size=full')


@zoo
def test_images_by_any_recipe(name):
    setup = prepared(images.get_config(f'zoo={name}'))
    setup.trace()
    assert not setup.model.streaming


@pytest.mark.parametrize(
    'argument', [*(f'data={name}' for name in images.DATA), 'data=count,size=small,stem=overlap,head=arcface']
)
def test_images_of_every_kind(argument):
    setup = prepared(images.get_config(argument))
    measured = jax.eval_shape(setup.measure, setup.abstract.params, setup.abstract_batch())
    overlaps = {'data=segments': range(1, 4), 'data=surfaces': range(5), 'data=parts': range(7)}.get(argument, ())
    assert set(measured) == {'loss', 'accuracy', 'accuracy_products'} | {f'iou_{o}' for o in overlaps}


@pytest.mark.parametrize('name', ['condaformer', 'polarized', 'gla'])
def test_clouds_are_read_as_volumes(name):
    setup = prepared(images.get_config(f'zoo={name},data=parts,side=4'))
    setup.trace()
    assert setup.model.embedding.grid == (4, 4, 4) and setup.length == 512
    flat = prepared(images.get_config('zoo=swin,data=parts'))
    with pytest.raises(UserError, match=r'mixes tokens on a grid of 2 axes; ctx.grid is \(8, 8, 8\)'):
        flat.trace()


def test_clouds_are_read_as_rows_of_occupied_voxels():
    setup = prepared(images.get_config('zoo=gla,data=parts,side=16,voxels=occupied'))
    setup.trace()
    assert setup.model.embedding.grid is None and setup.abstract_batch()['tokens'].shape[1:] == (512, 8)


def test_clouds_are_read_as_volumes_with_empty_places():
    """By mixers of volumes that keep these out; others say so."""
    setup = prepared(images.get_config('zoo=condaformer,data=parts,side=4,voxels=occupied'))
    setup.trace()
    assert setup.model.embedding.grid == (4, 4, 4) and setup.abstract_batch()['segments'].shape[1:] == (64,)
    with pytest.raises(UserError, match='zoo=swin needs a grid, which some of the voxels are not'):
        images.get_config('zoo=swin,data=parts,voxels=occupied')


def test_images_with_pictures_at_the_end():
    for arguments, names in (
        ('data=segments,layout=pyramid', ['test', 'field', 'segmented']),
        ('predict=v', ['test', 'field', 'drawn']),
    ):
        setup = prepare(images.get_config(f'{arguments},pictures=1'))
        assert [evaluator.name for evaluator in setup.evals] == names
    with pytest.raises(UserError, match='pictures=1 shows what a token on a grid has seen; it needs token=mean'):
        images.get_config('token=first,pictures=1')


def test_images_with_a_class_token():
    setup = prepared(images.get_config('data=count,token=middle,positions=sinusoidal,stem=conv'))
    setup.trace()
    assert setup.model.pool.place == 128 and setup.model.embedding.grid is None
    with pytest.raises(
        UserError, match='token=first adds a token that lies on no grid; zoo=mha with data=segments and '
    ):
        images.get_config('data=segments,token=first')


@pytest.mark.parametrize('data', ['digits', 'segments'])
def test_pyramids(data):
    setup = prepare(images.get_config(f'zoo=pvt,layout=pyramid,data={data}'))
    measured = jax.eval_shape(setup.measure, setup.abstract.params, setup.abstract_batch())
    assert ('iou_1' in measured) == (data == 'segments')
    assert [(stack.dim, stack.depth) for stack in setup.model.stack.parts] == [(32, 1), (64, 1)]
    assert [stack.blocks[0].mixer.reduction.ratio for stack in setup.model.stack.parts] == [2, 1]


@pytest.mark.parametrize('layout', ['pyramid', 'paper'])
def test_stages_are_those_of_the_mixers_between_convolutions(layout):
    config = images.get_config(f'zoo=pvt,conv=1,layout={layout},data=count')
    prepare(config).trace()
    for resolution, ratio in zip(config.model.stack.resolutions[-2:], (2, 1), strict=True):
        convolution, attention = (block.mixer for block in resolution.stack.blocks)
        assert attention.reduction.ratio == ratio and 'reduction' not in convolution


@pytest.mark.parametrize('name', ['swin', 'pvt'])
def test_channel_mixers_of_a_paper_have_the_exact_gelu(name):
    """As `nn.GELU` is, which the released code of both has."""
    resolutions = images.get_config(f'zoo={name},layout=paper').model.stack.resolutions
    mlp = build(resolutions[-1].stack.blocks[0].mlp)(8, rngs=nnx.Rngs(0))
    for linear in (mlp.up, mlp.down):
        linear.weight[...] = jnp.zeros(linear.weight.shape).at[0, 0].set(1.0)
    x = np.linspace(-4, 4, 81)
    found = mlp(jnp.zeros((1, 81, 8)).at[..., 0].set(x))[0, :, 0]
    np.testing.assert_allclose(found, x * (1 + erf(x / 2**0.5)) / 2, atol=1e-5)


def test_stages_of_a_paper_have_convolutions():
    for block in blocks_of(images.get_config('zoo=swin,conv=AC,layout=paper')):
        assert block.mixer_prelude.target.endswith('Canon') and block.mlp_prelude.target.endswith('Canon')
        assert block.norm.target.endswith('LayerNorm')


@pytest.mark.parametrize(
    ('name', 'least', 'most'),
    # Published: 28.3 and 13.2 million with classifiers of 1,000 classes and, of PVT, positions of 224 x 224 pixels.
    [('swin', 27.45e6, 27.55e6), ('pvt', 12.28e6, 12.38e6)],
)
def test_pyramids_of_papers(name, least, most):
    setup = prepare(images.get_config(f'zoo={name},layout=paper'))
    assert least < parameters(setup) < most


@pytest.mark.parametrize('name', ['swin', 'pvt'])
def test_pyramids_start_as_in_the_released_code(name):
    """Linear maps with a deviation of 0.02; convolutions, with which pvt reduces and merges, uniform as in PyTorch."""
    usual, config = (images.get_config(f'zoo={name},layout=pyramid,data=count{init}') for init in ('', ',init=paper'))
    first, second = build(config.model.stack)(32, rngs=nnx.Rngs(0)).resolutions
    block = first.stack.blocks[0]
    query = block.mixer.qkv if name == 'swin' else block.mixer.query
    for linear in (query, block.mixer.output, block.mlp.up, block.mlp.down):
        assert np.asarray(linear.weight[...]).std() == pytest.approx(0.02, rel=0.1)
    merge = second.merge.linear if name == 'swin' else second.merge.map.linear
    convolutions = [] if name == 'swin' else [merge, block.mixer.reduction.conv.linear]
    for linear in convolutions:
        bound, weights = linear.weight.shape[-2] ** -0.5, np.abs(np.asarray(linear.weight[...]))
        assert 0.95 * bound < weights.max() <= bound and weights.mean() == pytest.approx(bound / 2, rel=0.1)
    if name == 'swin':
        assert np.asarray(merge.weight[...]).std() == pytest.approx(0.02, rel=0.1)
    assert usual.model.stack.resolutions[1].merge.start is None and ZOO[name].hierarchy.merge.start is None


BY_LAYER = {
    ('lightning', 'decay.depth'): [0, 1 / 3, 2 / 3, 1],
    ('minimax_01', 'decay.depth'): [0, 1 / 3, 2 / 3, 1],
    **{
        (name, key): values
        for name in ('rwkv6', 'rwkv7')
        for key, values in {
            'place': [0, 1 / 3, 2 / 3, 1],
            'remaining': [1, 0.75, 0.5, 0.25],
            'norm_gain': [0.25**0.7, 0.5**0.7, 0.75**0.7, 1],
        }.items()
    },
}
"""What papers and released code have in the layers of four."""


@pytest.mark.parametrize(('name', 'key'), BY_LAYER)
def test_init_paper_has_what_depends_on_the_place_of_a_layer(name, key):
    """Without it all layers are one block, as the first."""
    stack = language.get_config(f'zoo={name},init=paper').model.stack
    blocks = stack.blocks[: stack.depth]
    assert [value_at(block.mixer, key) for block in blocks] == pytest.approx(BY_LAYER[name, key])
    assert stack.depth == 4 and {key for _, key in BY_LAYER if (name, key) in BY_LAYER} == {*ZOO[name].start.by_layer}
    usual = language.get_config(f'zoo={name}').model.stack
    assert len(usual.blocks) == len(ZOO[name].pattern) and missing_layers(stack) == missing_layers(usual)


def test_init_paper_counts_all_layers_and_leaves_those_beside_a_recipe_as_they_are():
    """Attention and convolutions between layers, and those of other resolutions."""
    blocks = language.get_config('zoo=minimax_01,init=paper,size=125m').model.stack.blocks
    assert [block.mixer.decay.depth if 'decay' in block.mixer else None for block in blocks] == pytest.approx(
        [*(layer / 11 for layer in range(7)), None, *(layer / 11 for layer in range(8, 12))]
    )
    blocks = recall.get_config('task=facts,zoo=rwkv7,init=paper,conv=1').model.stack.blocks
    assert [block.mixer.place if 'place' in block.mixer else None for block in blocks] == [None, 1 / 3, None, 1]
    assert ['value_residual' in block.mixer for block in blocks] == [False, True] * 2
    lower = images.get_config('zoo=lightning,layout=pyramid,data=count,init=paper').model.stack.resolutions
    depths = [block.mixer.decay.depth for each in lower for block in each.stack.blocks]
    assert depths == [layer / (len(depths) - 1) for layer in range(len(depths))] and len(lower) > 1
    with pytest.raises(UserError, match=r'init=paper of zoo=lightning makes layers by their place \(decay\.depth\)'):
        images.get_config('zoo=lightning,layers=linear,init=paper')


@pytest.mark.parametrize('name', ['swin', 'pvt'])
def test_stages_of_a_paper_keep_what_their_maps_start_from(name):
    resolutions = images.get_config(f'zoo={name},layout=paper,init=paper').model.stack.resolutions
    assert all(each.merge.start is not None for each in resolutions[1:])
    if name == 'pvt':
        reductions = [each.stack.blocks[0].mixer.reduction for each in resolutions]
        assert [each.ratio for each in reductions] == [8, 4, 2, 1]
        assert all(each.start.distribution == 'uniform' for each in reductions)


def test_two_steps_of_a_pyramid():
    config = images.get_config('zoo=swin,layout=pyramid')
    with config.unlocked():
        config.batch_size, config.evals = 2, ()
    take_two_steps(prepare(config))


@pytest.mark.slow
@pytest.mark.parametrize('name', ['swin', 'pvt'])
def test_two_steps_of_the_model_of_a_paper(name):
    config = images.get_config(f'zoo={name},layout=paper,data=count,init=paper')
    with config.unlocked():
        config.batch_size, config.evals = 2, ()
    take_two_steps(prepare(config))


@pytest.mark.parametrize(
    ('argument', 'sentence'),
    [
        (
            'zoo=mha,layout=paper',
            'layout=paper is for recipes whose paper has a hierarchical model, swin, pvt; zoo=mha',
        ),
        ('layout=flaat', "there is no layout=flaat; did you mean 'flat'"),
        ('layout=pyramid,token=first', 'zoo=mha with data=digits and layout=pyramid needs token=mean'),
    ],
)
def test_layouts_name_mistakes(argument, sentence):
    with pytest.raises(UserError, match=sentence):
        images.get_config(argument)


def test_images_are_drawn_from_noise(tmp_path):
    config = images.get_config('predict=v,given=label')
    with config.unlocked():
        config.model.stack.depth, config.batch_size = 1, 2
        config.evals[1].count, config.evals[1].steps = 2, 2
    setup = prepare(config)
    state, evaluator = take_two_steps(setup), setup.evals[1]
    evaluator.load_data(setup)
    found = evaluator.evaluate(setup, state.variables)
    assert found.pictures.shape == (2, 8, 8, 1) and found.numbers['mean_error'] > 0
    with pytest.raises(UserError, match='predict=v predicts numbers for every patch; it needs layout=flat'):
        images.get_config('predict=v,layout=pyramid')


@pytest.mark.parametrize(('data', 'count'), [('digits', 64), ('cifar100', 100)])
def test_images_are_drawn_of_every_label(data, count):
    config = images.get_config(f'predict=v,given=label,data={data}')
    assert build(config.evals[1]).count == count
    assert set(build(config.task).asked(count)) == set(range(build(config.task).data.kind.classes))


def test_time_is_told_to_norms():
    """Of every branch; the pixels are then mapped without it."""
    setup = prepare(images.get_config('zoo=lamamba,predict=v,given=label,told=norms'))
    blocks = setup.model.stack.blocks
    assert {type(block).__name__ for block in blocks} == {'AdaptiveBlock'}
    assert setup.model.embedding.channels == 1 and setup.model.embedding.told == 18
    setup.trace()
    for argument, sentence in (
        ('told=norms', 'told=norms is for predict=epsilon and predict=v'),
        ('zoo=uniattn,predict=v,told=norms', 'those of zoo=uniattn have their own'),
    ):
        with pytest.raises(UserError, match=sentence):
            images.get_config(argument)


def test_norms_of_images(tmp_path):
    """Of the blocks and the last one; that of batches, of the blocks alone. A run with it goes on with its averages."""
    plain, batches = (images.get_config(f'layout=pyramid,zoo=swin,norm={name}') for name in ('dyt', 'evonorm_b0'))
    for config, last in ((plain, 'DynamicTanh'), (batches, 'RMSNorm')):
        assert config.model.norm.target.endswith(last)
    assert {each.norm.target for each in blocks_of(batches)} == {'attnlab.nn.norms.EvoNormB0'}
    config = images.get_config('norm=evonorm_b0')
    with config.unlocked():
        config.model.stack.depth, config.batch_size, config.evals = 1, 2, ()
    state = take_two_steps(prepare(config))
    moving = state.buffers['stack']['blocks'][0]['mlp_norm']['moments'][...]
    assert (moving[..., :-1] != 1).all() and (moving[..., -1] == 1).all()
    for argument, sentence in (
        ('norm=evonorm_b00', "there is no norm=evonorm_b00; did you mean 'evonorm_b0'"),
        ('zoo=gla,data=parts,voxels=occupied,norm=evonorm_b0', 'voxels=occupied has padding, which norm=evonorm_b0'),
        ('zoo=condaformer,data=parts,voxels=occupied,norm=evonorm_b0', 'voxels=occupied has padding'),
        ('zoo=swin,layout=paper,norm=dyt', 'norm=dyt is for layout=flat and layout=pyramid'),
        ('zoo=uniattn,norm=dyt', 'norm=dyt is for blocks that take one; those of zoo=uniattn have their own'),
    ):
        with pytest.raises(UserError, match=sentence):
            images.get_config(argument)


def blocks_of(config):
    return [block for each in config.model.stack.resolutions for block in each.stack.blocks]


def test_images_of_ones_own(tmp_path):
    for name in ('cat', 'dog'):
        (tmp_path / name).mkdir()
        for number in range(10):
            Image.new('RGB', (9, 9), (number, 0, 0)).save(tmp_path / name / f'{number}.png')
    config = images.get_config(f'data={tmp_path},side=8,augment=crop+flip+rand+mixup+cutmix')
    with config.unlocked():
        config.model.stack.depth, config.batch_size, config.model.head.smoothing = 1, 2, 0.1
    setup = prepare(config)
    assert setup.model.outputs == 2 and setup.model.embedding.channels == 3
    take_two_steps(setup)


@pytest.mark.parametrize(
    ('argument', 'sentence'),
    [
        ('given=label', 'given=label is for predict=epsilon and predict=v, which draw images of a label'),
        ('given=nothing', 'given=nothing is for predict=epsilon and predict=v'),
        ('predict=v,data=segments,given=label', 'given=label tells the label of an image; data=segments has a class'),
        ('told=pixels', 'told=pixels is for predict=epsilon and predict=v, which tell the time'),
        ('predict=v,told=banana', 'there is no told=banana'),
        ('colors=rgb', 'colors=rgb is for images of your own; data=digits has its own'),
        ('data=parts,colors=rgb', 'colors=rgb is for images of your own; data=parts has its own'),
        ('voxels=all', 'voxels=all is for clouds of points; data=digits holds images'),
        ('augment=crop+', 'there is no augment='),
        ('augment=mixup+mixup', 'augment=mixup.mixup names one change twice; once is enough'),
        ('layers=linear,learngene=none', 'learngene=none makes layers of a base and a slope; it needs layers=apart'),
        ('augment=crop+flap', "there is no augment=flap; did you mean 'flip'"),
        ('augment=flip+rand', 'augment=rand changes pixels of 256 levels; those of data=digits have 17'),
        ('init=paper', 'init=paper goes with recipes whose rows say what their papers start from'),
        ('data=segments,augment=cutmix', 'patches of a mixture have no class of their own'),
        ('data=./nowhere', r'there is no folder \./nowhere; images of a class are read from'),
        (
            'data=parts,layout=pyramid,augment=flip',
            'clouds of points, not images, and takes no layout=pyramid, augment',
        ),
        ('data=count,side=16', 'side=16 is for images of your own and clouds of points; data=count has its own'),
        ('data=cifar10,colors=nonsense', 'colors=nonsense is for images of your own; data=cifar10 has its own'),
        ('data=count,voxels=occupied', 'voxels=occupied is for clouds of points; data=count holds images'),
        ('data=parts,voxels=some', 'there is no voxels=some'),
        (
            'zoo=swin,data=parts,voxels=occupied',
            'zoo=swin needs a grid, which some of the voxels are not',
        ),
        ('data=parts,side=0', "side is '0'; it must be a whole number from 1"),
        ('data=.,side=large', "side is 'large'; it must be a whole number from 1"),
        ('data=countt', "there is no data=countt; did you mean 'count'"),
    ],
)
def test_mistakes_in_images_are_named(argument, sentence):
    with pytest.raises(UserError, match=sentence):
        prepare(images.get_config(argument))


EXPERIMENTS = sorted(path.parent for path in pathlib.Path(__file__).parents[1].glob('experiments/*/sweep.py'))


RUNS = [folder for folder in EXPERIMENTS if not Experiment(folder, 'cpu').has_studies()]


STUDIES = [folder for folder in EXPERIMENTS if folder not in RUNS]


@pytest.mark.parametrize('folder', STUDIES, ids=lambda folder: folder.name)
def test_experiments_of_studies(folder):
    """Sweeps of both sizes are read, of equally many trials or by a page that says so, and the first of the first
    report builds; all do at night. The small size may leave reports out to bound its time, and has no others."""
    says_so = 'NOT MATCHED' in (folder / 'README.md').read_text()
    small, full = (Experiment(folder, size).studies() for size in SIZES)
    assert small.keys() <= full.keys()
    for report in (*small.values(), *full.values()):
        sweeps = [read(config) for config in report.values()]
        assert says_so or len({sweep.trials for sweep in sweeps}) == 1
    assert parameters(prepare(read(next(iter(next(iter(small.values())).values()))).base))


@pytest.mark.slow
@pytest.mark.parametrize('size', SIZES)
@pytest.mark.parametrize('folder', STUDIES, ids=lambda folder: folder.name)
def test_studies_compare_what_is_matched(folder, size):
    """Every sweep builds, and what a report compares is matched as its name says, or the experiment that it is not."""
    says_so = 'NOT MATCHED' in (folder / 'README.md').read_text()
    for title, report in Experiment(folder, size).studies().items():
        measure = flops_per_token if title.endswith('equal_flops') else parameters
        sizes = {name: measure(prepare(read(config).base)) for name, config in report.items()}
        assert says_so or not unmatched(list(sizes.values()), TOLERANCE), sizes


def distinct(runs):
    """The first of the runs that share programs."""
    return list({structure(run.config): run for run in reversed(runs)}.values())[::-1]


@pytest.mark.parametrize('folder', RUNS, ids=lambda folder: folder.name)
def test_experiments(folder):
    assert (folder / 'plot.py').exists()
    small = Experiment(folder, 'cpu').runs()
    # Seeds and rates share a model, and the command builds every run before the first; one is traced, at night all are.
    first_seeds = distinct(small)
    for run in first_seeds:
        prepare(run.config)
    assert prepare(first_seeds[0].config).model


@pytest.mark.slow
@pytest.mark.parametrize('folder', RUNS, ids=lambda folder: folder.name)
def test_experiments_of_full_size(folder):
    small, full = (Experiment(folder, size).runs() for size in SIZES)
    # Some have more seeds, rates or rows at full size.
    assert len(full) == len({run.label for run in full}) >= len(small)
    for run in distinct(full):
        prepare(run.config)
    for run in distinct(small):
        assert prepare(run.config).model


def test_a_sweep_of_images_chooses_on_validation():
    """Test is evaluated at the end alone; of diffusion images are drawn then too."""
    made = sweeps_images.get_config('zoo=swin,predict=v,seeds=2')
    sweep = read(made)
    assert (sweep.metric, sweep.score, sweep.goal) == ('valid/all/loss', 'test/all/loss', 'min')
    assert made.seeds == (0, 1)
    setup = prepare(sweep.base)
    found = [(each.name, each.split, type(each.cadence).__name__) for each in setup.evals]
    assert found == [('test', 'test', 'AtEnd'), ('valid', 'valid', 'EveryNSteps'), ('drawn', 'test', 'AtEnd')]
    setup.evals[1].load_data(setup)


def test_the_sweep_of_recall_has_the_rates_of_the_papers():
    made = sweeps_recall.get_config('task=mqar,zoo=mha,size=paper')
    assert made.space.rate['values'] == (1e-4, 4.6e-4, 2.2e-3, 1e-2)
    read(made)
    mixed = sweeps_recall.get_config('task=mqar_mixed,seeds=3')
    assert mixed.seeds == (0, 1, 2) and mixed.space.rate['values'] == (1e-3, 3.2e-3, 1e-2, 3.2e-2)
    with pytest.raises(UserError, match="seeds is '0'; it must be a whole number from 1"):
        sweeps_recall.get_config('seeds=0')


@pytest.mark.parametrize(
    ('arguments', 'metric'),
    [
        ('task=mqar', 'accuracy'),
        ('task=signed_sums,thoughts=continuous', 'accuracy'),
        ('task=regression', 'loss'),
        ('task=regression_uncertain', 'loss'),
    ],
)
def test_the_sweep_of_recall_asks_for_what_the_task_measures(arguments, metric):
    made = sweeps_recall.get_config(arguments)
    read(made)
    assert (made.metric, made.reported) == (f'valid/1x/{metric}', f'test/1x/{metric}')
    setup = prepare(made.base)
    assert metric in jax.eval_shape(setup.measure, setup.abstract.variables, setup.abstract_batch())
