"""Error feedback: against the naive algorithm, rounding to the nearest, and brute force; and second moments."""

import json
import shutil
import types
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.cli import main
from attnlab.configuration import config_of
from attnlab.errors import UserError
from attnlab.metrics import Average
from attnlab.nn.mlps import GatedMLP
from attnlab.nn.projections import Linear
from attnlab.quantize.feedback import Feedback, Moments, calibrated, watched
from attnlab.quantize.formats import Affine, Floating, Microscaling, MinMax, Symmetric
from attnlab.quantize.layers import Quantization, named_maps
from attnlab.quantize.told import tell
from attnlab.runs.loading import Loaded, load_run
from attnlab.runs.record import read_record
from attnlab.train.rows import rows_of
from attnlab.train.setup import Setup, prepare
from attnlab.train.state import joined
from tests.bad_inputs.conftest import LANGUAGE, originals

__all__ = ['originals']

FORMATS = [
    Symmetric(4, scope=8),
    Symmetric(3, scope='tensor'),
    Affine(3),
    MinMax(2, scope=5, scales='float16'),
    Floating('e2m1', scope=8),
    Microscaling('e2m1', scope=16),
]


def drawn(rows=6, columns=20, samples=200):
    """A weight, and inputs each of which is nearly the one before."""
    rng = np.random.default_rng(0)
    inputs = rng.standard_normal((samples, columns))
    for column in range(1, columns):
        inputs[:, column] = 0.95 * inputs[:, column - 1] + 0.3 * inputs[:, column]
    return rng.standard_normal((rows, columns)).astype(np.float32), inputs.T @ inputs


def error(weight, numbers, hessian):
    """The squared error of outputs."""
    change = (numbers - weight).astype(np.float64)
    return float(np.sum(change @ hessian * change))


@pytest.mark.parametrize('format', FORMATS, ids=str)
def test_independent_inputs_leave_rounding_to_the_nearest(format):
    weight, _ = drawn()
    expected = format.encode(jnp.asarray(weight))
    for how in (Feedback(), Feedback(ordered=True)):
        stored, numbers = how.rounded(weight, np.diag(np.arange(1.0, 21.0)), format)
        assert stored.keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_array_equal(stored[name], array)
            assert stored[name].dtype == array.dtype
        np.testing.assert_array_equal(numbers, format.decode(expected, weight.shape, jnp.float32))


@pytest.mark.parametrize('format', FORMATS, ids=str)
@pytest.mark.parametrize('ordered', [False, True])
def test_what_is_stored_is_what_it_stands_for_and_errs_less(format, ordered):
    weight, hessian = drawn()
    stored, numbers = Feedback(ordered=ordered).rounded(weight, hessian, format)
    np.testing.assert_array_equal(format.decode(stored, weight.shape, jnp.float32), numbers)
    nearest = np.asarray(format.rounded(jnp.asarray(weight)))
    assert error(weight, numbers, hessian) < 0.6 * error(weight, nearest, hessian)


def naive(weight, hessian, step):
    """Columns one after the other; after each the best change of the others, by solving for it."""
    left, numbers = weight.astype(np.float64), np.zeros(weight.shape)
    for column in range(weight.shape[1]):
        numbers[:, column] = step * np.round(left[:, column] / step)
        later = slice(column + 1, None)
        change = (numbers - left)[:, column : column + 1]
        # The change c of later columns that makes (e, c) H (e, c)^T least, e being the change of this one.
        left[:, later] -= change @ np.linalg.solve(hessian[later, later], hessian[later, column])[None]
    return numbers


def test_the_factor_does_what_solving_does_for_every_column():
    weight, hessian = drawn()
    scale = float(np.abs(weight).max() / 7)
    _, numbers = Feedback(damping=0.0).rounded(weight, hessian, Symmetric(4, scope='tensor'))
    levels = np.rint(numbers / scale)
    expected = np.clip(np.rint(naive(weight, hessian, scale) / scale), -7, 7)
    # Feedback may leave the range of the scale, which the naive rounding has not; rows where it does not are the same.
    inside = np.all(np.abs(naive(weight, hessian, scale)) < 7.4 * scale, axis=1)
    assert inside.sum() >= 3
    np.testing.assert_array_equal(levels[inside], expected[inside])


