"""What linear maps start from: the distributions, the scaling by depth, and that nothing else is drawn anew."""

import functools
import math

import jax
import numpy as np
import pytest
from flax import nnx

from attnlab.blocks.layer import MixerAndMLP
from attnlab.config import build, from_plain, plain, spec
from attnlab.errors import UserError
from attnlab.mixers.state_space.selective import SelectiveSSM
from attnlab.models.stack import stack_spec
from attnlab.nn.experts import MixtureOfExperts
from attnlab.nn.initialization import Gaussian, Initialization, Scaled
from attnlab.nn.mlps import MLP
from attnlab.zoo import ZOO
from attnlab.zoo.chosen import chosen_recipe, initialized
from attnlab.zoo.recipe import NARROW_THROUGHOUT

WIDTH, DEPTH = 64, 4
MIXER, PLAIN = spec(SelectiveSSM, state=4), spec(MLP)


def made(**initialization):
    """The parameters of a stack, by path."""
    return parameters((MIXER,), spec(Initialization, **initialization))


def parameters(pattern, initialization, layer=MixerAndMLP(), mlp=PLAIN):
    config = stack_spec(pattern, layer=layer, depth=DEPTH, mlp=mlp, initialization=initialization)
    stack = jax.jit(lambda key: nnx.state(build(config)(WIDTH, rngs=nnx.Rngs(params=key)), nnx.Param))(
        jax.random.key(0)
    )
    return {'.'.join(map(str, path)): np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(stack)}


@pytest.fixture(scope='module')
def usual():
    return made()


def ending(parameters, end):
    return next(value for path, value in parameters.items() if path.endswith(end))


def test_maps_are_drawn_as_asked_and_nothing_else_is(usual):
    drawn = made(linear=spec(Scaled, gain=1 / 3, distribution='uniform'))
    bound = WIDTH**-0.5
    for end in ('mixer.input.weight', 'mlp.up.weight'):
        assert np.abs(ending(drawn, end)).max() == pytest.approx(bound, rel=0.01)
        assert ending(drawn, end).std() == pytest.approx(bound / math.sqrt(3), rel=0.02)
        assert ending(usual, end).std() == pytest.approx(bound, rel=0.02)
    # Each layer has a draw of its own.
    assert not np.array_equal(*ending(drawn, 'mixer.input.weight')[:2])
    kept = [path for path in usual if np.array_equal(usual[path], drawn[path])]
    changed = {path.split('blocks.0.')[1] for path in usual} - {path.split('blocks.0.')[1] for path in kept}
    assert changed == {
        f'{name}.weight' for name in ('mixer.input', 'mixer.select', 'mixer.output', 'mlp.up', 'mlp.down')
    }


def test_the_last_map_of_each_branch_is_scaled_by_depth_and_keeps_its_draw(usual):
    scaled = made(residual=1.0)
    for path, value in usual.items():
        last = path.endswith(('mixer.output.weight', 'mlp.down.weight'))
        np.testing.assert_allclose(scaled[path], value / math.sqrt(2 * DEPTH) if last else value, rtol=1e-6)


@pytest.mark.parametrize(('name', 'reduction'), [('pvt', 'conv'), ('fasa', 'map')])
def test_the_map_that_reduces_a_grid_is_no_last_map(name, reduction):
    start = spec(Initialization, output=spec(Gaussian, deviation=0.002))
    first, drawn = (parameters(ZOO[name].sized(heads=2), each) for each in (spec(Initialization), start))
    end = f'mixer.reduction.{reduction}.linear.weight'
    np.testing.assert_array_equal(ending(drawn, end), ending(first, end))
    assert ending(drawn, 'mixer.output.weight').std() == pytest.approx(0.002, rel=0.05)


def test_another_distribution_for_the_last_maps():
    drawn = made(linear=spec(Gaussian, deviation=0.02), output=spec(Scaled, mode='fan_avg', distribution='uniform'))
    assert ending(drawn, 'mlp.up.weight').std() == pytest.approx(0.02, rel=0.02)
    assert np.abs(ending(drawn, 'mlp.down.weight')).max() == pytest.approx(math.sqrt(6 / (5 * WIDTH)), rel=0.01)


