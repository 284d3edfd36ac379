"""Heads and parts of Mamba taken away: nothing where nothing is named, and what is known beforehand elsewhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.analysis.interventions import hidden_with, values_at
from attnlab.analysis.parts import PARTS, ablated, heads_of, part_knocked_out, propagated, take, without_head
from attnlab.blocks.block import Block
from attnlab.config import build, spec
from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.models.model import Model
from attnlab.models.stack import Stack
from attnlab.nn.mlps import GatedMLP
from attnlab.testing.noise import noise
from attnlab.zoo import ZOO

TOKENS = jnp.asarray([[3, 1, 4, 1, 5, 2]])
CTX = Context.full(1, 6)


def made(name, depth=2, vocab=7, **changes):
    mixer = ZOO[name].spec.copy_and_resolve_references()
    mixer.update(changes)
    blocks = (spec(Block, mixer=mixer, mlp=spec(GatedMLP)),)
    return build(spec(Model, dim=8, stack=spec(Stack, depth=depth, blocks=blocks)))(
        vocab, dtype='float32', rngs=nnx.Rngs(0)
    )


@pytest.fixture(scope='module')
def attention():
    return made('nope', heads=2)


@pytest.fixture(scope='module')
def mamba():
    return made('mamba', depth=1)


def test_a_head_is_its_channels(attention):
    assert heads_of(attention) == {0: 2, 1: 2}
    plain = hidden_with(attention, TOKENS, CTX, {})
    found = values_at(attention, TOKENS, CTX, ['layers[0].mixer.hidden', 'layers[0].mixer.output'])
    layer = next(iter(attention.stack.layers()))
    np.testing.assert_allclose(
        found['layers[0].mixer.output'], layer.mixer.output(found['layers[0].mixer.hidden']), rtol=1e-5
    )

    # Without both heads the mixer gives nothing; scores are by layer and head.
    def both(x):
        return without_head(2, 0)(without_head(2, 1)(x))

    nothing = hidden_with(attention, TOKENS, CTX, {'layers[0].mixer.output': jnp.zeros_like})
    np.testing.assert_allclose(
        hidden_with(attention, TOKENS, CTX, {'layers[0].mixer.hidden': both}), nothing, atol=1e-6
    )
    scores = ablated(attention, TOKENS, CTX, lambda hidden: jnp.max(jnp.abs(hidden - plain)))
    assert set(scores) == {(0, 0), (0, 1), (1, 0), (1, 1)} and all(float(score) > 1e-3 for score in scores.values())
    with pytest.raises(UserError, match='head is 2; the mixer has heads 0 to 1'):
        without_head(2, 2)


@pytest.mark.parametrize('part', PARTS)
def test_parts_of_mamba(mamba, part):
    none, source, later = jnp.zeros(6, bool), jnp.arange(6) == 1, jnp.arange(6) > 1

    @jax.jit
    def run(tokens, sources, targets):
        return part_knocked_out(mamba, tokens, CTX, part, (0,), sources=sources, targets=targets)

    plain = jax.jit(lambda tokens: mamba.hidden(tokens, CTX)[0])
    np.testing.assert_array_equal(run(TOKENS, none, none), plain(TOKENS))
    other = TOKENS.at[0, 1].set(6)
    cut, changed = run(TOKENS, source, later), run(other, source, later)
    moved = np.abs(cut - changed).max(-1)[0]
    # The convolution is four tokens wide: of token 1 the last token hears by the state alone.
    if part in ('B', 'C', 'state'):
        assert float(jnp.max(jnp.abs(cut - plain(TOKENS)))) > 1e-5
    if part in ('C',):
        assert moved[5] == 0 and moved[2] > 0
    assert moved[0] == 0 and moved[1] > 1e-3


def test_convolution_and_state_together_are_all_there_is(mamba):
    # The first token is the source: of one behind others it stays known how far it let these fade.
    source, later = jnp.arange(6) == 0, jnp.arange(6) > 0
    layer = next(iter(mamba.stack.layers()))
    x = values_at(mamba, TOKENS, CTX, ['layers[0].mixer.input'])['layers[0].mixer.input']
    for part in ('conv', 'state'):
        take(layer.mixer, part, source, later)
    first, _ = layer.mixer(x, CTX)
    second, _ = layer.mixer(x.at[0, 0].add(1.0), CTX)
    np.testing.assert_array_equal(first[:, 1:], second[:, 1:])
    assert float(jnp.max(jnp.abs(first[:, 0] - second[:, 0]))) > 1e-3


def test_what_passes_a_source_fades_as_before():
    layer = next(iter(made('mamba', depth=1).stack.layers()))
    x = 3 * noise(1, 6, layer.mixer.D[...].size)

    def carried(x):
        return (layer.mixer.scan(x, None, None)[0] - layer.mixer.scan(x.at[:, 0].set(0), None, None)[0])[0, 3]

    before, whole = carried(x), layer.mixer.scan(x, None, None)[0]
    take(layer.mixer, 'state', jnp.arange(6) == 1, jnp.arange(6) > 1)
    np.testing.assert_allclose(carried(x), before, rtol=1e-4, atol=1e-6)
    assert float(jnp.max(jnp.abs(before))) > 1e-3
    assert float(jnp.max(jnp.abs(layer.mixer.scan(x, None, None)[0] - whole)[0, 2])) > 1e-3


def test_other_layers_and_parts_are_refused(attention, mamba):
    masks = {'sources': jnp.zeros(6, bool), 'targets': jnp.zeros(6, bool)}
    with pytest.raises(UserError, match='layer 0 has no selective state-space model'):
        part_knocked_out(attention, TOKENS, CTX, 'B', (0,), **masks)
    with pytest.raises(UserError, match="there is no part 'D'"):
        part_knocked_out(mamba, TOKENS, CTX, 'D', (0,), **masks)


def test_contributions_add_up_and_directions_are_derivatives(attention):
    observable = jnp.zeros(7).at[2].set(1.0).at[5].set(-1.0)
    found, directions = propagated(attention, TOKENS, CTX, observable, 5)
    logits = attention.logits(attention.hidden(TOKENS, CTX)[0][:, 5])
    np.testing.assert_allclose(sum(found.values()), logits[:, 2] - logits[:, 5], rtol=1e-4, atol=1e-5)
    assert len(found) == 6
    np.testing.assert_array_equal(found['head'], 0)
    model = made('nope', depth=1, heads=2)
    given, bias = model.logits, jnp.arange(7.0)
    model.logits = lambda hidden: given(hidden) + bias[None]
    biased, _ = propagated(model, TOKENS, CTX, observable, 5)
    np.testing.assert_allclose(biased['head'], -3)
    model.logits = lambda hidden: jnp.tanh(3 * given(hidden))
    with pytest.raises(UserError, match='what branches add does not add up'):
        propagated(model, TOKENS, CTX, observable, 5)
    unsure, _ = jax.jit(lambda tokens: propagated(model, tokens, CTX, observable, 5))(TOKENS)
    assert np.isnan(unsure['embedding']).all()
    place, step = 'layers[0].mixer.output', 1e-2

    def value(sign):
        def change(x):
            return x.at[0, 3, 4].add(sign * step)

        return observable @ attention.logits(hidden_with(attention, TOKENS, CTX, {place: change})[0, 5])

    slope = (value(1) - value(-1)) / (2 * step)
    np.testing.assert_allclose(directions[place][0, 3, 4], slope, rtol=1e-2, atol=1e-4)
