"""PV-tuning: no round raises the loss, and on a small problem it finds what enumeration does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.cli import main
from attnlab.errors import UserError
from attnlab.nn.projections import Linear
from attnlab.quantize.formats import Affine, Microscaling, Symmetric
from attnlab.quantize.layers import Quantization, QuantizedLinear
from attnlab.quantize.packing import unpacked
from attnlab.quantize.tuning import Alternation, Shift, Tuned, alternated, moved
from attnlab.runs.record import read_record
from tests.bad_inputs.conftest import originals

__all__ = ['originals']


class Alone(nnx.Module):
    """A linear map whose inputs are alike, so that errors of weights add up or cancel."""

    def __init__(self, weight):
        self.map = Linear(*weight.shape, rngs=nnx.Rngs(0))
        self.map.weight[...] = jnp.asarray(weight)


def problem(seed=0):
    rng = np.random.default_rng(seed)
    weight = rng.standard_normal((4, 1)).astype(np.float32)
    x = (rng.standard_normal((50, 1)) + 0.1 * rng.standard_normal((50, 4))).astype(np.float32)

    def loss(model, batch):
        return jnp.mean((model.map(batch) - batch @ weight) ** 2)

    return weight, jnp.asarray(x), loss


def test_errors_of_inputs_that_are_alike_are_made_to_cancel():
    # With equal inputs the sum alone counts: 4.2, of which rounding to the nearest leaves 3, and the best codes 4.
    weight, x = np.float32([[0.4], [0.4], [0.4], [3.0]]), jnp.broadcast_to(jnp.arange(1.0, 6.0)[:, None], (5, 4))

    def loss(model, batch):
        return jnp.mean((model.map(batch) - batch @ weight) ** 2) / 11

    model = Quantization(Symmetric(3))(Alone(weight))
    assert float(loss(model, x)) == pytest.approx(1.2**2, rel=1e-4)
    # Two codes move at first, to a sum of 5; then one moves back, since two would not lower the loss.
    first, last = alternated(model, loss, [x], Alternation(4, share=0.5, trust=1.0, rate=0.0))
    assert isinstance(model.map, QuantizedLinear)
    assert (first, last) == (pytest.approx(1.2**2, rel=1e-4), pytest.approx(0.2**2, rel=1e-3))
    assert float(loss(model, x)) == pytest.approx(last, rel=1e-5)


def test_gradients_pass_through_what_maps_read():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((5, 4)), jnp.float32)
    first, second = (
        Tuned(QuantizedLinear(Linear(4, 4, rngs=nnx.Rngs(seed)), weights=Symmetric(4), inputs=Affine(4)))
        for seed in (0, 1)
    )
    pull = np.asarray(rng.standard_normal((5, 4)), np.float32)
    graphdef, shift, rest = nnx.split(first, Shift, ...)
    slope = jax.grad(lambda shift: jnp.sum(second(nnx.merge(graphdef, shift, rest)(x)) * pull))(shift)
    expected = np.asarray(Affine(4).rounded(x)).T @ (pull @ np.asarray(second.matrix()).T)
    np.testing.assert_allclose(slope['shift'][...], expected, rtol=1e-4, atol=1e-5)


def test_scales_are_tuned_too_and_zero_moves_nothing():
    weight, x, loss = problem()
    model = Quantization(Affine(2))(Alone(weight))
    codes = np.asarray(model.map.stored['codes'][...])
    # So small a trust leaves codes as they are; scales alone lower the loss.
    first, last = alternated(model, loss, [x], Alternation(30, trust=1e-6, rate=0.01))
    np.testing.assert_array_equal(model.map.stored['codes'][...], codes)
    assert last < first


def test_what_moves_in_groups_that_are_filled_up_of_layers_that_are_stacked():
    rng = np.random.default_rng(1)
    linear = Linear(5, 3, rngs=nnx.Rngs(0))
    linear.weight = nnx.Param(jnp.asarray(rng.standard_normal((2, 5, 3)), jnp.float32), axes=('embed', 'heads'))
    map_ = Tuned(QuantizedLinear(linear, weights=Symmetric(3, scope=4), inputs=None))
    slope = rng.standard_normal((2, 5, 3)).astype(np.float32)
    found = np.asarray(unpacked(moved(map_, slope, share=0.2, trust=1.0), 3, 4)).reshape(2, 3, 8)
    before = np.asarray(unpacked(map_.stored['codes'][...], 3, 4)).reshape(2, 3, 8)
    scales = np.repeat(np.asarray(map_.stored['scales'][...]).reshape(2, 3, 2), 4, axis=2)
    for layer in range(2):
        # Of fifteen weights of a layer three, by what a level is worth; none beyond the ends, 0 and 6.
        by_row = slope[layer].T
        target = before[layer, :, :5] - np.sign(by_row)
        gain = np.where((target >= 0) & (target <= 6), np.abs(by_row) * scales[layer, :, :5], 0)
        goes = gain >= np.sort(gain.reshape(-1))[-3]
        np.testing.assert_array_equal(found[layer, :, :5], np.where(goes, target, before[layer, :, :5]))
        np.testing.assert_array_equal(found[layer, :, 5:], before[layer, :, 5:])
    # Of so small a trust nothing moves.
    nothing = unpacked(moved(map_, slope, share=0.2, trust=1e-6), 3, 4)
    np.testing.assert_array_equal(np.asarray(nothing).reshape(2, 3, 8), before)


def test_other_formats_are_refused():
    with pytest.raises(UserError, match='codes of Microscaling do not lie side by side'):
        alternated(Quantization(Microscaling('e2m1'))(Alone(problem()[0])), problem()[2], [0], Alternation(1))
    with pytest.raises(UserError, match='share, trust and rate of Alternation'):
        Alternation(1, share=0.0)


def test_a_tuned_run(originals, tmp_path, capsys):
    made = tmp_path / 'made'
    asked = ['quantize', f'--workdir={originals / "run"}', f'--out={made}', '--weights=int2@8', '--tuned=3']
    assert main([*asked, '--compilation_cache=']) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if 'tuned: the loss' in line)
    first, last = (float(word.rstrip('.')) for word in line.split() if word.replace('.', '').isdigit())
    assert last <= first
    assert read_record(made).facts['quantized']['tuning']['rounds'] == 3