def test_channel_mixers_may_start_otherwise(usual):
    """Their own maps, the last over the root of all branches; what mixers start from is that of the rest."""
    drawn = made(linear=spec(Gaussian), mlp=spec(Initialization, residual=1.0))
    for end in ('mixer.input.weight', 'mixer.output.weight'):
        assert ending(drawn, end).std() == pytest.approx(0.02, rel=0.05)
    np.testing.assert_array_equal(ending(drawn, 'mlp.up.weight'), ending(usual, 'mlp.up.weight'))
    scaled = ending(usual, 'mlp.down.weight') / math.sqrt(2 * DEPTH)
    np.testing.assert_allclose(ending(drawn, 'mlp.down.weight'), scaled, rtol=1e-6)


def test_experts_are_channel_mixers_too():
    mlp = spec(MixtureOfExperts, experts=4, hidden=32)

    def drawn(**initialization):
        start = spec(Initialization, **initialization)
        return parameters((MIXER,), start, mlp=mlp)

    usual, narrow = drawn(), drawn(linear=spec(Gaussian), residual=1.0)
    for end, scale in (('mlp.gates', 1.0), ('mlp.up', 1.0), ('mlp.down', math.sqrt(2 * DEPTH))):
        assert ending(narrow, end).std() == pytest.approx(0.02 / scale, rel=0.03)
    scaled = ending(usual, 'mlp.down') / math.sqrt(2 * DEPTH)
    np.testing.assert_allclose(ending(drawn(residual=1.0), 'mlp.down'), scaled, rtol=1e-6)
    np.testing.assert_array_equal(ending(narrow, 'mlp.router'), ending(usual, 'mlp.router'))


def test_queries_that_start_at_zero_are_drawn_by_no_initialization():
    """Heads of shaped attention start as the identity, whatever the other maps start from."""
    drawn = parameters(ZOO['shaped_attention'].sized(heads=4), spec(Initialization, linear=spec(Gaussian)))
    assert not np.any(ending(drawn, 'mixer.query.weight'))
    assert ending(drawn, 'mixer.key.weight').std() == pytest.approx(0.02, rel=0.02)


def test_a_stack_saved_without_initialization_is_as_it_was():
    config = stack_spec((MIXER,), depth=DEPTH, mlp=None)
    saved = plain(config)
    del saved['initialization']
    assert plain(from_plain(saved)) == plain(config)


def test_init_paper_is_a_choice_of_the_row():
    recipe, maps = initialized(chosen_recipe('gated_attention_all_heads'), 'paper')
    assert recipe.pattern[0].gate.start == 0.5 and ZOO['gated_attention_all_heads'].pattern[0].gate.start == 0.25
    assert build(maps).linear == Scaled(gain=1 / 3, distribution='uniform')
    assert build(initialized(chosen_recipe('mamba'), 'framework')[1]) == Initialization()
    with pytest.raises(UserError, match=r'rows say what their papers start from: .*mamba'):
        initialized(chosen_recipe('mha'), 'paper')
    with pytest.raises(UserError, match='there is no init=papers'):
        initialized(chosen_recipe('mamba'), 'papers')


def test_delta_net_of_the_paper_starts_narrow_throughout():
    """Convolutions too, all maps of a layer, and channel mixers."""
    recipe, initialization = initialized(chosen_recipe('delta_net'), 'paper')
    drawn = parameters(recipe.sized(heads=4), initialization)
    ends = (
        'mixer.query.weight',
        'mixer.gates.linear.weight',
        'mixer.output.weight',
        'mlp.up.weight',
        'mlp.down.weight',
    )
    for end in (*ends, 'preludes.0.taps'):
        assert ending(drawn, end).std() == pytest.approx(0.02, rel=0.05)


def started(name, **sizes):
    """The parameters of a stack of the row with `init=paper`."""
    recipe, initialization = initialized(chosen_recipe(name), 'paper')
    return parameters(recipe.reduced(heads=4, **sizes), initialization)


