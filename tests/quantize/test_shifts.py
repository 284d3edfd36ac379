"""Exponents of channels that weights make up for: the same function, what one bias a channel would give, and a run."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.cli import main
from attnlab.nn.projections import Linear
from attnlab.quantize.formats import ELEMENTS, FixedFloating, Symmetric
from attnlab.quantize.layers import QuantizedLinear, ShiftedLinear, linear_maps, named_maps
from attnlab.quantize.shifts import TRIED, ShiftCalibration, channel_shifts
from attnlab.quantize.sparsity import apart
from attnlab.runs.loading import load_run
from attnlab.train.rows import rows_of
from tests.bad_inputs.conftest import originals

__all__ = ['originals']


def test_shifts_by_hand():
    found = channel_shifts(np.array([8.0, 4.0, 4.1, 0.9, 0.0, 1e-60]))
    assert found.tolist() == [0, -1, 0, -3, 0, -127] and found.dtype == np.int8
    assert channel_shifts(np.zeros(3)).tolist() == [0, 0, 0]


def test_a_fixed_scale_by_hand():
    x = jnp.asarray([-40.0, -2.4, -0.4, 0.0, 0.3, 0.8, 9.0, 100.0])
    # E2M1 times 2: 0, 1, 2, 3, 4, 6, 8, 12.
    np.testing.assert_array_equal(FixedFloating('e2m1', 2.0).rounded(x), [-12, -2, 0, 0, 0, 1, 8, 12])


def test_shifted_maps_compute_the_same_and_round_as_one_bias_a_channel_would():
    rng = np.random.default_rng(0)
    widths = 10.0 ** rng.uniform(-2, 1, 6)
    x = jnp.asarray(rng.standard_normal((50, 6)) * widths, jnp.float32)
    linear = Linear(6, 3, bias=True, rngs=nnx.Rngs(0))
    weight, before = np.asarray(linear.weight[...]), linear(x)
    shifts = channel_shifts(np.abs(np.asarray(x)).max(axis=0))
    assert len(set(shifts.tolist())) > 3
    moved = ShiftedLinear(linear, jnp.asarray(shifts))
    # Powers of two: not one bit of a product changes.
    np.testing.assert_array_equal(moved(x), before)
    np.testing.assert_array_equal(moved.weight[...], weight * np.exp2(shifts.astype(np.float32))[:, None])
    few = QuantizedLinear(moved, weights=None, inputs=FixedFloating('e2m1', 0.5))
    # By the definition: the format of channel j has the exponent bias of 0.5 times 2^k_j.
    read = np.stack([FixedFloating('e2m1', 0.5 * 2.0**k).rounded(x[:, j]) for j, k in enumerate(shifts.tolist())], 1)
    np.testing.assert_allclose(few(x), read @ weight + np.asarray(linear.bias[...]), rtol=1e-5, atol=1e-5)
    # One bias for all channels loses the narrow ones.
    one = np.asarray(FixedFloating('e2m1', 0.5).rounded(x))
    narrow = np.abs(np.asarray(x)).max(axis=0) < 0.25 / 2
    assert narrow.any()
    assert np.abs(one[:, narrow]).max() == 0 < np.abs(read[:, narrow]).max()


def test_biases_are_those_of_the_least_error_of_outputs(originals):
    run = load_run(originals / 'run')
    quantization, moved = ShiftCalibration('e2m1', rows=3).found(run)
    maps = named_maps(moved.model())
    assert len(maps) == len(quantization.inputs)
    read = {}

    class Noting(Linear):
        def __init__(self, linear, name):
            self.axes, self.usual, self.weight, self.bias = linear.axes, linear.usual, linear.weight, linear.bias
            self.name = name

        def inputs(self, x):
            note = read.setdefault(self.name, []).append
            jax.debug.callback(lambda given: note(np.asarray(given, np.float64).reshape(-1, x.shape[-1])), x)
            return x

    # The same model, layers apart, which tells what its maps read.
    model = apart(run.model())
    names = {id(map_): name for name, map_ in named_maps(model).items()}
    for module, name, map_ in linear_maps(model):
        setattr(module, name, Noting(map_, names[id(map_)]))
    for batch in rows_of(run.setup, 'train', 3):
        run.setup.task.measure(model, jax.tree.map(jnp.asarray, batch), None)
    jax.effects_barrier()
    for (name, map_), format in zip(maps.items(), quantization.inputs, strict=True):
        x = np.concatenate(read[name])
        shifts = channel_shifts(np.abs(x).max(axis=0))
        np.testing.assert_array_equal(np.asarray(map_.shifts[...])[0], shifts)
        x = x * np.exp2(-shifts.astype(np.float64))
        weight = np.asarray(map_.weight[...], np.float64)[0]
        levels = ELEMENTS['e2m1'].levels
        signed = np.unique(np.concatenate([-levels, levels]))
        widest = np.abs(x).max() / 6
        errors = []
        for bias in TRIED:
            scale = widest * 2**-bias
            nearest = signed[np.abs(x[..., None] / scale - signed).argmin(-1)] * scale
            errors.append(float((((nearest - x) @ weight) ** 2).sum()))
        place = int(np.round(np.log2(widest / format.scale) * 32))
        chosen = errors[0] if place == 0 else errors[1 + place + 8]
        assert chosen <= min(errors) * (1 + 1e-4), name


@pytest.mark.parametrize('flags', [(), ('--weights=int4', '--tuned=2'), ('--weights=adae2m1@8',)])
def test_a_run_of_shifted_inputs(originals, tmp_path, flags):
    run, made = originals / 'run', tmp_path / 'made'
    asked = ['quantize', f'--workdir={run}', f'--out={made}', '--compilation_cache=', '--format=json']
    assert main([*asked, '--inputs=fixede2m1', '--rows=3', *flags]) == 0
    quantization, moved = ShiftCalibration('e2m1', rows=3).found(load_run(run))
    config = json.loads((made / 'config.json').read_text())['quantization']
    assert [each['scale'] for each in config['inputs']] == [each.scale for each in quantization.inputs]
    loaded = load_run(made)
    for ours, theirs in zip(named_maps(loaded.model()).values(), named_maps(moved.model()).values(), strict=True):
        np.testing.assert_array_equal(ours.shifts[...], theirs.shifts[...])
        if '--weights=int4' not in flags:
            # Weights are rounded after they were shifted.
            whole = np.asarray(theirs.weight[...])[0]
            stored = (
                ours.weight[...][0]
                if ours.format is None
                else ours.format.decode(
                    {name: each[...][0] for name, each in ours.stored.items()}, ours.shape[::-1], jnp.float32
                ).T
            )
            expected = whole if ours.format is None else ours.format.rounded(jnp.asarray(whole.T)).T
            np.testing.assert_array_equal(stored, expected)
    # Four bits of inputs, near to what it was made from, and nearer than one scale for all channels at least.
    batch = {name: each[None] for name, each in loaded.setup.task.source('valid', 16)[0].items()}
    losses = [float(each.setup.measure(each.variables, batch)['loss'].total) for each in (load_run(run), moved, loaded)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert 0 < abs(losses[2] - losses[0]) < 0.05 * losses[0]


def test_feedback_reads_inputs_as_they_are(originals, tmp_path, capsys):
    asked = [f'--workdir={originals / "run"}', f'--out={tmp_path}/made', '--weights=int4', '--inputs=fixede2m1']
    assert main(['quantize', *asked, '--feedback=2', '--compilation_cache=']) == 2
    assert 'leave it out with --inputs=fixede2m1' in ' '.join(capsys.readouterr().err.split())
    assert main(['quantize', *asked[:2], '--inputs=fixede9m9', '--compilation_cache=']) == 2
    assert "element of FixedFloating is 'e9m9'" in ' '.join(capsys.readouterr().err.split())


def test_maps_that_are_rounded_already_are_not_shifted():
    few = QuantizedLinear(Linear(4, 4, rngs=nnx.Rngs(0)), weights=Symmetric(4), inputs=None)
    with pytest.raises(Exception, match='not a Linear that computes with its weights as they are'):
        ShiftedLinear(few, jnp.zeros(4, jnp.int8))
