"""Which points are looked at: closed forms, and nothing that depends on who asks."""

import itertools
import math
import pathlib

import numpy as np
import pytest
from ml_collections import ConfigDict

from attnlab.config import from_plain, plain, spec
from attnlab.configuration import config_of
from attnlab.errors import UserError
from attnlab.sweep.search import Asha, GridSearch, Hyperband, QuasiRandom, RandomSearch, rungs
from attnlab.sweep.space import Choice, Grid, LogUniform, Uniform, Zip
from attnlab.sweep.study import create_study
from attnlab.sweep.sweep import rates_config, read, with_settings
from attnlab.train.schedule import Cosine

TINY = pathlib.Path(__file__).parent / 'tiny.py'
LANGUAGE = TINY.parents[2] / 'configs' / 'sweeps' / 'language.py'
SPACE = {
    'rate': LogUniform('optimizer.peak_lr', 1e-4, 1e-2),
    'clip': Uniform('optimizer.clip', 0.0, 4.0),
    'size': Zip(('model.dim', 'length'), ((8, 16), (16, 32))),
}


def test_shares_of_a_dimension():
    assert SPACE['rate'].at_quantile(0.5) == pytest.approx(1e-3, rel=1e-12)
    assert SPACE['clip'].at_quantile(0.25) == 1.0
    assert [Choice('steps', (3, 1, 2)).at_quantile(share) for share in (0.0, 0.34, 0.999)] == [0, 1, 2]
    assert SPACE['size'].settings(1) == {'model.dim': 16, 'length': 32}
    assert Grid('steps', (3, 1, 2)).settings(2) == {'steps': 2}


def test_a_grid_has_every_combination_with_every_seed_once():
    space = {'rate': Grid('optimizer.peak_lr', (1.0, 2.0, 3.0)), 'size': SPACE['size']}
    search = GridSearch()
    assert search.trials(space, None, 2) == 12
    visited = [(*search.fixed(space, n, 2).values(), search.seed_index(n, 2)) for n in range(12)]
    assert sorted(visited) == [(rate, size, seed) for rate in range(3) for size in range(2) for seed in range(2)]
    with pytest.raises(UserError, match='rate is a LogUniform, which GridSearch cannot exhaust'):
        search.trials(SPACE, None, 1)
    with pytest.raises(UserError, match=r'config\.trials is 5; the grid and its seeds have 12'):
        search.trials(space, 5, 2)


def test_quasi_random_points_fill_every_stratum():
    """Any 2^m points of a Sobol sequence from its start have one coordinate in each of 2^m equal parts of an axis."""
    points = [QuasiRandom(seed=3).fixed(SPACE, n, 1) for n in range(16)]
    shares = [math.log(point['rate'] / 1e-4) / math.log(100) for point in points]
    assert sorted(int(16 * share) for share in shares) == list(range(16))
    assert sorted(int(16 * point['clip'] / 4) for point in points) == list(range(16))
    assert sum(point['size'] for point in points) == 8
    assert points[5] == QuasiRandom(seed=3).fixed(SPACE, 5, 1) != QuasiRandom(seed=4).fixed(SPACE, 5, 1)


@pytest.mark.parametrize('seeds', [2, 3, 4, 8])
def test_every_seed_sees_both_halves_of_every_axis_and_more_where_it_runs_more(seeds):
    space = {name: Uniform(name, 0.0, 4.0) for name in 'abc'}
    search = QuasiRandom(seed=3)
    points = [search.fixed(space, number, seeds) for number in range(32)]
    found = [search.seed_index(number, seeds) for number in range(256)]
    for seed, axis in itertools.product(range(seeds), space):
        seen = {point[axis] < 2 for point, one in zip(points, found, strict=False) if one == seed}
        assert seen == {False, True}, f'seed {seed} sees one half of {axis}'
    # As many runs of every seed, pair by pair; and no seed is bound to a finer part of an axis either.
    assert found[::2] == found[1::2]
    assert all(sorted(found[2 * n : 2 * (n + seeds) : 2]) == list(range(seeds)) for n in range(0, 128 - seeds, seeds))
    points += [search.fixed(space, number, seeds) for number in range(32, 256)]
    for seed, axis in itertools.product(range(seeds), space):
        assert {int(point[axis]) for point, one in zip(points, found, strict=True) if one == seed} == {0, 1, 2, 3}


def test_a_study_made_before_seeds_were_paired_keeps_its_seeds_and_is_another_sweep(tmp_path):
    config = config_of(TINY, 'sampler=quasi,trials=8')
    saved = plain(config)
    del saved['sampler']['paired']
    before = from_plain(saved)
    assert [read(before).seed(number) for number in range(8)] == [0, 1] * 4
    assert read(config).fixed(3) == read(before).fixed(3)
    create_study(tmp_path / 'study', before)
    with pytest.raises(UserError, match=r'another sweep \(sampler\.paired: False there, True here\)'):
        create_study(tmp_path / 'study', config)