@pytest.mark.parametrize(
    ('name', 'gains'),
    [
        ('rwkv6', {'query': 1.0, 'value': 1.0, 'key': 0.1, 'gate': 0.1}),
        ('rwkv7', {'query': 1.0, 'value': 1.0, 'key': 0.1}),
    ],
)
def test_rwkv_of_the_paper_starts_orthogonal_keys_a_tenth_and_outputs_at_zero(name, gains):
    drawn = started(name)
    for end, gain in gains.items():
        for weight in ending(drawn, f'mixer.{end}.weight'):
            np.testing.assert_allclose(weight.T @ weight, gain**2 * np.eye(WIDTH), atol=1e-5)
    first, second = ending(drawn, 'mlp.up.weight')[:2]
    np.testing.assert_allclose(first @ first.T, np.eye(WIDTH), atol=1e-5)
    assert not np.array_equal(first, second)
    assert not ending(drawn, 'mixer.output.weight').any() and not ending(drawn, 'mlp.down.weight').any()
    # Bottlenecks choose for themselves.
    assert not ending(drawn, 'mixer.decay.down.weight').any() and ending(drawn, 'mixer.decay.up.weight').std() < 0.02


def test_hyena_of_the_paper_starts_as_its_language_models():
    """Narrow maps, which frequencies of 14 make up for in the filters, of 33 features."""
    drawn = started('hyena')
    assert ending(drawn, 'filters.hidden.0.weight').shape == (DEPTH, 33, 64)
    for end in ('mixer.input.weight', 'filters.hidden.0.weight', 'filters.hidden.1.weight', 'filters.last.weight'):
        assert ending(drawn, end).std() == pytest.approx(0.02, rel=0.05)
    for end in ('mixer.output.weight', 'mlp.down.weight'):
        assert ending(drawn, end).std() == pytest.approx(0.02 / math.sqrt(2 * DEPTH), rel=0.05)
    assert (ending(drawn, 'filters.frequency') == 14).all()


@pytest.mark.parametrize('name', ['mega', 'rat', 'agent', 'inline', 'soft'])
def test_rows_that_start_narrow(name):
    drawn = started(name)
    for end in ('mixer.value.weight', 'mixer.output.weight', 'mlp.up.weight'):
        assert ending(drawn, end).std() == pytest.approx(0.02, rel=0.05)


@pytest.mark.parametrize('name', [name for name, recipe in ZOO.items() if recipe.start is NARROW_THROUGHOUT])
def test_rows_that_start_narrow_throughout_have_convolutions_of_four_taps(name):
    for mixer in initialized(chosen_recipe(name), 'paper')[0].pattern:
        assert mixer.prelude.gain / mixer.prelude.width == pytest.approx(0.02**2)


def pytorch(inputs):
    """What `nn.Linear` of that many inputs is uniform up to; what is divided by a root of 8 has 8 times as many."""
    return 'uniform', inputs**-0.5


def xavier(inputs, outputs, gain):
    return 'uniform', gain * math.sqrt(6 / (inputs + outputs))


def normal(deviation):
    return 'normal', deviation


def narrow(deviation):
    """What the taps of a convolution start from that are normal in their released code."""
    return 'uniform', math.sqrt(3) * deviation


BRANCHES = 2 * DEPTH
"""Of a stack of layers of a mixer and a channel mixer; mixers that stand alone are as many blocks."""

