"""Training with few bits: gradients by hand, the packed run is the trained one, and steps follow the weights."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.blocks.block import Block
from attnlab.cli import main
from attnlab.errors import UserError
from attnlab.mixers.linear.attention import LinearAttention
from attnlab.models.model import Model
from attnlab.models.stack import LinearStack
from attnlab.nn.projections import Linear, fan_in_normal
from attnlab.quantize.formats import Affine, Symmetric
from attnlab.quantize.layers import QuantizedLinear
from attnlab.quantize.quartet import Quartet
from attnlab.quantize.training import Learned, Rounded, RoundedLinear, rounding_called
from attnlab.runs.loading import load_run
from attnlab.runs.record import read_record
from attnlab.train.fit import fit_to_weights
from tests.bad_inputs.conftest import LANGUAGE, SMALL, originals

__all__ = ['originals']


def drawn(weights, inputs=None):
    return RoundedLinear(Linear(6, 3, rngs=nnx.Rngs(0)), weights=weights, inputs=inputs)


def test_gradients_of_learned_steps_are_the_papers():
    map_ = drawn(Learned(3))
    weight, top = np.asarray(map_.weight[...]), 3
    step = 2 * np.abs(weight).mean(0) / np.sqrt(top)
    np.testing.assert_allclose(np.exp(map_.log_code_step[...]), step, rtol=1e-6)
    # Half as large, so that some weights are clipped.
    map_.log_code_step[...] = map_.log_code_step[...] - np.log(2.0)
    step = step / 2
    ratio = weight / step
    assert (np.abs(ratio) > top).any() and (np.abs(ratio) < top).any()
    np.testing.assert_allclose(map_.matrix(), np.clip(np.round(ratio), -top, top) * step, rtol=1e-6)
    upstream = np.random.default_rng(0).standard_normal(weight.shape).astype(np.float32)

    def value(weight, log_step):
        return jnp.sum(Learned(3).rounded(weight, log_step) * upstream)

    by_weight, by_log = jax.grad(value, argnums=(0, 1))(map_.weight[...], map_.log_code_step[...])
    np.testing.assert_array_equal(by_weight, np.where(np.abs(ratio) < top, upstream, 0))
    slope = np.where(np.abs(ratio) < top, np.round(ratio) - ratio, np.sign(ratio) * top)
    expected = (upstream * slope).sum(0) / np.sqrt(top * len(weight)) * step
    np.testing.assert_allclose(by_log, expected, rtol=1e-4)


def test_a_map_that_starts_at_zero_has_the_steps_of_a_usual_one():
    zero, usual = (
        Learned(4).first(Linear(400, 3, initializer=initializer, rngs=nnx.Rngs(0)).weight[...])
        for initializer in (nnx.initializers.zeros, fan_in_normal)
    )
    np.testing.assert_allclose(zero, usual, atol=0.1)
    # Of a stack too, and where one output of a map is zero.
    weight = jnp.ones((2, 400, 3)).at[1, :, 0].set(0)
    np.testing.assert_array_equal(Learned(4).first(weight)[1, 0], zero[0])


def test_gradients_of_formats_go_straight_through():
    map_, x = drawn(Symmetric(3), Affine(4)), jax.random.normal(jax.random.key(0), (5, 6))
    rounded = Affine(4).rounded(x)
    np.testing.assert_array_equal(map_(x), rounded @ Symmetric(3).rounded(map_.weight[...].T).T)
    graphdef, params = nnx.split(map_)
    by_params, by_x = jax.grad(lambda params, x: jnp.sum(nnx.merge(graphdef, params)(x)), argnums=(0, 1))(params, x)
    np.testing.assert_allclose(by_params['weight'][...], jnp.broadcast_to(rounded.sum(0)[:, None], (6, 3)), rtol=1e-5)
    np.testing.assert_allclose(by_x, jnp.broadcast_to(map_.matrix().sum(1), x.shape), rtol=1e-5)


@pytest.mark.parametrize('weights', [Learned(4), Symmetric(4, scope=4), None])
def test_a_packed_map_computes_the_same(weights):
    map_, x = drawn(weights, Affine(6)), jax.random.normal(jax.random.key(1), (5, 6))
    packed = map_.packed()
    assert isinstance(packed, QuantizedLinear)
    np.testing.assert_array_equal(packed.matrix(), map_.matrix())
    np.testing.assert_array_equal(packed(x), map_(x))


def test_what_a_config_may_say():
    assert rounding_called('quartet') == Quartet()
    assert rounding_called('learned4+affine8') == Rounded(Learned(4), Affine(8))
    assert rounding_called('+affine8') == Rounded(None, Affine(8))
    with pytest.raises(UserError, match="'cross8' rounds what maps read"):
        rounding_called('cross8')
    with pytest.raises(UserError, match="there is no format 'inn4'"):
        rounding_called('inn4')


def test_layers_on_a_line_begin_with_the_steps_of_their_base():
    block = functools.partial(Block, mixer=functools.partial(LinearAttention, heads=2), mlp=None)
    stack = functools.partial(LinearStack, depth=3, blocks=(block,))
    made = Rounded(Learned(4))(Model(10, dim=8, stack=stack, dtype=jnp.float32, rngs=nnx.Rngs(0)))
    map_ = made.stack.blocks[0].mixer.output
    for _ in range(2):
        expected = Learned(4).first(map_.weight[...][0])
        for layer in made.stack.layers():
            np.testing.assert_allclose(layer.mixer.output.log_code_step[...], expected, rtol=1e-6)
        map_.weight[...] = 3 * map_.weight[...]
        fit_to_weights(made)


def test_a_run_of_learned_steps(originals, tmp_path, capsys):
    first, made, packed = originals / 'run', tmp_path / 'made', tmp_path / 'packed'
    text = originals / 'text.txt'
    config = f'--config={LANGUAGE}:zoo=mingru,data={text},rounding=learned4+affine8,run={first}'
    assert main(['train', config, *SMALL, f'--workdir={made}']) == 0
    # It began with the weights of the other run, and with the steps of those.
    before, after = load_run(first).model(), load_run(made).model()
    old, new = (model.stack.blocks[0].mlp.gate for model in (before, after))
    assert 0 < float(jnp.max(jnp.abs(old.weight[...] - new.weight[...]))) < 0.02
    np.testing.assert_allclose(new.log_code_step[...], Learned(4).first(old.weight[...]), atol=0.02)
    capsys.readouterr()
    quantize = ['quantize', '--compilation_cache=', '--format=json']
    assert main([*quantize, f'--workdir={made}', f'--out={packed}']) == 0
    # What is stored computes what was trained, to the last digit of every number that was reported.
    numbers = json.loads((packed / 'metrics.jsonl').read_text())
    reported = [json.loads(line) for line in (made / 'metrics.jsonl').read_text().splitlines()][-1]
    assert numbers['valid/loss'] == pytest.approx(reported['valid/loss'], abs=1e-6)
    assert read_record(packed).weight_bytes < read_record(made).weight_bytes
    for run, flags, sentence in (
        (made, ['--weights=int4'], 'was trained with few bits and is packed as it is'),
        (first, [], 'nothing is quantized'),
    ):
        assert main([*quantize, f'--workdir={run}', f'--out={tmp_path}/no', *flags]) == 2
        assert sentence in capsys.readouterr().err
