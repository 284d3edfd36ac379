"""Channels behind norms made equally wide: the same function, and what one scale a channel would have given."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.cli import main
from attnlab.config import build
from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.nn.norms import LayerNorm, RMSNorm
from attnlab.nn.projections import Linear
from attnlab.quantize.calibration import Calibration, _unchanged, equal_widths, listened, move
from attnlab.quantize.formats import Fixed
from attnlab.quantize.layers import named_maps
from attnlab.quantize.sparsity import apart
from attnlab.runs.loading import load_run
from attnlab.train.rows import rows_of
from attnlab.zoo import ZOO
from tests.bad_inputs.conftest import originals

__all__ = ['originals']


def behind(norm, bias):
    """A norm with channels of very different sizes, two maps behind it, and what it is given."""
    rng = np.random.default_rng(0)
    made = norm(6, rngs=nnx.Rngs(0))
    made.scale[...] = jnp.asarray(10 ** rng.uniform(-1.5, 1.5, 6), jnp.float32)
    if bias:
        made.bias[...] = made.scale[...] * jnp.asarray(rng.standard_normal(6), jnp.float32)
    maps = [Linear(6, width, bias=bias, rngs=nnx.Rngs(width)) for width in (3, 4)]
    return made, maps, jnp.asarray(rng.standard_normal((200, 6)), jnp.float32)


@pytest.mark.parametrize(('norm', 'bias'), [(LayerNorm, True), (LayerNorm, False), (RMSNorm, False)])
def test_the_function_stays_and_one_range_is_one_a_channel(norm, bias):
    made, maps, x = behind(norm, bias)
    read = np.asarray(made(x), np.float64)
    outputs = [linear(made(x)) for linear in maps]
    low, high = read.min(axis=0).astype(np.float32), read.max(axis=0).astype(np.float32)
    factor, shift = equal_widths(made, maps, low, high, 6)
    assert bool(jnp.any(shift != 0)) == bias and float(factor.max() / factor.min()) > 10
    move(made, maps, factor, shift)
    for linear, before in zip(maps, outputs, strict=True):
        np.testing.assert_allclose(linear(made(x)), before, rtol=1e-4, atol=1e-4 * float(jnp.std(before)))
    # What is now rounded with one scale and zero point is what had one a channel.
    moved = np.asarray(made(x), np.float64)
    if bias:
        scales = (np.maximum(high, 0) - np.minimum(low, 0)) / 63
        zeros = np.round(-np.minimum(low, 0) / scales)
        common = Fixed(6, float(scales.mean()), int(np.round(zeros.mean())))
        alone = (np.clip(np.round(read / scales) + zeros, 0, 63) - zeros) * scales
        together = np.asarray(common.rounded(jnp.asarray(moved, jnp.float32)), np.float64)
        back = (together + np.asarray(shift, np.float64)) * np.asarray(factor, np.float64)
        # But for numbers halfway between two levels.
        assert np.mean(np.abs(back - alone) > 1e-3 * scales) < 0.01
    else:
        widths = np.abs(moved).max(axis=0)
        np.testing.assert_allclose(widths, widths.mean(), rtol=1e-5)


class Listening(nnx.Module):
    """A gate that shows what it is called with."""

    def __init__(self, gate, heard):
        self.gate, self.heard = gate, heard

    def __call__(self, x):
        self.heard(x)
        return self.gate(x)


@pytest.mark.parametrize('recipe', ['gla', 'mlstm', 'hgrn', 'gated_attention', 'titans_linear', 'rg_lru'])
def test_a_gate_reads_the_very_object_that_its_mixer_is_given(recipe):
    # By which calibration knows that it is behind the norm.
    heard, mixer = [], build(ZOO[recipe].sized(heads=2)[0])(16, rngs=nnx.Rngs(0))
    mixer.gate = Listening(mixer.gate, heard.append)

    def run(x):
        y, _ = mixer(x, Context.full(1, 8))
        assert heard and all(each is x for each in heard)
        heard.clear()
        return y

    jax.eval_shape(run, jax.ShapeDtypeStruct((1, 8, 16), jnp.float32))


def test_fixed_ranges():
    x = jnp.asarray([-9.0, -1.0, -0.31, 0.0, 0.26, 2.0, 9.0])
    kind = Fixed.of(4, -1.0, 2.0)
    assert (kind.scale, kind.zero) == (pytest.approx(0.2), 5)
    np.testing.assert_allclose(kind.rounded(x), [-1.0, -1.0, -0.4, 0.0, 0.2, 2.0, 2.0], atol=1e-6)
    assert Fixed.of(4, 1.0, 3.0) == Fixed(4, 0.2, 0) and Fixed.of(4, 0.0, 0.0) == Fixed(4, 1.0, 0)
    with pytest.raises(UserError, match=r'Fixed has a scale of 0\.0 and a zero point of 0; they must be above 0'):
        Fixed(4, 0.0, 0)


def test_in_bfloat16_too_factors_are_tried_without_rounding(originals):
    def low(model):
        model.dtype = jnp.dtype('bfloat16')
        return model

    loaded = load_run(originals / 'run').altered(low).altered(apart)
    model, batches = loaded.model(), rows_of(loaded.setup, 'train', 2)
    _, behind = listened(loaded, model, batches)
    assert behind
    for norm, names in behind:
        assert _unchanged(loaded, model, norm, [named_maps(model)[name] for name in names], batches[0])


def test_a_run_of_fixed_ranges(originals, tmp_path, capsys):
    run, made = originals / 'run', tmp_path / 'made'
    loaded = load_run(run)
    quantization, moved = Calibration(8, rows=3).found(loaded)
    batch = {name: array[None] for name, array in loaded.setup.task.source('valid', 16)[0].items()}
    before, after = (float(each.setup.measure(each.variables, batch)['loss'].total) for each in (loaded, moved))
    np.testing.assert_allclose(after, before, rtol=1e-5)
    # Behind the norm of the channel mixer every channel is as wide, on the rows measured.
    norm, own = moved.model().stack.blocks[0].mlp_norm.scale, loaded.model().stack.blocks[0].mlp_norm.scale
    assert not np.allclose(norm[...], own[...], rtol=0.01)
    asked = ['quantize', f'--workdir={run}', f'--out={made}', '--compilation_cache=', '--format=json']
    assert main([*asked, '--inputs=fixed8', '--rows=3', '--weights=int8']) == 0
    config = json.loads((made / 'config.json').read_text())['quantization']
    assert [each['zero'] for each in config['inputs']] == [each.zero for each in quantization.inputs]
    rounded = load_run(made)
    # A run like any other, near to what it was made from.
    last = float(rounded.setup.measure(rounded.variables, batch)['loss'].total)
    assert 0 < abs(last - before) < 0.02 * before
    ours = rounded.model().stack.blocks[0].mlp_norm.scale
    np.testing.assert_array_equal(ours[...], norm[...])
    assert all(isinstance(each, jax.Array) for each in jax.tree.leaves(rounded.variables))
