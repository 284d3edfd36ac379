"""Layers that mix the values of the first layer into theirs, looked into, cut and stored in few bits."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.analysis.cuts import Cut
from attnlab.analysis.interventions import hidden_with, values_at
from attnlab.analysis.lens import residuals
from attnlab.analysis.memory import calls, carried
from attnlab.blocks.block import Block
from attnlab.config import build, spec
from attnlab.context import Context
from attnlab.mixers.linear.rwkv7 import RWKV7
from attnlab.models.model import Model
from attnlab.models.stack import Stack
from attnlab.quantize.formats import Symmetric
from attnlab.quantize.layers import Quantization

TOKENS = jnp.asarray([[3, 1, 4, 1, 5, 2, 6, 0]])
LENGTH = TOKENS.shape[1]
CTX = Context.full(1, LENGTH)


@pytest.fixture(scope='module')
def model():
    mixer = spec(RWKV7, heads=2, rank=2, gate_rank=2, value_residual=True, value_rank=2)
    stack = spec(Stack, depth=3, blocks=(spec(Block, mixer=mixer),))
    return build(spec(Model, dim=16, stack=stack))(7, dtype='float32', rngs=nnx.Rngs(0))


def of(model, function, *rest):
    """What a compiled function of the model gives."""
    graphdef, variables = nnx.split(model)
    return jax.jit(lambda variables, *rest: function(nnx.merge(graphdef, variables), *rest))(variables, *rest)


@pytest.fixture(scope='module')
def hidden(model):
    return of(model, lambda model: model.hidden(TOKENS, CTX)[0])


def test_what_is_seen_after_the_last_layer_is_what_the_model_has(model, hidden):
    seen = of(model, lambda model: model.norm(residuals(model, TOKENS, CTX)[-1]))
    np.testing.assert_allclose(seen, hidden, rtol=1e-5, atol=1e-6)


def test_mixers_are_called_with_what_they_read_and_their_values_follow_from_it(model):
    inputs = [f'layers[{layer}].mixer.input' for layer in range(3)]

    def seen(model):
        found = calls(model, TOKENS, CTX)
        outputs = [layer.mixer(call.x, call.ctx)[0] for layer, call in zip(model.stack.layers(), found, strict=True)]
        return [call.x for call in found], outputs, found[0].ctx.first_values, found[1].ctx.first_values

    read, outputs, first, told = of(model, seen)
    assert first is None and told is not None
    places = [*inputs, *(place.replace('input', 'output') for place in inputs)]
    expected = of(model, lambda model: values_at(model, TOKENS, CTX, places))
    for layer, place in enumerate(inputs):
        np.testing.assert_allclose(read[layer], expected[place], rtol=1e-5, atol=1e-6)
        output = expected[place.replace('input', 'output')]
        np.testing.assert_allclose(outputs[layer], output, rtol=1e-5, atol=1e-6)


def test_states_are_followed_token_by_token_as_they_are(model):
    def norms(model):
        call, layer = calls(model, TOKENS, CTX)[1], list(model.stack.layers())[1]
        state = layer.mixer.init_state(1, LENGTH, jnp.float32)
        _, state = layer.mixer(call.x, call.ctx, state)
        return carried(layer.mixer, call.x, call.ctx, jax.random.key(0)), jnp.linalg.norm(state.memory[0], axis=(1, 2))

    followed, expected = of(model, norms)
    at_end = [each.norms[0, -1] for name, each in followed.items() if 'memory' in name]
    assert len(at_end) == 1 and at_end[0].shape == expected.shape
    np.testing.assert_allclose(at_end[0], expected, rtol=1e-4)


@pytest.mark.parametrize('layer', range(3))
def test_a_cut_of_nothing_and_a_place_that_is_noted_change_nothing(model, hidden, layer):
    nothing = jnp.zeros(LENGTH, bool)
    changes = {f'layers[{layer}].mixer': Cut('inputs', nothing, nothing)}
    np.testing.assert_array_equal(
        of(model, lambda model: hidden_with(model, TOKENS, CTX, changes)),
        of(model, lambda model: hidden_with(model, TOKENS, CTX, {})),
    )
    place = f'layers[{layer}].mixer.hidden'
    assert of(model, lambda model: values_at(model, TOKENS, CTX, [place]))[place].shape == (1, LENGTH, 16)


@pytest.mark.parametrize('layer', range(3))
def test_a_cut_takes_first_values_away_too(model, layer):
    """A mixer that reads nothing of a token gives what it gives where that token is any other."""
    sources, targets = jnp.arange(LENGTH) == 2, jnp.arange(LENGTH) > 3
    here = sources[None, :, None]

    def output(model, tokens):
        cut = Cut('inputs', sources, targets)(list(model.stack.layers())[layer].mixer)
        # Of other tokens a mixer is told nothing else: their inputs and first values are those of one text.
        usual, own = (calls(model, each, CTX)[layer] for each in (TOKENS, tokens))
        ctx = usual.ctx
        if ctx.first_values is not None:
            values = jnp.where(here, own.ctx.first_values.values, ctx.first_values.values)
            ctx = dataclasses.replace(ctx, first_values=dataclasses.replace(ctx.first_values, values=values))
        return cut(jnp.where(here, own.x, usual.x), ctx)[0]

    found, other = (of(model, output, tokens) for tokens in (TOKENS, TOKENS.at[0, 2].set(0)))
    np.testing.assert_array_equal(found[:, 4:], other[:, 4:])
    assert not np.array_equal(found[:, 2:4], other[:, 2:4])


def test_a_state_of_sixteen_bits_is_the_model_to_what_they_round(model, hidden):
    stored = Quantization(state=Symmetric(16))(nnx.clone(model))
    found = of(stored, lambda model: model.hidden(TOKENS, CTX)[0])
    assert np.abs(found - hidden).max() < 1e-3

    def streamed(model):
        state, pieces = model.init_state(1, LENGTH), []
        for first, last in ((0, 3), (3, 4), (4, 8)):
            ctx = Context.full(1, last - first, start=first)
            piece, state = model.hidden(TOKENS[:, first:last], ctx, state)
            pieces.append(piece)
        return jnp.concatenate(pieces, axis=1)

    np.testing.assert_allclose(of(stored, streamed), found, rtol=1e-4, atol=1e-5)
