"""Heads taken away, and observables propagated."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.analysis.interventions import hidden_with, values_at
from attnlab.analysis.parts import ablated, heads_of, propagated, without_head
from attnlab.blocks.block import Block
from attnlab.config import build, spec
from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.models.model import Model
from attnlab.models.stack import Stack
from attnlab.nn.mlps import GatedMLP
from attnlab.nn.norms import DynamicTanh, EvoNormS0, LayerNorm, NoNorm, OffsetRMSNorm, RMSNorm, SimpleRMSNorm
from attnlab.testing.noise import perturbed
from attnlab.zoo import ZOO

TOKENS = jnp.asarray([[3, 1, 4, 1, 5, 2]])
CTX = Context.full(1, 6)


def made(name, depth=2, vocab=7, norm=RMSNorm, **changes):
    mixer = ZOO[name].spec.copy_and_resolve_references()
    mixer.update(changes)
    blocks = (spec(Block, mixer=mixer, mlp=spec(GatedMLP), norm=spec(norm)),)
    return build(spec(Model, dim=8, norm=spec(norm), stack=spec(Stack, depth=depth, blocks=blocks)))(
        vocab, dtype='float32', rngs=nnx.Rngs(0)
    )


@pytest.fixture(scope='module')
def attention():
    return made('nope', heads=2)


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


@pytest.mark.parametrize('norm', [RMSNorm, OffsetRMSNorm, SimpleRMSNorm, NoNorm, LayerNorm])
def test_contributions_through_norms_are_those_with_their_statistics_held(norm):
    model = perturbed(made('nope', heads=2, norm=norm), 0.3)
    observable = jnp.zeros(7).at[2].set(1.0).at[5].set(-1.0)
    found, _ = propagated(model, TOKENS, CTX, observable, 5)
    names = [name for name in found if name != 'head']
    seen = values_at(model, TOKENS, CTX, [*names, 'layers[1].residual'])
    x = np.asarray(seen['layers[1].residual'][0, 5], np.float64)
    centred = x - x.mean() if norm is LayerNorm else x
    size = 1.0 if norm is NoNorm else np.sqrt(np.mean(centred**2) + model.norm.eps)
    gain = {LayerNorm: 'scale', RMSNorm: 'scale', OffsetRMSNorm: 'offset'}.get(norm)
    gain = (norm is OffsetRMSNorm) + np.asarray(getattr(model.norm, gain)[...]) if gain else 1.0
    to = np.asarray(model.head.weight[...][2] - model.head.weight[...][5])
    for name in names:
        value = np.asarray(seen[name][0, 5], np.float64)
        value = value - value.mean() if norm is LayerNorm else value
        np.testing.assert_allclose(found[name][0], (value / size * gain) @ to, rtol=1e-3, atol=1e-5)
    given = np.asarray(model.norm.bias[...]) @ to if norm is LayerNorm else 0.0
    np.testing.assert_allclose(found['head'][0], given, rtol=1e-4, atol=1e-6)
    logits = model.logits(model.hidden(TOKENS, CTX)[0][:, 5])
    np.testing.assert_allclose(sum(found.values()), logits[:, 2] - logits[:, 5], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('norm', [DynamicTanh, EvoNormS0])
def test_contributions_do_not_add_up_through_a_curve(norm):
    model = made('nope', depth=1, heads=2, norm=norm)
    with pytest.raises(UserError, match=f'the last norm is {norm.__name__}, .* what branches add does not add up'):
        jax.jit(lambda tokens: propagated(model, tokens, CTX, jnp.ones(7), 5))(TOKENS)