def test_the_last_column_is_the_best_there_is():
    weight, hessian = drawn(columns=5)
    format = Symmetric(3)
    _, numbers = Feedback(damping=0.0).rounded(weight, hessian, format)
    scales = np.asarray(format.encode(jnp.asarray(weight))['scales'])
    for row in range(len(weight)):
        tried = []
        for level in range(-3, 4):
            other = numbers[row].copy()
            other[-1] = level * scales[row]
            tried.append(error(weight[row : row + 1], other[None], hessian))
        assert error(weight[row : row + 1], numbers[row : row + 1], hessian) == pytest.approx(min(tried), rel=1e-9)


def test_sizes_of_inputs_do_not_matter_and_none_is_no_information():
    weight, hessian = drawn()
    format = Symmetric(4)
    one, other = (Feedback().rounded(weight, scale * hessian, format)[1] for scale in (1.0, 1024.0))
    np.testing.assert_array_equal(one, other)
    _, numbers = Feedback().rounded(weight, np.zeros((20, 20)), format)
    np.testing.assert_array_equal(numbers, format.rounded(jnp.asarray(weight)))
    with pytest.raises(UserError, match='the inputs of a map of 20 inputs do not span them'):
        Feedback(damping=0.0).rounded(weight, np.diag([1.0] * 19 + [0.0]), format)
    for options, sentence in (({'rows': 0}, 'rows of Feedback is 0'), ({'damping': -1.0}, 'damping of Feedback is -1')):
        with pytest.raises(UserError, match=sentence):
            Feedback(**options)


class Layers(nnx.Module):
    """Maps stacked over two layers, applied in a scan, to each of several streams by `vmap`; and one map alone."""

    def __init__(self):
        self.first = Linear(3, 4, rngs=nnx.Rngs(0))
        self.stacked = nnx.vmap(lambda key: Linear(4, 4, rngs=nnx.Rngs(params=key)))(
            jax.random.split(jax.random.key(1))
        )

    def __call__(self, x):
        graphdef, state = nnx.split(self.stacked)

        def layer(h, state):
            linear = nnx.merge(graphdef, state)
            return jnp.tanh(jax.vmap(linear, in_axes=1, out_axes=1)(h)), h

        return jax.lax.scan(layer, self.first(x), state)


def test_second_moments_are_those_of_what_maps_read():
    model, x = Layers(), jax.random.normal(jax.random.key(2), (2, 5, 6, 3))
    watching = watched(model)
    assert [each.moments[...].shape for each in watching] == [(3, 3), (2, 4, 4)]

    def measure(model, batch, key):
        return {'loss': Average(jnp.sum(model(batch['x'])[0] ** 2), 1)}

    setup = mock.NonCallableMock(spec=Setup, jit=jax.jit, task=types.SimpleNamespace(measure=measure))
    tell(setup, model, Moments, [{'x': x[0]}, {'x': x[1]}])
    assert all(each.moments[...].dtype == np.float32 for each in watching)
    first, stacked = (np.asarray(each.moments[...]) for each in watching)
    rows = np.asarray(x).reshape(-1, 3)
    np.testing.assert_allclose(first, rows.T @ rows, rtol=1e-5)
    read = np.concatenate([np.asarray(model(part)[1]).reshape(2, -1, 4) for part in x], axis=1)
    np.testing.assert_allclose(stacked, np.einsum('lnd,lne->lde', read, read), rtol=1e-5, atol=1e-5)


def test_what_the_loss_does_not_depend_on_is_not_counted():
    """Such as padding."""
    model, x = Layers(), jax.random.normal(jax.random.key(2), (5, 6, 3))
    there = jnp.arange(5) < 3
    watching = watched(model)

    def measure(model, batch, key):
        return {'loss': Average(jnp.sum(jnp.where(batch['there'][:, None, None], model(batch['x'])[0], 0) ** 2), 1)}

    setup = mock.NonCallableMock(spec=Setup, jit=jax.jit, task=types.SimpleNamespace(measure=measure))
    tell(setup, model, Moments, [{'x': x, 'there': there}])
    first, stacked = (np.asarray(each.moments[...]) for each in watching)
    rows = np.asarray(x)[:3].reshape(-1, 3)
    np.testing.assert_allclose(first, rows.T @ rows, rtol=1e-5)
    read = np.asarray(model(x)[1])[:, :3].reshape(2, -1, 4)
    np.testing.assert_allclose(stacked, np.einsum('lnd,lne->lde', read, read), rtol=1e-5, atol=1e-5)


