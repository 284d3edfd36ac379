"""Bits by slopes: known slopes are found, choices are the best of all, and a run made so is what it says."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.cli import main
from attnlab.errors import UserError
from attnlab.module import Module
from attnlab.nn.projections import Linear
from attnlab.quantize.allocation import cheapest, slopes
from attnlab.quantize.formats import Rotated
from attnlab.quantize.layers import Quantization, QuantizedLinear, apart, named_maps
from attnlab.runs.loading import load_run
from tests.bad_inputs.conftest import originals

__all__ = ['originals']


class Two(Module):
    """Two maps, one of them stacked over layers."""

    def __init__(self):
        self.one = Linear(6, 5, rngs=nnx.Rngs(0))
        self.two = Linear(4, 3, rngs=nnx.Rngs(1))
        self.two.weight = nnx.Param(jax.random.normal(jax.random.key(2), (2, 4, 3)))


def test_slopes_of_a_quadratic_loss_are_its_own():
    model = Two()
    start = {name: np.asarray(linear.weight[...], np.float64) for name, linear in named_maps(model).items()}
    assert list(start) == ['one', 'two']
    given = {'one': 3.0, 'two': -0.5}

    def loss(model):
        # Not at a minimum: the gradient is not zero, and cancels.
        total = 7.0
        for name, linear in named_maps(model).items():
            change = np.asarray(linear.weight[...], np.float64) - start[name]
            total += given[name] * np.sum(change**2) / np.sum(start[name] ** 2) + 5 * np.sum(change)
        return total

    found = slopes(model, loss)
    np.testing.assert_allclose(found, [3.0, 0.0], rtol=1e-3, atol=0)
    for name, linear in named_maps(model).items():
        np.testing.assert_array_equal(linear.weight[...], start[name].astype(np.float32))


def test_a_layer_that_counts_has_the_bits():
    # Three equal layers, the second a hundred times as sensitive, errors of 2, 3 and 4 bits; in the mean 3 bits.
    errors, size = np.array([0.1076, 0.0298, 0.0078]), 1000
    rises = np.array([1.0, 100.0, 1.0])
    bits = np.full((3, 3), size) * np.array([2, 3, 4])
    # 2 + 4 + 3 costs 0.1076 + 0.78 + 0.0298; 3 + 3 + 3 costs 3.04; 4 for the second is worth more than anything else.
    np.testing.assert_array_equal(np.sort(cheapest(rises[:, None] * errors, bits, 9 * size)[[0, 2]]), [0, 1])
    assert cheapest(rises[:, None] * errors, bits, 9 * size)[1] == 2
    np.testing.assert_array_equal(cheapest(rises[:, None] * errors, bits, 12 * size), [2, 2, 2])
    np.testing.assert_array_equal(cheapest(rises[:, None] * errors, bits, 9 * size - 1), [0, 2, 0])
    with pytest.raises(UserError, match='the budget is 5,999 bits; the least is 6,000'):
        cheapest(rises[:, None] * errors, bits, 5999)


@pytest.mark.parametrize('seed', range(20))
def test_choices_are_the_best_of_all(seed):
    rng = np.random.default_rng(seed)
    costs, bits = rng.random((5, 4)).round(1 + seed % 3), rng.integers(1, 9 if seed % 2 else 900, (5, 4))
    budget = int(rng.integers(bits.min(axis=1).sum(), bits.max(axis=1).sum() + 2))
    rows = np.arange(5)
    sums = [
        (costs[rows, list(each)].sum(), bits[rows, list(each)].sum()) for each in itertools.product(range(4), repeat=5)
    ]
    found = cheapest(costs, bits, budget)
    assert bits[rows, found].sum() <= budget
    np.testing.assert_allclose(costs[rows, found].sum(), min(cost for cost, size in sums if size <= budget), rtol=1e-12)


def test_a_run_of_a_budget(originals, tmp_path, capsys):
    run, made = originals / 'run', tmp_path / 'made'
    asked = ['quantize', f'--workdir={run}', f'--out={made}', '--compilation_cache=', '--format=json']
    given = [*asked, '--weights=higgs2x4@8,higgs4@8', '--rows=3']
    assert main([*given, '--budget=2']) == 2
    assert 'the budget is 2 bits a number and the smallest formats take 6, scales included' in capsys.readouterr().err
    assert main([*given, '--budget=7.2']) == 0
    capsys.readouterr()
    shares = json.loads((made / 'run.json').read_text())['starts'][-1]['quantized']['allocation']
    formats = [Rotated(2, 8, 4), Rotated(4, 8)]
    # It loads with the formats that it says, one a map of a layer, to the bit.
    loaded = load_run(made)
    layers = [module for _, module in nnx.iter_modules(loaded.model()) if isinstance(module, QuantizedLinear)]
    chosen = [layer.format for layer in layers]
    assert list(named_maps(loaded.model())) == [share['name'] for share in shares]
    assert [formats[share['bits'] > 6 * share['numbers']] for share in shares] == chosen
    assert set(chosen) == set(formats)
    assert sum(share['bits'] for share in shares) <= 7.2 * sum(share['numbers'] for share in shares)
    again = load_run(run).altered(Quantization(tuple(chosen)))
    for one, other in zip(jax.tree.leaves(loaded.variables), jax.tree.leaves(again.variables), strict=True):
        np.testing.assert_array_equal(one, other)
    # Errors are those of the weights.
    weights = named_maps(load_run(run).altered(apart).model())
    for share, format in zip(shares, chosen, strict=True):
        (weight,) = weights[share['name']].weight[...]
        change = format.rounded(weight.T).T - weight
        np.testing.assert_allclose(share['error'], jnp.sum(change**2) / jnp.sum(weight**2), rtol=1e-5)


def test_another_number_of_formats_is_refused(originals):
    with pytest.raises(UserError, match=r'weights of Quantization are 1 formats; this model has \d+ linear maps'):
        load_run(originals / 'run').altered(Quantization((Rotated(4),)))
