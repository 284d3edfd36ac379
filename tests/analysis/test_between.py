"""Two models: a permuted copy is found again, and what does not hold is left."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.analysis.between import (
    Axis,
    Symmetry,
    arrays_of,
    barrier,
    holds,
    matched,
    mixed,
    permuted,
    symmetries,
)
from attnlab.cli import main
from attnlab.config import spec
from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.nn.norms import DynamicTanh, EvoNormS0, LayerNorm, OffsetRMSNorm, RMSNorm
from attnlab.quantize.formats import Symmetric
from attnlab.quantize.layers import Quantization
from attnlab.runs.loading import load_run
from attnlab.runs.record import read_record
from attnlab.testing.noise import perturbed
from attnlab.train.optimizer import named_parameters
from attnlab.train.state import split
from tests.analysis.test_parts import TOKENS, made
from tests.bad_inputs.conftest import LANGUAGE, SMALL, originals

__all__ = ['originals']


def arrays(model):
    return {path: np.asarray(variable[...]) for path, variable in named_parameters(split(model)[1]).items()}


def outputs(model, values):
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    made = jax.tree.unflatten(
        jax.tree.structure(params), [jnp.asarray(values[path]) for path in named_parameters(params)]
    )
    return np.asarray(nnx.merge(graphdef, made, rest).hidden(TOKENS, Context.full(1, 6))[0])


@pytest.mark.parametrize('name', ['mha', 'mamba', 'gated_delta_net'])
def test_a_permuted_copy_is_found_again(name):
    model = made(name, **({} if name == 'mamba' else {'heads': 2}))
    known = symmetries(model)
    branches = ('mixer', 'mixer.state', 'mlp') if name == 'mamba' else ('mixer', 'mlp')
    assert [each.name for each in known] == ['stream'] + [f'layers[{i}].{b}' for i in (0, 1) for b in branches]
    one, before = arrays(model), outputs(model, arrays(model))
    rng = np.random.default_rng(0)
    # The stream by itself, and all the others at once: all of them together need not be found.
    for chosen in (known[:1], known[1:]):
        other, orders = one, {each.name: rng.permutation(each.count) for each in chosen}
        for symmetry in chosen:
            other = permuted(other, symmetry, orders[symmetry.name])
        # Nothing that can be read of the model has changed, but for the order of channels of the stream.
        order = orders.get('stream', np.arange(model.dim))
        np.testing.assert_allclose(outputs(model, other), before[..., order], atol=1e-5)
        assert max(np.abs(other[path] - one[path]).max() for path in one) > 0.1
        found, back = matched(one, other, chosen)
        for path, each in one.items():
            np.testing.assert_array_equal(found[path], each)
        for name_, order in orders.items():
            np.testing.assert_array_equal(order[back[name_]], np.arange(len(order)))


@pytest.mark.parametrize('norm', [LayerNorm, DynamicTanh, EvoNormS0, OffsetRMSNorm])
def test_all_that_norms_have_of_a_channel_goes_with_it(norm):
    model = perturbed(made('nope', depth=1, heads=2, norm=norm), 0.3)
    stream = symmetries(model)[0]
    one, order = arrays(model), stream.drawn(0)
    before, after = outputs(model, one), outputs(model, permuted(one, stream, order))
    np.testing.assert_allclose(after, before[..., order], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ('name', 'changes', 'sets'),
    [
        ('s4d', {}, 8),  # Every channel has modes of its own.
        ('mega', {}, 8),
        ('s4', {}, None),  # All channels share theirs.
        ('s5', {}, None),
        ('lru', {}, None),
        ('mamba', {}, None),  # Maps choose inputs and outputs of all channels.
        ('mamba', {'select_norm': spec(RMSNorm)}, None),
        ('s6', {}, None),
    ],
)
def test_permuted_coordinates_of_diagonal_states_are_found_again(name, changes, sets):
    model = made(name, **changes)
    if changes:
        # So that channels of the norms differ.
        for path, variable in named_parameters(split(model)[1]).items():
            if 'select_norms' in path:
                variable[...] = jnp.asarray(np.random.default_rng(1).uniform(0.5, 2, variable[...].shape), jnp.float32)
    one, before = arrays(model), outputs(model, arrays(model))
    found = [each for each in symmetries(model) if each.name.endswith('.state')]
    assert found and {each.sets for each in found} == {sets}
    other, orders = one, {each.name: each.drawn(seed) for seed, each in enumerate(found)}
    for symmetry in found:
        other = permuted(other, symmetry, orders[symmetry.name])
        if sets is not None:
            assert (orders[symmetry.name][0] != orders[symmetry.name][1]).any()
    # Sums over states are taken in another order.
    np.testing.assert_allclose(outputs(model, other), before, atol=5e-5)
    changed = {path for path in one if (one[path] != other[path]).any()}
    assert changed <= {axis.path for each in found for axis in each.axes} and len(changed) > 1
    # Were one of them left in its place, it would be another model.
    for path in changed:
        assert np.abs(outputs(model, other | {path: one[path]}) - before).max() > 1e-4, path
    back, again = matched(one, other, found)
    for path, each in one.items():
        np.testing.assert_array_equal(back[path], each)
    for symmetry in found:
        order = np.take_along_axis(orders[symmetry.name], again[symmetry.name], axis=-1)
        np.testing.assert_array_equal(order, symmetry.same)


def test_two_units_are_tried_in_each_others_place():
    # Query heads that share one head of keys: half of its channels are not a unit.
    model = made('gqa', heads=2, kv_heads=1)

    def loss(values):
        return float(np.mean(np.abs(outputs(model, values)) ** 3 * np.arange(1.0, 7)[:, None]))

    one = arrays(model)
    held = {each.name: holds(one, each, loss) for each in symmetries(model)}
    assert [name for name, found in held.items() if not found] == ['layers[0].mixer', 'layers[1].mixer']


def test_weights_of_few_bits_do_not_change_places():
    with pytest.raises(UserError, match=r'weights of layers\[0\].mixer are stored in few bits'):
        symmetries(Quantization(Symmetric(4))(made('nope', heads=2)))


def test_units_by_hand():
    # Two heads of two channels side by side, and three channels in two parts.
    heads = Symmetry('heads', 2, (Axis('a', -1, None, together=True),))
    np.testing.assert_array_equal(permuted({'a': np.arange(4)}, heads, np.array([1, 0]))['a'], [2, 3, 0, 1])
    parts = Symmetry('parts', 3, (Axis('a', -2, 1, together=False),))
    whole = np.arange(12).reshape(2, 6, 1)
    found = permuted({'a': whole}, parts, np.array([2, 0, 1]))['a']
    np.testing.assert_array_equal(found[0], whole[0])
    np.testing.assert_array_equal(found[1, :, 0] - 6, [2, 0, 1, 5, 3, 4])
    assert barrier([1.0, 3.0, 2.0], (0.0, 0.5, 1.0)) == 1.5
    half = mixed({'a': np.float32([0.0])}, {'a': np.float32([1.0])}, 0.25)['a']
    assert half.dtype == np.float32 and half[0] == 0.25


def test_two_runs_and_their_mean(originals, tmp_path, capsys):
    first, second, merged = originals / 'run', tmp_path / 'second', tmp_path / 'merged'
    config = f'--config={LANGUAGE}:zoo=mingru,data={originals / "text.txt"}'
    assert main(['train', config, *SMALL, '--config.seed=1', f'--workdir={second}']) == 0
    asked = ['analyse', f'--workdir={first}', f'--between={second}', '--rows=2', '--compilation_cache=']
    assert main([*asked, f'--merged={merged}']) == 0
    printed = capsys.readouterr().out
    assert 'layers[0].mlp' in printed and 'left' not in printed
    assert read_record(merged).finished and read_record(merged).facts['merged'] == [str(first), str(second)]
    assert read_record(merged).facts['merged_steps'] == [4, 4] and read_record(merged).facts['merged_ema'] is False
    record = json.loads((first / 'analysis' / '4-between.json').read_text())
    assert record['second_step'] == 4 and record['other_data'] is False
    # Its weights are the mean of the first's and of the second's in the order in which they lie closest to these.
    one, other, mean = (arrays_of(load_run(each)) for each in (first, second, merged))
    near, orders = matched(one, other, symmetries(load_run(first).model()))
    moved = {name: float(np.mean(order != np.arange(len(order)))) for name, order in orders.items()}
    assert record['moved'] == moved and max(moved.values()) > 0
    for path, each in mean.items():
        np.testing.assert_allclose(each, (one[path] + near[path]) / 2, rtol=1e-6, atol=1e-7)
    assert max(np.abs(near[path] - other[path]).max() for path in one) > 0.1
    assert main([*asked, f'--merged={merged}']) == 2
    assert 'holds a run already' in capsys.readouterr().err
    config = second / 'config.json'
    config.write_text(config.read_text().replace('"steps": 4', '"steps": 5'))
    assert main(asked) == 2
    assert 'differ in more than the seed (steps: 4 there, 5 here)' in ' '.join(capsys.readouterr().err.split())