def test_a_map_that_is_shared_is_watched_once():
    mlp = GatedMLP(4, rngs=nnx.Rngs(0))
    mlp.up = mlp.gate
    assert len(watched(mlp)) == 2 and mlp.up is mlp.gate


def test_a_run_with_feedback(originals, tmp_path, capsys):
    run = tmp_path / 'run'
    shutil.copytree(originals / 'run', run)
    common = [f'--workdir={run}', '--compilation_cache=', '--format=json']
    flags = {'a': ('--feedback=3',), 'b': ('--feedback=3',), 'nearest': ()}
    for name, more in flags.items():
        assert main(['quantize', *common, f'--out={tmp_path / name}', '--weights=int3@8', *more]) == 0
    first, again, nearest = (jax.tree.leaves(load_run(tmp_path / name).variables) for name in flags)
    for one, other in zip(first, again, strict=True):
        np.testing.assert_array_equal(one, other)
    codes = [(one, other) for one, other in zip(first, nearest, strict=True) if one.dtype == np.uint8]
    assert codes and all(one.shape == other.shape for one, other in codes)
    assert any(np.any(one != other) for one, other in codes)
    # Everything else, scales too, is as without.
    for one, other in zip(first, nearest, strict=True):
        if one.dtype != np.uint8:
            np.testing.assert_array_equal(one, other)
    facts = read_record(tmp_path / 'a').facts['quantized']
    assert facts['feedback'] == {'rows': 3, 'damping': 0.01, 'ordered': False}
    assert json.loads((tmp_path / 'a' / 'metrics.jsonl').read_text())['valid/loss'] > 0
    capsys.readouterr()
    for more, sentence in (
        (['--weights=higgs3', '--feedback=1'], 'Rotated does not round numbers one by one'),
        (['--weights=int3', '--feedback=100000'], 'rows is 100000; the train split has'),
    ):
        assert main(['quantize', *common, f'--out={tmp_path}/none', *more]) == 2
        assert sentence in capsys.readouterr().err


def test_layers_apart_have_their_turns(originals):
    """Sparse activations take the layers of two apart; maps of the second read what the first, rounded, gives."""
    config = config_of(LANGUAGE, f'zoo=mingru,data={originals / "text.txt"}')
    with config.unlocked():
        config.batch_size, config.length, config.model.dim, config.model.stack.depth, config.evals = 2, 16, 8, 2, ()
    setup = prepare(config)
    state = setup.initialize()
    loaded = Loaded(setup, joined(state.params, state.buffers), 0)
    quantization, how = Quantization(Symmetric(3, scope=4), thresholds=(0.01, 0.01)), Feedback(rows=2)

    def opened():
        return loaded.altered(quantization.opened)

    found = named_maps(calibrated(opened(), loaded.altered(quantization), quantization.weights, how).model())
    second = [name for name in found if 'blocks.1.' in name]
    assert second

    def agreeing(first):
        """Whether the codes of the second layer are those of what it reads where the first has these weights."""
        model = opened().model()
        maps = dict(zip(named_maps(model), watched(model), strict=True))
        for name, weight in first.items():
            maps[name].weight[...] = weight
        tell(setup, model, Moments, rows_of(setup, 'train', how.rows))
        for name in second:
            weight, moments = (np.asarray(each[...])[0] for each in (maps[name].weight, maps[name].moments))
            stored, _ = how.rounded(weight.T, moments, quantization.weights)
            yield np.array_equal(found[name].stored['codes'][...][0], stored['codes'])

    rounded = {name: decoded(map_) for name, map_ in found.items() if name not in second}
    assert all(agreeing(rounded)) and not any(agreeing({}))


def decoded(map_):
    """The weight of a map, over one repeat where it is stacked."""
    stored = {name: variable[...] for name, variable in map_.stored.items()}

    def one(stored):
        return map_.format.decode(stored, map_.shape[::-1], jnp.float32).T

    return (jax.vmap(one) if stored['codes'].ndim > 2 else one)(stored)
