"""Softmaxes of few bits in a run: constants by numpy, mass given back, and what the command says."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.cli import main
from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.mixers.softmax.attention import Attention
from attnlab.models.predictor import one_stack
from attnlab.quantize.layers import Quantization
from attnlab.quantize.softmax import Correction, QuantizedSoftmax, _Lost, _Told
from attnlab.runs.loading import load_run
from attnlab.runs.record import read_record
from attnlab.tasks.task import context
from attnlab.train.rows import rows_of
from tests.bad_inputs.conftest import LANGUAGE, SMALL, originals

__all__ = ['originals']


@pytest.fixture(scope='module')
def attention(originals, tmp_path_factory):
    """A run with two layers of attention."""
    run = tmp_path_factory.mktemp('attention') / 'run'
    config = f'--config={LANGUAGE}:zoo=mha,data={originals / "text.txt"}'
    small = [each for each in SMALL if 'depth' not in each]
    depth = ['--config.model.stack.depth=2', '--config.model.stack.blocks[0].mixer.heads=2']
    assert main(['train', config, *small, *depth, f'--workdir={run}']) == 0
    return run


def mixers(loaded):
    return [block.mixer for block in one_stack(loaded.model()).layers()]


def first_weights(loaded, rows):
    """The weights of the first layer of attention on rows of training, and which keys were seen."""
    model = loaded.model()
    block = next(iter(one_stack(model).layers()))
    found = []
    for batch in rows_of(loaded.setup, 'train', rows):
        batch = jax.tree.map(jnp.asarray, batch)
        ctx = model.context(context(batch), batch['tokens'])
        x = block.mixer_norm(model.embed(batch['tokens'], ctx))
        weights, seen = jax.jit(block.mixer.read_weights)(x, ctx)
        found.append((np.asarray(weights, np.float64)[0], np.asarray(seen)[0]))
    return found


def test_a_run_of_softmaxes_of_few_bits(attention, tmp_path, capsys):
    made = tmp_path / 'made'
    asked = ['quantize', f'--workdir={attention}', f'--out={made}', '--compilation_cache=', '--format=json']
    assert main([*asked, '--softmax=3', '--rows=3', '--weights=int8']) == 0
    record, config = read_record(made), json.loads((made / 'config.json').read_text())
    assert record.facts['quantized']['softmax'] == {'bits': 3, 'rows': 3} and config['quantization']['softmax'] == 3
    loaded, whole = load_run(made), load_run(attention)
    layers = mixers(loaded)
    assert len(layers) == 2 and all(isinstance(each.weights, QuantizedSoftmax) for each in layers)
    # What is added is the mean, over the keys that queries see on these rows, of what rounding takes.
    rows = first_weights(whole, 3)
    lost = sum(np.where(seen, weights - np.round(weights * 7) / 7, 0).sum((1, 2)) for weights, seen in rows)
    added = np.asarray(layers[0].weights.correction[...])
    assert added.shape == (2,)
    np.testing.assert_allclose(added, lost / sum(seen.sum() for _, seen in rows), rtol=1e-4, atol=1e-6)
    # So that rows have their mass again in the mean, which rounding alone has taken.
    plain = whole.altered(Quantization(softmax=3))
    masses = [np.mean([weights.sum(-1).mean() for weights, _ in first_weights(each, 3)]) for each in (plain, loaded)]
    assert masses[0] < 0.95 and abs(masses[1] - 1) < 0.02
    # The deeper layer has one of its own, of what it reads in full precision.
    other = mixers(Correction(3, 3).found(whole, plain))[1].weights.correction[...]
    np.testing.assert_array_equal(layers[1].weights.correction[...], other)
    assert np.abs(other - added).max() > 1e-6
    # It decodes as it is evaluated.
    assert main(['generate', f'--workdir={made}', '--tokens=2', '--compilation_cache=']) == 0
    reported = json.loads((made / 'metrics.jsonl').read_text())
    assert main(['eval', f'--workdir={made}', '--compilation_cache=', '--multiples=1', '--tokens=64']) == 0
    assert np.isfinite(reported['valid/loss'])


@pytest.mark.parametrize('causal', [True, False])
def test_padding_is_not_measured(causal):
    mixer = Attention(8, heads=2, causal=causal, rngs=nnx.Rngs(0))
    mixer.weights = nnx.data(_Told(heads=2, bits=4, rngs=nnx.Rngs(0)))
    graphdef, lost, rest = nnx.split(mixer, _Lost, ...)

    def sums(length):
        """What is told of 6 tokens of a row of `length`."""
        segments = jnp.asarray(np.arange(length) < 6, jnp.int32)[None]
        x = 3 * jax.random.normal(jax.random.key(0), (1, 40, 8))[:, :length]
        ctx = Context(jnp.arange(length, dtype=jnp.int32)[None], segments)

        def loss(lost):
            y, _ = nnx.merge(graphdef, lost, rest)(x, ctx)
            return jnp.sum(jnp.where(segments[..., None] > 0, y, 0) ** 2)

        (found,) = jax.tree.leaves(jax.grad(loss)(lost))
        return found

    alone = sums(6)
    assert np.abs(alone[0]).max() > 1e-3 and (alone[1] == (21 if causal else 36)).all()
    np.testing.assert_allclose(sums(40), alone, atol=1e-5)


def test_softmax_alone_and_with_inputs_of_fixed_ranges(attention, tmp_path):
    for place, flags in enumerate([(), ('--inputs=fixed8',), ('--inputs=fixede2m1', '--state=kivi4')]):
        made = tmp_path / str(place)
        asked = ['quantize', f'--workdir={attention}', f'--out={made}', '--compilation_cache=', '--softmax=8']
        assert main([*asked, '--rows=2', *flags]) == 0
        added = [np.asarray(module.weights.correction[...]) for module in map(inner, mixers(load_run(made)))]
        assert len(added) == 2 and all(np.isfinite(each).all() and each.any() for each in added)


def inner(mixer):
    """The attention that a stored cache wraps, or the mixer itself."""
    return getattr(mixer, 'mixer', mixer)


def test_what_the_command_says(originals, attention, tmp_path, capsys):
    asked = ['quantize', f'--out={tmp_path}/made', '--compilation_cache=']
    for flags, sentence in (
        ([f'--workdir={originals / "run"}', '--softmax=8'], 'no layer of this run is attention with a plain softmax'),
        ([f'--workdir={attention}', '--softmax=17'], 'is not an integer in the range'),
        (
            [f'--workdir={attention}', '--weights=int4', '--rows=2'],
            '--rows is for --budget, --inputs=fixed8, --softmax',
        ),
        ([f'--workdir={attention}', '--softmax=8', '--rows=1000000'], 'rows is 1000000; the train split has'),
        ([f'--workdir={attention}', '--each', '--weights=int4', '--softmax=8'], '--softmax does not go with --each'),
    ):
        assert main([*asked, *flags]) == 2
        assert sentence in ' '.join(capsys.readouterr().err.split()), flags
    with pytest.raises(UserError, match='a softmax is rounded to 17 bits; they must be from 1 to 16'):
        Quantization(softmax=17)
    with pytest.raises(UserError, match='rows of Correction is 0; '):
        Correction(8, 0)