def test_random_streams_differ_between_trials():
    draws = [RandomSearch(seed=1)._stream(n) for n in range(64)]
    assert len(set(draws)) == 64 and draws[7] == RandomSearch(seed=1)._stream(7)


def test_a_trial_is_the_base_with_its_point_and_seed():
    sweep = read(config_of(TINY, 'sampler=grid'))
    assert sweep.trials == 8
    configs = [sweep.config(n, sweep.fixed(n)) for n in range(8)]
    found = [(c.optimizer.peak_lr, c.optimizer.weight_decay, c.seed) for c in configs]
    # In the order of the names: decay, then rate, and seeds fastest.
    assert found == [(rate, decay, seed) for decay in (0.0, 0.1) for rate in (1e-3, 1e-2) for seed in (0, 1)]
    assert configs[0].model.dim == 8 and sweep.base.optimizer.peak_lr == 3e-3


def test_a_confirmation_has_fresh_seeds_and_one_point():
    sweep = read(config_of(TINY, 'sampler=grid,confirm=3'))
    confirmation = read(sweep.confirmation(sweep.fixed(5)))
    assert confirmation.seeds == (2, 3, 4) and confirmation.trials == 3 and confirmation.confirm == 0
    config = confirmation.config(2, {})
    assert (config.optimizer.peak_lr, config.optimizer.weight_decay, config.seed) == (1e-3, 0.1, 4)


@pytest.mark.parametrize('search', ['quasi', 'random', 'tpe', 'grid'])
def test_the_sweeps_of_two_mixers_look_at_the_same_points(search):
    gla, mha = (read(config_of(LANGUAGE, f'zoo={zoo},search={search}')) for zoo in ('gla', 'mha'))
    assert (gla.space, gla.seeds, gla.trials, gla.sampler, gla.pruner) == (
        mha.space,
        mha.seeds,
        mha.trials,
        mha.sampler,
        mha.pruner,
    )
    assert [gla.fixed(n) for n in range(4)] == [mha.fixed(n) for n in range(4)]


def test_a_pruner_is_chosen_by_name():
    prunes = {name: read(config_of(LANGUAGE, f'pruner={name}')).pruner for name in ('hyperband', 'asha', 'none')}
    assert prunes == {'hyperband': Hyperband(first=60), 'asha': Asha(first=60), 'none': None}
    lion = read(config_of(LANGUAGE, 'optimizer=lion'))
    assert lion.base.optimizer.target.endswith('.Lion') and lion.space['rate'].high == pytest.approx(2e-3)
    for argument, message in (
        ('pruner=hyprband', "there is no pruner=hyprband; did you mean 'hyperband'"),
        ('pruner=asha,search=grid', 'search=grid runs every point to its end'),
        ('base=gla.py,schedule=wsd', 'base=gla.py is a whole config, so schedule=wsd does not apply'),
        ('trials=many', "trials is 'many'; it must be a whole number from 1"),
        ('trials=²', 'trials is .².; it must be a whole number from 1'),
    ):
        with pytest.raises(UserError, match=message):
            config_of(LANGUAGE, argument)


@pytest.mark.parametrize(
    'argument',
    ['language:search=grid', 'recall:task=mqar', 'recall:task=mqar_mixed', 'series:system=linear', 'images:zoo=mha'],
)
def test_rates_move_with_the_optimizer(argument):
    name, _, rest = argument.partition(':')
    found = {
        optimizer: read(config_of(LANGUAGE.with_name(f'{name}.py'), f'{rest},optimizer={optimizer}')).space['rate']
        for optimizer in ('adamw', 'muon', 'lion')
    }
    assert found['muon'] == found['adamw']
    assert found['lion'].values == tuple(rate * 0.2 for rate in found['adamw'].values)


def test_rates_move_with_the_optimizer_of_a_base(tmp_path):
    base = tmp_path / 'base.py'
    base.write_text(
        'import pathlib\n'
        'from attnlab.configuration import config_of\n'
        f'FILE = pathlib.Path({str(LANGUAGE.parents[1] / "language.py")!r})\n'
        "get_config = lambda _: config_of(FILE, 'optimizer=lion')\n"
    )
    made = read(config_of(LANGUAGE, f'base={base}')).space
    assert [made['rate'].low, made['rate'].high] == [3e-4 * 0.2, 1e-2 * 0.2]
    assert [made['decay'].low, made['decay'].high] == [1e-2 * 5.0, 1.0 * 5.0]


