"""Interventions: those that do nothing change no bit, and others do what is known beforehand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.analysis.editing import Edit, Editor
from attnlab.analysis.interventions import causal_trace, hidden_with, last_map, places, values_at, windows
from attnlab.blocks.block import Block
from attnlab.config import build, spec
from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.models.model import Model
from attnlab.models.stack import Stack
from attnlab.nn.mlps import GatedMLP
from attnlab.nn.projections import Linear
from attnlab.testing.noise import noise, perturbed
from attnlab.zoo import ZOO
from tests.analysis.test_parts import made
from tests.test_contract import make

WITHOUT = {
    *('s4', 's4d', 's5', 's6', 'lru', 'slstm', 'mega', 'seqboat', 'uniattn', 'aero', 'base_conv', 's_mamba'),
    *('polarized', 'polarized_sequential', 'hymba', 'falcon_h1'),
}
"""Recipes of one mixer without one linear map whose output is its own: it goes on after that, or has several."""

TOKENS = jnp.asarray([[3, 1, 4, 1, 5, 2]])
CTX = Context.full(1, 6)


@pytest.fixture(scope='module')
def model():
    """Two layers: a recurrence and attention, each with a channel mixer."""
    mixers = (ZOO['mingru'].spec, ZOO['nope'].spec.copy_and_resolve_references())
    mixers[1].heads = 2
    blocks = tuple(spec(Block, mixer=mixer, mlp=spec(GatedMLP)) for mixer in mixers)
    return build(spec(Model, dim=8, stack=spec(Stack, depth=2, blocks=blocks)))(7, dtype='float32', rngs=nnx.Rngs(0))


def compiled(model, changes):
    return jax.jit(lambda tokens: hidden_with(model, tokens, CTX, changes))(TOKENS)


def test_interventions_that_do_nothing_change_no_bit(model):
    plain = jax.jit(lambda tokens: model.hidden(tokens, CTX)[0])(TOKENS)
    known = places(model)
    assert known[:2] == ['embedding', 'layers[0].mixer.input'] and known[-1] == 'layers[1].residual'
    assert len(known) == 15 and 'layers[1].mlp.hidden' in known
    np.testing.assert_array_equal(compiled(model, {}), plain)
    np.testing.assert_array_equal(compiled(model, {place: lambda x: x for place in known}), plain)
    mixers = {f'layers[{layer}].mixer': lambda mixer: mixer for layer in (0, 1)}
    np.testing.assert_array_equal(compiled(model, mixers), plain)
    np.testing.assert_array_equal(jax.jit(lambda tokens: model.hidden(tokens, CTX)[0])(TOKENS), plain)
    with pytest.raises(UserError, match=r"has no place 'layers\[0\].mixer.outptu'; did you mean"):
        hidden_with(model, TOKENS, CTX, {'layers[0].mixer.outptu': jnp.zeros_like})
    with pytest.raises(UserError, match=r"has no place 'layers\[0\].mixer'"):
        values_at(model, TOKENS, CTX, ['layers[0].mixer'])


def test_without_branches_the_embedding_is_what_is_left(model):
    silent = {place: jnp.zeros_like for place in places(model) if place.endswith('output')}
    expected = model.norm(model.embed(TOKENS, CTX))
    np.testing.assert_allclose(hidden_with(model, TOKENS, CTX, silent), expected, atol=1e-6)
    found = values_at(model, TOKENS, CTX, ['embedding', 'layers[1].residual'])
    np.testing.assert_array_equal(found['embedding'], model.embed(TOKENS, CTX))
    np.testing.assert_allclose(model.norm(found['layers[1].residual']), model.hidden(TOKENS, CTX)[0], atol=1e-6)


def test_windows_have_as_many_layers_as_they_say():
    assert windows(4, 1).astype(int).tolist() == np.eye(4, dtype=int).tolist()
    assert windows(4, 2).astype(int).tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]
    assert windows(4, 3).sum(axis=1).tolist() == [2, 3, 3, 2]


def test_clean_values_bring_a_score_back(model):
    embedded = model.embed(TOKENS, CTX)
    corrupted = embedded.at[0, 1].add(3.0)

    def score(hidden):
        return jnp.sum(hidden[0, -1] * jnp.arange(8.0))

    effects, clean, broken = jax.jit(lambda: causal_trace(model, TOKENS, CTX, corrupted, score))()
    np.testing.assert_allclose(clean, score(model.hidden(TOKENS, CTX)[0]), rtol=1e-4)
    assert abs(float(clean - broken)) > 1e-3
    # After the last layer the last token is all that the score reads, and no other token matters any more.
    np.testing.assert_allclose(effects[1, -1], clean, rtol=1e-4)
    np.testing.assert_allclose(effects[1, :-1], broken, rtol=1e-4)
    # Tokens before the corrupted one are clean anyway.
    np.testing.assert_allclose(effects[0, 0], broken, rtol=1e-4)


@pytest.mark.parametrize('name', ['s4', 's5', 'mega', 'seqboat', 'aero'])
def test_a_mixer_that_goes_on_after_its_map_has_no_last_one(name):
    assert last_map(make(ZOO[name], 16, rngs=nnx.Rngs(0))) is None
    if name == 's4':
        found = places(made(name, depth=1))
        assert 'layers[0].mixer.output' in found and 'layers[0].mixer.hidden' not in found
        with pytest.raises(UserError, match=r'layers\[0\].mixer has no one linear map'):
            Editor(made(name), Edit(layer=0, branch='mixer'), at=0, asked=1)


class Same(Linear):
    """In the place of a linear map, one that gives the same vector at every token."""

    def __init__(self, linear, given):
        self.axes, self.usual, self.given = linear.axes, linear.usual, nnx.data(given)

    def __call__(self, x):
        return jnp.broadcast_to(self.given.reshape((1,) * (x.ndim - 1) + (-1,)), (*x.shape[:-1], len(self.given)))


@pytest.mark.slow
@pytest.mark.parametrize('name', sorted(name for name, row in ZOO.items() if len(row.pattern) == 1))
def test_what_the_last_map_gives_is_what_the_mixer_gives(name):
    mixer = perturbed(make(ZOO[name], 64, rngs=nnx.Rngs(0)), 0.1)
    read = last_map(mixer)
    assert (read is None) == (name in WITHOUT)
    if read is None:
        return
    given = noise(read.map.weight[...].shape[-1], seed=1)
    setattr(read.module, read.name, Same(read.map, given))
    ctx = dataclasses.replace(Context.full(1, 16), grid=(4, 4) if ZOO[name].grid else None)
    found, _ = jax.jit(lambda x: mixer(x, ctx))(noise(1, 16, 64))
    np.testing.assert_array_equal(found, np.broadcast_to(given, found.shape))