RECURRENT = {
    'gate.linear.weight': normal(WIDTH**-0.5),
    'lift.linear.weight': normal(WIDTH**-0.5),
    # LeCun's of blocks of four channels; the convolution has a variance of 0.01 / 4.
    'recurrence_gate.weight': normal(4**-0.5),
    'input_gate.weight': normal(4**-0.5),
    'prelude.taps': ('uniform', math.sqrt(3 * 0.01 / 4)),
    # The last of either branch: 2 over the number of layers, over the inputs.
    'mixer.output.weight': normal(math.sqrt(2 / DEPTH / WIDTH)),
    'mlp.down.weight': normal(math.sqrt(2 / DEPTH / (4 * WIDTH))),
    'mlp.up.weight': normal(WIDTH**-0.5),
}
NARROW_RETENTION = 2**-2.5
PUBLISHED_MAPS = {
    # Inner width 128, of which steps are read through 64 / 16 channels; four taps.
    'mamba': {
        'mixer.input.weight': pytorch(WIDTH),
        'mixer.select.weight': pytorch(2 * WIDTH),
        'mixer.step.weight': pytorch(WIDTH // 16),
        'mixer.output.weight': pytorch(2 * WIDTH * BRANCHES),
        'prelude.taps': pytorch(4),
    },
    'mamba2': {
        'mixer.input.weight': pytorch(WIDTH),
        'mixer.output.weight': pytorch(2 * WIDTH * BRANCHES),
        'prelude.taps': pytorch(4),
    },
    'samba': {
        'blocks.0.mixer.input.weight': pytorch(WIDTH),
        'blocks.0.mixer.output.weight': pytorch(2 * WIDTH * BRANCHES),
        'blocks.1.mixer.query.weight': pytorch(WIDTH),
        'blocks.1.mixer.output.weight': pytorch(WIDTH * BRANCHES),
        'blocks.1.mlp.up.weight': pytorch(WIDTH),
        'blocks.1.mlp.down.weight': pytorch(4 * WIDTH * BRANCHES),
    },
    'rg_lru': RECURRENT,
    'griffin': {
        **{f'blocks.0.{end}' if end.startswith('m') else end: start for end, start in RECURRENT.items()},
        'blocks.2.mixer.query.weight': normal(WIDTH**-0.5),
        'blocks.2.mixer.output.weight': normal(math.sqrt(2 / DEPTH / WIDTH)),
    },
    'retnet': {
        'mixer.query.weight': xavier(WIDTH, WIDTH, NARROW_RETENTION),
        'mixer.key.weight': xavier(WIDTH, WIDTH, NARROW_RETENTION),
        'mixer.value.weight': xavier(WIDTH, 2 * WIDTH, NARROW_RETENTION),
        'mixer.gate.linear.weight': xavier(WIDTH, 2 * WIDTH, NARROW_RETENTION),
        'mixer.output.weight': xavier(2 * WIDTH, WIDTH, 1.0),
    },
    'gla': dict.fromkeys(
        (
            *('mixer.query.weight', 'mixer.key.weight', 'mixer.value.weight', 'mixer.gate.linear.weight'),
            *('decay.down.weight', 'decay.up.weight', 'mixer.output.weight', 'mlp.up.weight', 'mlp.down.weight'),
        ),
        normal(0.02),
    ),
    'mesa_net': {
        **dict.fromkeys(('mixer.query.weight', 'mixer.output.weight', 'mlp.down.weight'), normal(0.02)),
        **{f'mixer.convs.{i}.taps': narrow(0.02) for i in range(2)},
    },
    # Keys of three quarters of the width, values of one and a half.
    'gated_delta_net': {
        'mixer.query.weight': pytorch(WIDTH),
        'mixer.output.weight': pytorch(3 * WIDTH // 2),
        'preludes.0.taps': pytorch(4),
        'mlp.up.weight': pytorch(WIDTH),
        'mlp.down.weight': pytorch(4 * WIDTH * BRANCHES),
    },
    'gated_delta_net2': {
        **{f'mixer.{name}.weight': xavier(WIDTH, WIDTH, 2**-2.5) for name in ('query', 'key', 'value', 'output')},
        'mixer.gate.down.weight': xavier(WIDTH, WIDTH // 16, 2**-2.5),
        'mixer.gate.up.weight': xavier(WIDTH // 16, WIDTH, 2**-2.5),
        'preludes.0.taps': pytorch(4),
        'mlp.up.weight': pytorch(WIDTH),
        'mlp.down.weight': pytorch(4 * WIDTH * BRANCHES),
    },
    'log_linear_mamba2': {
        'mixer.input.weight': normal(0.006),
        'levels.linear.weight': normal(0.006),
        'prelude.taps': narrow(0.006),
        'mixer.output.weight': pytorch(2 * WIDTH * BRANCHES),
        'mlp.up.weight': normal(0.006),
        'mlp.down.weight': pytorch(4 * WIDTH * BRANCHES),
    },
    'log_linear_gated_delta_net': {
        'mixer.query.weight': normal(0.006),
        **{f'preludes.{i}.taps': narrow(0.006) for i in range(3)},
        'mixer.output.weight': pytorch(3 * WIDTH // 2 * BRANCHES),
        'mlp.up.weight': normal(0.006),
        'mlp.down.weight': pytorch(4 * WIDTH * BRANCHES),
    },
    'base_conv': {'mixer.gate.weight': pytorch(WIDTH), 'conv.taps': pytorch(3)},
    'mingru': {
        'update.weight': pytorch(WIDTH),
        'candidate.weight': pytorch(WIDTH),
        'mixer.output.weight': pytorch(WIDTH),
        'mlp.up.weight': pytorch(WIDTH),
        'mlp.down.weight': pytorch(4 * WIDTH),
    },
}
"""What papers or their released code draw maps from at this width and depth: the distribution, and how wide it is."""


@functools.cache
def started_alone(name):
    """As `started`, in the layers of the paper."""
    recipe, initialization = initialized(chosen_recipe(name), 'paper')
    return parameters(recipe.reduced(heads=4), initialization, recipe.layer)


@pytest.mark.parametrize('name', PUBLISHED_MAPS)
def test_maps_start_as_their_papers_draw_them(name):
    for end, (distribution, width) in PUBLISHED_MAPS[name].items():
        drawn = ending(started_alone(name), end)
        largest, deviation = np.abs(drawn).max(), width / math.sqrt(3) if distribution == 'uniform' else width
        assert drawn.std() == pytest.approx(deviation, rel=0.05), end
        assert (largest == pytest.approx(width, rel=0.02)) if distribution == 'uniform' else largest > 2.5 * width, end
    # PyTorch draws biases too; notes of the rows say that they start at zero here.
    biases = [value for path, value in started_alone(name).items() if path.endswith('bias') and 'step_size' not in path]
    assert not any(bias.any() for bias in biases)


@pytest.mark.parametrize('name', ['mamba', 'mamba2', 'samba'])
def test_state_spaces_start_with_the_time_scales_of_their_papers(name):
    """Steps log-uniform from 0.001 to 0.1; rates of 1 to n in every channel, or uniform from 1 to 16; a skip of 1."""
    drawn = started_alone(name)
    steps, rates = np.logaddexp(0, ending(drawn, 'step_size.bias')), np.exp(ending(drawn, 'A_log'))
    assert 0.001 <= steps.min() < 0.0015 and 0.07 < steps.max() <= 0.1001
    assert np.log10(steps).mean() == pytest.approx(-2, abs=0.15)
    if name == 'mamba2':
        assert 1 <= rates.min() < 2 and 15 < rates.max() <= 16 and rates.mean() == pytest.approx(8.5, abs=1.5)
    else:
        np.testing.assert_allclose(rates, np.broadcast_to([1, 2, 3, 4], rates.shape), rtol=1e-6)
    assert (ending(drawn, 'mixer.D') == 1).all()


@pytest.mark.parametrize('name', ['rg_lru', 'griffin'])
def test_real_gates_start_with_the_decays_of_the_paper(name):
    """With the gate open, uniform in [0.9, 0.999]; the released code has the eighth roots of them there."""
    decays = np.exp(-8 * np.logaddexp(0, ending(started_alone(name), 'gates.rate')))
    assert 0.8999 <= decays.min() < 0.905 and 0.994 < decays.max() <= 0.9991
    assert decays.mean() == pytest.approx((0.9 + 0.999) / 2, abs=0.01)


def test_seqboat_of_the_paper_has_no_channel_mixer_and_starts_narrow():
    drawn = started_alone('seqboat')
    assert not any('.mlp' in path for path in drawn)
    for end in ('mixer.mixed.weight', 'mixer.own.weight', 'mixer.output.weight'):
        assert ending(drawn, end).std() == pytest.approx(0.02, rel=0.05)


def test_every_stated_start_names_arguments_of_its_mixers():
    for name, recipe in ZOO.items():
        if recipe.start is not None:
            assert initialized(chosen_recipe(name), 'paper')[0].notes == recipe.notes


def test_wrong_values_are_refused():
    with pytest.raises(UserError, match='residual of Initialization is 0'):
        Initialization(residual=0.0)
    with pytest.raises(UserError, match='mlp of Initialization has an mlp'):
        Initialization(mlp=Initialization(mlp=Initialization()))
    with pytest.raises(UserError, match="mode of Scaled is 'fan_out'; it must be 'fan_in' or 'fan_avg'"):
        Scaled(mode='fan_out')