@pytest.mark.parametrize(
    ('key', 'value', 'message'),
    [
        ('seeds', (), 'config.seeds is'),
        ('seeds', (1, 1), 'config.seeds is'),
        ('seeds', (0, -1), r'config.seeds is \(0, -1\); it must hold whole numbers from 0 to 2\^32 - 1, each once'),
        ('seeds', (2**32,), 'config.seeds is'),
        ('confirm', 2**32 - 1, r'config.confirm is 4294967295, for seeds up to 4294967296, .* at most 2\^32 - 1'),
        ('goal', 'least', "config.goal is 'least'"),
        ('trials', 0, 'config.trials is 0'),
        ('space.rate.key', 'optimizer.peak_rate', "did you mean 'optimizer.peak_lr'"),
        ('space.rate.key', 'optimizer.weight_decay', 'each may be set once'),
        ('space.rate.key', 'seed', 'each may be set once, and seed by config.seeds'),
        ('space.rate.key', 'steps', 'the space sets steps to'),
        ('space.rate.high', 1e-9, 'LogUniform needs 0 < low < high'),
        ('pruner.first', 100, 'first of a pruner must be from 1 to the 24 steps.*give --config.pruner.first, or'),
    ],
)
def test_mistakes(key, value, message):
    config = config_of(TINY, 'pruner=asha')
    with pytest.raises(UserError, match=message):
        read(with_settings(config, {key: value}))


@pytest.mark.parametrize(
    ('key', 'value', 'message'),
    [
        ('sampler', spec(Cosine), r'config\.sampler is Cosine\(.*, of type Cosine; it must be Sampler'),
        ('sampler', None, 'config.sampler is None, of type NoneType; it must be Sampler'),
        ('pruner', spec(RandomSearch), 'config.pruner is RandomSearch.*; it must be Pruner or None'),
        ('space', spec(RandomSearch), 'config.space is RandomSearch.*; it must be dict'),
        ('space', {'rate': spec(Cosine)}, 'config.space.rate is Cosine.*; it must be Dimension'),
        ('trials', 'many', "config.trials is 'many', of type str; it must be int or None"),
        ('seeds', 3, 'config.seeds is 3, of type int; it must be tuple'),
        ('metric', 3, 'config.metric is 3, of type int; it must be str'),
    ],
)
def test_parts_of_another_kind(key, value, message):
    config = config_of(TINY, 'pruner=asha')
    fields = {name: config[name] for name in config} | {key: value}
    with pytest.raises(UserError, match=message):
        read(ConfigDict(fields, convert_dict=key == 'space'))


@pytest.mark.parametrize(
    ('size', 'said'),
    [
        (spec(Choice, key='model.stack.depth', values=(1, 2.5, 3)), r'2\.5'),
        (spec(Grid, key='model.stack.depth', values=(1, 2.5, 3)), r'2\.5'),
        (spec(Zip, together=('model.dim', 'model.stack.depth'), rows=((8, 1), (8, 'two'), (8, 2))), "'two'"),
    ],
)
def test_every_value_is_looked_at_when_a_study_is_made(tmp_path, size, said):
    """Also those between the first and the last; a study that was made before is read."""
    config = config_of(TINY)
    fields = {name: config[name] for name in config} | {'space': ConfigDict({'size': size}, convert_dict=False)}
    wrong = ConfigDict(fields, convert_dict=False)
    with pytest.raises(UserError, match=f'the space sets model.stack.depth to {said}'):
        create_study(tmp_path / 'study', wrong)
    assert not (tmp_path / 'study').exists()
    assert read(wrong).space['size'].count == 3


def test_what_is_reported_has_the_goal_of_what_is_chosen_by():
    config = config_of(TINY)
    with config.unlocked():
        config.reported = 'test/loss'
    assert read(config).score == 'test/loss'
    for metric, reported, goal, message in (
        ('valid/loss', 'test/accuracy', 'min', "reported is test/accuracy, for which higher is better, .*'max'"),
        ('valid/si_snr_improvement', 'test/loss', 'max', "reported is test/loss, .* lower is better, .*'min'"),
        ('valid/1x/accuracy', 'test/1x/accuracy', 'min', "metric is valid/1x/accuracy, .*'max'"),
    ):
        with config.unlocked():
            config.metric, config.reported, config.goal = metric, reported, goal
        with pytest.raises(UserError, match=message):
            read(config)
    with config.unlocked():
        config.metric, config.reported, config.goal = 'valid/si_snr', 'test/accuracy', 'max'
    assert read(config).score == 'test/accuracy'


def test_rates_have_the_seeds_of_the_trials_and_others_that_confirm():
    made = read(rates_config(config_of(TINY).base, (1e-3, 3e-3), metric='valid/loss', seeds=2, confirm=4))
    assert (made.trials, made.seeds, made.confirm, made.score, made.goal) == (4, (0, 1), 4, 'valid/loss', 'min')
    assert [made.config(number, made.fixed(number)).optimizer.peak_lr for number in range(4)].count(3e-3) == 2
    once = rates_config(config_of(TINY).base, (1e-3,), metric='valid/loss', reported='test/loss')
    assert read(once).seeds == (0,) and read(once).score == 'test/loss'


def test_rungs():
    assert rungs(2, 2, 9) == rungs(2, 2, 8) == (2, 4, 8) and rungs(3, 3, 243) == (3, 9, 27, 81, 243)
    assert np.isfinite(LogUniform('a', 1e-300, 1e300).at_quantile(0.5))
