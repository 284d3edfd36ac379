"""The moving average of parameters: its definition, and that checkpoints, meshes, evaluation and old runs know it."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from attnlab.cli import main
from attnlab.compare.baselines import trivial_scores
from attnlab.config import spec
from attnlab.errors import UserError
from attnlab.runs.loading import load_run
from attnlab.sweep.trial import check_metric
from attnlab.train.average import averaged
from attnlab.train.checkpoint import Checkpoints
from attnlab.train.optimizer import AdamW
from attnlab.train.partition import Axes
from attnlab.train.run import saved_config
from attnlab.train.setup import prepare
from attnlab.train.state import initialize, split
from attnlab.train.step import make_step
from configs.recall import get_config
from tests.train.test_step import Line, Squares, batch, weights_of

DECAY = 0.5
RUN = (
    'train',
    '--config=configs/recall.py:task=mqar,zoo=mingru',
    *('--config.model.dim=8', '--config.model.stack.depth=1', '--config.batch_size=4', '--config.steps=4'),
    *('--config.checkpoint.every=2', '--config.optimizer.schedule.warmup=0.0', '--config.optimizer.peak_lr=0.1'),
    *('--config.evals[0].examples=8', '--config.evals[0].multiples=(1,)', '--config.report.tensorboard=False'),
    '--compilation_cache=',
)
EMA = f'--config.optimizer.ema={DECAY}'


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp('ema') / 'run'
    assert main([*RUN, EMA, f'--workdir={folder}']) == 0
    return folder


def state_of(folder, step):
    setup = load_run(folder).setup
    checkpoints = Checkpoints(folder / 'checkpoints')
    state, _ = checkpoints.restore(step, setup.abstract)
    checkpoints.close()
    return state


def evaluated(folder, name):
    return json.loads((folder / 'evals' / f'{name}.json').read_text())


def test_three_steps_are_the_closed_form_and_a_failed_step_is_none():
    transform = optax.sgd(0.01)
    step = jax.jit(make_step(split(Line(rngs=None))[0], Squares(), transform, seed=0, ema=DECAY))
    state = initialize(lambda rngs: Line(rngs=rngs), transform, 0, average=True)
    seen = []
    for number in range(1, 4):
        state, _ = step(state, batch(), jnp.int32(number))
        seen.append(weights_of(state).astype(np.float64))
        powers = DECAY ** np.arange(number - 1, -1, -1)
        expected = powers @ np.stack(seen) / powers.sum()
        np.testing.assert_allclose(jax.tree.leaves(state.average)[0], expected, rtol=1e-6)
    before = jax.tree.leaves(state.average)[0]
    state, metrics = step(state, batch() | {'y': np.full(4, np.inf, np.float32)}, jnp.int32(4))
    assert not bool(metrics['good'])
    np.testing.assert_array_equal(jax.tree.leaves(state.average)[0], before)


def test_a_slow_average_of_what_does_not_move_is_that():
    params = nnx.State({'w': nnx.Param(jnp.array([2.0, -1.0, 1e-3]))})
    found = jax.tree.map(jnp.zeros_like, params)
    move = jax.jit(lambda average, count: averaged(average, params, count, 0.9999))
    for count in range(1, 400):
        found = move(found, jnp.int32(count))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, params)


@pytest.mark.parametrize('decay', [0.0, 1.0, -0.5, 1.5])
def test_a_decay_out_of_range_is_refused(decay):
    with pytest.raises(UserError, match=r'ema of an optimizer is .*; it must be a decay above 0 and below 1'):
        AdamW(peak_lr=1.0, ema=decay)


def test_it_goes_on_to_the_bit_from_a_checkpoint(trained, tmp_path):
    broken = tmp_path / 'run'
    shutil.copytree(trained, broken)
    shutil.rmtree(broken / 'checkpoints' / '4')
    assert main([*RUN, EMA, f'--workdir={broken}']) == 0
    one, other = state_of(trained, 4), state_of(broken, 4)
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, one, other)
    apart = jax.tree.map(lambda a, b: not np.array_equal(a, b), one.average, one.params)
    assert all(jax.tree.leaves(apart)) and len(jax.tree.leaves(one.average)) == len(jax.tree.leaves(one.params))


def test_evaluation_reads_it_when_asked_and_in_training(trained, capsys):
    workdir = f'--workdir={trained}'
    for flags in ((), ('--ema',)):
        assert main(['eval', workdir, '--multiples=1', *flags]) == 0
    assert 'step 4-ema' in capsys.readouterr().out.replace('\n', ' ')
    plain, average = evaluated(trained, '4'), evaluated(trained, '4-ema')
    assert (plain['ema'], average['ema']) == (False, True)
    lines = [json.loads(line) for line in (trained / 'metrics.jsonl').read_text().splitlines()]
    last = {name: value for line in lines if line['step'] == 4 for name, value in line.items()}
    assert plain['1x/loss'] == last['test/1x/loss'] != last['test_ema/1x/loss'] == average['1x/loss']
    loaded, state = load_run(trained, ema=True), state_of(trained, 4)
    jax.tree.map(np.testing.assert_array_equal, loaded.variables, state.averaged_variables)
    jax.tree.map(np.testing.assert_array_equal, load_run(trained).variables, state.variables)
    check_metric('test_ema/1x/accuracy', loaded.setup)
    guesses = [trivial_scores(saved_config(trained), f'{name}/1x/accuracy') for name in ('test', 'test_ema')]
    assert guesses[0] == guesses[1] and guesses[0]


def test_a_quantized_run_has_none(trained, tmp_path, capsys):
    made = f'{tmp_path}/made'
    assert main(['quantize', f'--workdir={trained}', f'--out={made}', '--weights=int8', '--compilation_cache=']) == 0
    assert main(['eval', f'--workdir={made}', '--ema']) == 2
    assert f'{made} keeps no average of its parameters' in capsys.readouterr().err
    assert main(['eval', f'--workdir={made}', '--multiples=1']) == 0


def test_a_run_from_before_loads_and_goes_on(tmp_path, capsys):
    folder = tmp_path / 'run'
    assert main([*RUN, f'--workdir={folder}']) == 0
    config = json.loads((folder / 'config.json').read_text())
    assert config['optimizer'].pop('ema', 0) is None
    (folder / 'config.json').write_text(json.dumps(config))
    shutil.rmtree(folder / 'checkpoints' / '4')
    assert main([*RUN, f'--workdir={folder}']) == 0
    assert main(['eval', f'--workdir={folder}', '--multiples=1']) == 0
    capsys.readouterr()
    assert main(['eval', f'--workdir={folder}', '--ema']) == 2
    assert 'keeps no average of its parameters (config.optimizer.ema is None)' in capsys.readouterr().err
    with pytest.raises(UserError, match='there is no evaluator test_ema'):
        check_metric('test_ema/1x/accuracy', load_run(folder).setup)


def test_it_is_divided_as_the_parameters_are():
    config = get_config('task=mqar,zoo=mingru')
    with config.unlocked():
        config.batch_size, config.mesh, config.optimizer.ema = 4, spec(Axes, data=1, fsdp=2), DECAY
        config.model.dim, config.model.stack.depth = 8, 1
    abstract = prepare(config).abstract
    places = jax.tree.map(lambda leaf: leaf.sharding, abstract.params)
    assert jax.tree.map(lambda leaf: leaf.sharding, abstract.average) == places
    assert any('fsdp' in place.spec for place in jax.tree.leaves(places))
