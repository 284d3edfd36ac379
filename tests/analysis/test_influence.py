"""Influence: EK-FAC where it is exact, and what leaving a row out does."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.analysis.influence import Factors, TwiceWatched, gradients, influences, products
from attnlab.cli import main
from attnlab.errors import UserError
from attnlab.nn.projections import Linear
from attnlab.quantize.feedback import Moments
from attnlab.quantize.formats import Symmetric
from attnlab.quantize.layers import Quantization, replace_maps
from attnlab.quantize.training import Rounded
from attnlab.runs.loading import load_run
from attnlab.train.rows import rows_of
from tests.bad_inputs.conftest import originals

__all__ = ['originals']


def test_factors_are_exact_where_the_curvature_has_them():
    rng = np.random.default_rng(0)
    # Inputs along an orthogonal basis, gradients along another: the curvature is diagonal in their products.
    turn_x, turn_g = (np.linalg.qr(rng.standard_normal((size, size)))[0] for size in (3, 2))
    sizes = rng.uniform(0.5, 2, (3, 2))
    rows = [sizes[i, j] * np.outer(turn_x[:, i], turn_g[:, j]) for i in range(3) for j in range(2)]
    single = np.stack(rows)
    weights = [(i + 1.0, j + 1.0) for i in range(3) for j in range(2)]
    of_x = sum(w[0] * np.outer(turn_x[:, n // 2], turn_x[:, n // 2]) for n, w in enumerate(weights))
    of_g = sum(w[1] * np.outer(turn_g[:, n % 2], turn_g[:, n % 2]) for n, w in enumerate(weights))
    factors = Factors.fitted(of_x, of_g, single)
    flat = single.reshape(len(single), -1)
    curvature = flat.T @ flat / len(flat)
    asked = rng.standard_normal((4, 3, 2))
    damped = curvature + 0.1 * np.trace(curvature) / 6 * np.eye(6)
    expected = np.linalg.solve(damped, asked.reshape(4, -1).T).T
    np.testing.assert_allclose(factors.solved(asked, 0.1).reshape(4, -1), expected, rtol=1e-8)
    found = influences({'w': asked}, {'w': single}, {'w': factors}, 0.1)
    np.testing.assert_allclose(found, asked.reshape(4, -1) @ np.linalg.solve(damped, flat.T), rtol=1e-8)
    np.testing.assert_allclose(products({'w': asked}, {'w': single}), asked.reshape(4, -1) @ flat.T, rtol=1e-8)


def test_influence_foretells_what_leaving_out_does():
    rng = np.random.default_rng(1)
    # Least squares with orthogonal inputs, each in turn: one row moves one weight.
    x = np.tile(np.eye(4), (5, 1))
    y = x @ [1.0, 2.0, 3.0, 4.0] + 0.3 * rng.standard_normal(20)
    asked, answer = np.array([1.0, 1.0, 0.0, 0.0]), 3.5

    def fit(kept):
        return np.linalg.lstsq(x[kept], y[kept], rcond=None)[0]

    whole = fit(np.arange(20))
    single = (x * (x @ whole - y)[:, None])[..., None]
    ours = (asked * (asked @ whole - answer))[None, :, None]
    # Of squares the curvature is that of the inputs; residuals of one size give the gradients' as much.
    factors = Factors(np.eye(4), np.eye(1), (x.T @ x / 20).diagonal()[:, None])
    found = influences({'w': ours}, {'w': single}, {'w': factors}, 0.0)[0]

    def loss(weights):
        return (asked @ weights - answer) ** 2 / 2

    left_out = np.array([loss(fit(np.delete(np.arange(20), row))) - loss(whole) for row in range(20)])
    # Without a row the loss rises by a twentieth of its influence, and by more where few rows say anything.
    assert np.corrcoef(found / 20, left_out)[0, 1] > 0.98
    np.testing.assert_allclose(found[[2, 3, 6, 7]], 0, atol=1e-12)


def test_moments_are_those_of_inputs_and_gradients():
    """Of a map that is called twice, over any leading axes, the sums over both calls, by numpy."""
    rng = np.random.default_rng(0)
    linear = TwiceWatched(Linear(4, 3, bias=True, rngs=nnx.Rngs(0)))
    calls = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((2, 5, 4), (7, 4))]
    pulls = [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((2, 5, 3), (7, 3))]
    graphdef, moments, rest = nnx.split(linear, Moments, ...)

    def loss(moments, rest):
        made = nnx.merge(graphdef, moments, rest)
        return sum(jnp.sum(made(x) * pull + made(x) ** 3) for x, pull in zip(calls, pulls, strict=True))

    by_moments, by_rest = jax.jit(jax.grad(loss, argnums=(0, 1)))(moments, rest)
    weight, bias = (np.asarray(each[...], np.float64) for each in (linear.weight, linear.bias))
    # The map is called twice on each, once for each term of the loss: rows count as often, with a gradient of each.
    of_inputs, of_pulls, slope = np.zeros((4, 4)), np.zeros((3, 3)), np.zeros((4, 3))
    for x, pull in zip(calls, pulls, strict=True):
        rows = np.asarray(x, np.float64).reshape(-1, 4)
        y = rows @ weight + bias
        for gradient in (np.asarray(pull, np.float64).reshape(-1, 3), 3 * y**2):
            of_inputs += rows.T @ rows
            of_pulls += gradient.T @ gradient
            slope += rows.T @ gradient
    np.testing.assert_allclose(by_moments['moments'][...], of_inputs, rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(by_moments['pulls'][...], of_pulls, rtol=1e-4, atol=1e-3)
    # Watching changes no other derivative.
    np.testing.assert_allclose(by_rest['weight'][...], slope, rtol=1e-4, atol=1e-3)


def test_moments_of_stacked_layers_are_of_each_layer():
    rng = np.random.default_rng(1)
    x = rng.standard_normal((6, 4)).astype(np.float32)
    linear = Linear(4, 4, rngs=nnx.Rngs(0))
    weights = rng.standard_normal((3, 4, 4)).astype(np.float32) / 2
    linear.weight = nnx.Param(jnp.asarray(weights), **linear.weight.get_metadata())
    graphdef, moments, rest = nnx.split(TwiceWatched(linear), Moments, ...)
    assert moments['pulls'][...].shape == (3, 4, 4)

    def loss(moments):
        def layer(x, one):
            return nnx.merge(graphdef, *one)(x), None

        return jnp.sum(jax.lax.scan(layer, jnp.asarray(x), (moments, rest))[0] ** 2)

    found = jax.jit(jax.grad(loss))(moments)
    read = [x.astype(np.float64)]
    for weight in weights:
        read.append(read[-1] @ weight)
    gradient = 2 * read[-1]
    for place in (2, 1, 0):
        np.testing.assert_allclose(found['moments'][...][place], read[place].T @ read[place], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(found['pulls'][...][place], gradient.T @ gradient, rtol=1e-4, atol=1e-4)
        gradient = gradient @ weights[place].T


def test_maps_of_few_bits_are_not_looked_into():
    for few in (Quantization(Symmetric(4)), Rounded(Symmetric(4))):
        with pytest.raises(UserError, match='Linear, not a Linear that computes with its weights as they are'):
            replace_maps(few(Alone()), lambda index, linear: TwiceWatched(linear))


class Alone(nnx.Module):
    """A model of one map."""

    def __init__(self):
        self.map = Linear(4, 4, rngs=nnx.Rngs(0))


def test_a_run_says_what_bears_on_it(originals, capsys):
    run = originals / 'run'
    assert main(['analyse', f'--workdir={run}', '--influence=3', '--rows=2', '--compilation_cache=']) == 0
    assert 'row of training' in capsys.readouterr().out
    record = json.loads((run / 'analysis' / '4-influence.json').read_text())
    assert np.shape(record['by_curvature']) == np.shape(record['by_gradient']) == (2, 3)
    loaded = load_run(run)
    theirs = gradients(loaded, rows_of(loaded.setup, 'train', 2))
    assert 'stack/blocks/0/mlp/gate/weight[0]' in theirs and len(theirs['embedding/weight']) == 2
    # A row bears on itself more than another does, and lowers its own loss.
    own = products(theirs, theirs)
    assert own[0, 0] > 0 and own[1, 1] > 0
