"""What takes the place of a trained softmax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.blocks.block import Block
from attnlab.context import Context
from attnlab.convert.substitution import Rounding, replacement, substituted
from attnlab.errors import UserError
from attnlab.functional.dense import ScoreRows
from attnlab.mixers.softmax.attention import Attention
from attnlab.models.model import Model
from attnlab.models.stack import LinearStack, Stack
from attnlab.models.weight_maps import replaced
from attnlab.nn.positions import Rope
from attnlab.nn.sinks import LearnedSink
from attnlab.quantize.softmax import QuantizedSoftmax, quantized_weights
from attnlab.runs.loading import Loaded
from attnlab.train.rows import places_of
from attnlab.train.setup import prepare
from configs.recall import get_config
from pallas_kernels import AdaptiveSoftmax, ScalableSoftmax, Softmax, Softpick


def make(*mixers: dict, kind: type[Stack] = Stack):
    """A model of three layers of attention with these parts in turn."""
    blocks = tuple(
        functools.partial(Block, mixer=functools.partial(Attention, heads=2, position=Rope(), **parts))
        for parts in mixers
    )
    stack = functools.partial(kind, depth=3, blocks=blocks)
    return lambda rngs: Model(7, dim=8, stack=stack, dtype=jnp.float32, rngs=rngs)


def maps(model) -> list[type]:
    return [type(layer.mixer.weights) for layer in model.stack.layers()]


@pytest.mark.parametrize(
    ('name', 'expected'),
    [('adaptive_temperature', AdaptiveSoftmax), ('ssmax', ScalableSoftmax), ('quantized_8', QuantizedSoftmax)],
)
def test_every_softmax_is_replaced_and_nothing_else(name, expected):
    model = replaced(make({}, {'weights': Softpick()})(nnx.Rngs(0)), replacement(name, 64))
    assert maps(model) == [expected, Softpick, expected]
    tokens = jnp.arange(6, dtype=jnp.int32)[None]
    hidden, _ = jax.jit(lambda model: model.hidden(tokens, Context.full(1, 6)))(model)
    assert bool(jnp.isfinite(hidden).all())


def test_layers_that_are_linear_in_their_place_take_a_map_without_variables_alone():
    made, tokens = make({}, kind=LinearStack)(nnx.Rngs(0)), jnp.arange(6, dtype=jnp.int32)[None]
    apart = nnx.clone(made)
    apart.stack = made.stack.apart(3)
    found, expected = (replaced(each, replacement('ssmax', 64)) for each in (made, apart))
    assert maps(found) == [ScalableSoftmax] * 3
    np.testing.assert_allclose(
        *(each.hidden(tokens, Context.full(1, 6))[0] for each in (found, expected)), rtol=1e-5, atol=1e-6
    )
    with pytest.raises(UserError, match='layers of a LinearStack share two sets of parameters'):
        replaced(make({}, kind=LinearStack)(nnx.Rngs(0)), replacement('quantized_8', 64))


def test_scores_of_ssmax_are_as_they_were_on_average_over_the_length():
    scale = replacement('ssmax', 64).scale
    np.testing.assert_allclose(scale * np.mean(np.log(np.arange(1, 65))), 1, rtol=1e-6)


def test_names_of_rounding_say_how_many_bits_and_whether_corrected():
    assert replacement('quantized_8', 64) == Rounding(bits=8, corrected=False)
    assert replacement('quantized_12_corrected', 64) == Rounding(bits=12, corrected=True)


def test_weights_of_few_bits_by_hand():
    weights = jnp.array([0.7, 0.2, 0.07, 0.03])
    np.testing.assert_allclose(quantized_weights(weights, 2), [2 / 3, 1 / 3, 0, 0], atol=1e-6)


def test_what_rounding_takes_is_given_back_to_visible_keys_alone():
    part = QuantizedSoftmax(heads=1, bits=2, rngs=nnx.Rngs(0))
    part.correction[...] = jnp.array([0.1])
    scores = jnp.log(jnp.array([0.7, 0.2, 0.1, 5.0]))[None, None, None]
    visible = jnp.array([True, True, True, False])[None, None, None]
    np.testing.assert_allclose(
        part(ScoreRows(scores, visible, scores, jnp.array([2])), None)[0, 0, 0],
        [2 / 3 + 0.1, 1 / 3 + 0.1, 0.1, 0],
        atol=1e-6,
    )


@pytest.mark.parametrize(
    ('mixers', 'name', 'message'),
    [
        (
            ({},),
            'softmx',
            "there is no attention 'softmx'; choose from adaptive_temperature, ssmax, quantized_BITS, or",
        ),
        (({},), 'quantized_0', 'a softmax is rounded to 0 bits; they must be from 1 to 16'),
        (({'weights': Softpick()},), 'ssmax', 'no layer of this run is attention with a plain softmax'),
        (({'sink': LearnedSink},), 'ssmax', 'has a learned sink or a forget gate'),
    ],
)
def test_what_cannot_be_replaced(mixers, name, message):
    with pytest.raises(UserError, match=message):
        replaced(make(*mixers)(nnx.Rngs(0)), replacement(name, 64))


def test_a_run_is_corrected_by_what_rounding_takes_from_its_weights():
    setup = prepare(get_config('task=mqar,zoo=mha'))
    loaded = Loaded(setup, setup.initialize().params, 5)
    corrected = substituted(loaded, 'quantized_3_corrected', rows=2)
    assert corrected.step == 5 and maps(corrected.model()) == [QuantizedSoftmax, QuantizedSoftmax]
    assert maps(loaded.model()) == [Softmax, Softmax]

    @jax.jit
    def masses(model, tokens, last):
        """The mean weight of a visible key in the first layer, for every head, up to the last token that is asked."""
        block = next(iter(model.stack.layers()))
        x = block.mixer_norm(model.embedding(tokens, model.dtype))
        weights, seen = block.mixer.read_weights(x, Context.full(*tokens.shape))
        seen &= (jnp.arange(tokens.shape[1])[None] <= last[:, None])[:, :, None]
        return jnp.sum(jnp.where(seen[:, None], weights, 0), axis=(0, 2, 3)) / jnp.sum(seen)

    source = setup.task.source('train', setup.length)
    examples = [source[place] for place in places_of(setup, 'train', 2)]
    tokens = jnp.stack([one['tokens'] for one in examples])
    last = jnp.stack([one['at'].max() for one in examples])
    # Later queries change no loss, and are not measured.
    assert last.min() < tokens.shape[1] - 4
    before, after = (masses(run.model(), tokens, last) for run in (loaded, corrected))
    np.testing.assert_allclose(after, before, rtol=1e-4)
    added = next(iter(corrected.model().stack.layers())).mixer.weights.correction[...]
    assert (added > 0.1 * before).all()


def test_the_plain_softmax_is_told_apart_from_one_with_a_cap():
    model = make({'weights': Softmax(soft_cap=5.0)}, {})(nnx.Rngs(0))
    replaced(model, replacement('ssmax', 64))
    assert maps(model) == [Softmax, ScalableSoftmax, Softmax]
