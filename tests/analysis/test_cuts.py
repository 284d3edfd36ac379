"""Ways between tokens cut: nothing where nothing is named, and what is known beforehand elsewhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.analysis.cuts import PARTS, SCORED, Cut, cuts, knockouts, layers_with, parts_of
from attnlab.analysis.interventions import hidden_with, values_at
from attnlab.blocks.block import Block
from attnlab.context import Context
from attnlab.errors import UserError
from attnlab.functional.attend import look
from attnlab.functional.cache import Entries, empty_cache
from attnlab.functional.reach import Reach
from attnlab.testing.noise import noise, perturbed
from attnlab.zoo import ZOO
from tests.analysis.test_parts import CTX, TOKENS, made
from tests.test_contract import make

NOBODY, SOURCE, LATER = jnp.zeros(6, bool), jnp.arange(6) == 1, jnp.arange(6) > 1
SELECTIVE = {
    'mamba': {},
    'mamba2': {'head_dim': 8, 'state': 4},
    'log_linear_mamba2': {'head_dim': 8, 'state': 4},
    'mamba3': {'head_dim': 8, 'state': 8},
    'mamba3_mimo': {'head_dim': 8, 'state': 8, 'rank': 2},
}
"""Rows with states that tokens choose how to write and read, and sizes of theirs."""

CASES = [
    *(
        (name, part)
        for name in SELECTIVE
        for part in ('B', 'C', 'conv', 'state')
        if 'mamba3' not in name or part != 'conv'
    ),
    *(('nope', part) for part in ('inputs', 'scores')),
    *((name, 'inputs') for name in ('mingru', 'mamba2')),
]


def prepared(name):
    return made(name, depth=2, **{**SELECTIVE, 'nope': {'heads': 2}, 'mingru': {}}[name])


def cutting(model, part, layers=(0, 1)):
    return jax.jit(
        lambda tokens, sources, targets: hidden_with(model, tokens, CTX, cuts(model, part, layers, sources, targets))
    )


@pytest.mark.parametrize(('name', 'part'), CASES)
def test_empty_masks_change_no_bit_and_others_do_what_they_should(name, part):
    model = prepared(name)
    run = cutting(model, part)
    plain = jax.jit(lambda tokens: model.hidden(tokens, CTX)[0])(TOKENS)
    for sources, targets in ((NOBODY, NOBODY), (SOURCE, NOBODY), (NOBODY, LATER)):
        if (part == 'B' and sources is SOURCE) or (part == 'C' and targets is LATER):
            continue  # What tokens write, or read, has no other side.
        np.testing.assert_array_equal(run(TOKENS, sources, targets), plain)
    moved = np.abs(run(TOKENS, SOURCE, LATER) - plain).max(-1)[0]
    assert moved[0] == 0 and moved[2] > 1e-6
    # Masks of every row are the same as masks of the batch.
    np.testing.assert_array_equal(run(TOKENS, SOURCE[None], LATER[None]), run(TOKENS, SOURCE, LATER))


@pytest.mark.parametrize('name', ['mingru', 'nope', 'mamba2'])
def test_targets_know_nothing_of_inputs_that_are_cut(name):
    model = prepared(name)
    run, other = cutting(model, 'inputs'), TOKENS.at[0, 1].set(6)
    first, second = (run(tokens, SOURCE, LATER) for tokens in (TOKENS, other))
    np.testing.assert_array_equal(first[:, 2:], second[:, 2:])
    assert float(jnp.max(jnp.abs(first[:, 1] - second[:, 1]))) > 1e-3


def attended_by_hand(mixer, x, sources, targets):
    """Softmax attention in numpy, the scores of targets and sources minus infinity."""
    heads, (t, _) = mixer.heads, x[0].shape
    q, k, v = (
        np.asarray(x[0] @ each.weight[...], np.float64).reshape(t, heads, -1)
        for each in (mixer.query, mixer.key, mixer.value)
    )
    scores = np.einsum('thk,shk->hts', q, k) / np.sqrt(q.shape[-1])
    hidden = np.triu(np.ones((t, t), bool), 1) | (np.asarray(targets)[:, None] & np.asarray(sources)[None])
    scores = np.where(hidden[None], -np.inf, scores)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum('hts,shv->thv', weights, v).reshape(t, -1) @ np.asarray(mixer.output.weight[...], np.float64)


def test_scores_are_minus_infinity_before_the_softmax():
    mixer = make(ZOO['nope'], 8, rngs=nnx.Rngs(0), heads=2)
    x = 3 * noise(1, 6, 8)
    plain, _ = mixer(x, CTX)
    cut, _ = Cut('scores', SOURCE, LATER)(mixer)(x, CTX)
    by_hand = attended_by_hand(mixer, x, SOURCE, LATER)
    np.testing.assert_allclose(cut[0], by_hand, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(cut[:, :2], plain[:, :2])
    # Zeroed inputs leave the key of zeros a weight: another number, by another name.
    zeroed, _ = Cut('inputs', SOURCE, LATER)(mixer)(x, CTX)
    assert np.abs(np.asarray(zeroed)[0, 2:] - by_hand[2:]).max(-1).min() > 1e-3
    # The first token sees itself alone, so that without itself it reads zeros.
    alone, _ = Cut('scores', jnp.arange(6) == 0, jnp.arange(6) == 0)(mixer)(x, CTX)
    np.testing.assert_array_equal(alone[0, 0], 0)


def test_a_token_that_is_cut_from_itself_still_breaks_the_whole_stick():
    """Its own key has no share, so that nothing changes; of others what is left goes to the keys before."""
    mixer = perturbed(make(ZOO['stick_breaking'], 16, rngs=nnx.Rngs(0)), 0.3)
    x, last = 3 * noise(1, 6, 16), jnp.arange(6) == 5
    plain, _ = mixer(x, CTX)
    own, _ = Cut('scores', last, last)(nnx.clone(mixer))(x, CTX)
    np.testing.assert_array_equal(own, plain)
    before, _ = Cut('scores', jnp.arange(6) == 4, last)(nnx.clone(mixer))(x, CTX)
    both, _ = Cut('scores', jnp.arange(6) >= 4, last)(nnx.clone(mixer))(x, CTX)
    np.testing.assert_array_equal(both, before)
    assert float(jnp.max(jnp.abs(before - plain)[:, 5])) > 1e-3


KINDS = (
    *(
        'nope',
        'mha',
        'gqa',
        'sliding_window',
        'alibi',
        'learned_sink',
        'sigmoid_attention',
        'sparsemax',
        'stick_breaking',
    ),
    *('shaped_attention', 'forgetting', 'ssmax', 'window_sinks', 'mla', 'differential', 'gau'),
)


@pytest.mark.parametrize('name', KINDS)
def test_attention_of_every_kind_reads_nothing_whose_scores_are_cut(name):
    mixer = perturbed(make(ZOO[name], 16, rngs=nnx.Rngs(0)), 0.3)
    assert isinstance(mixer, SCORED)
    # The first token is the source: a forget gate of another would still tell how far what was before it fades.
    first, later, x = jnp.arange(6) == 0, jnp.arange(6) > 0, 3 * noise(1, 6, 16)
    run = jax.jit(lambda x: Cut('scores', first, later)(nnx.clone(mixer))(x, CTX)[0])
    one, other = run(x), run(x.at[0, 0].add(1.0))
    np.testing.assert_allclose(one[:, 1:], other[:, 1:], rtol=1e-5, atol=1e-6)
    plain = jax.jit(lambda x: mixer(x, CTX)[0])
    assert float(jnp.max(jnp.abs(plain(x)[:, 1:] - plain(x.at[0, 0].add(1.0))[:, 1:]))) > 1e-5


@pytest.mark.parametrize('name', ['mamba', 'mamba2', 'mamba3', 'mamba3_mimo'])
def test_without_what_is_written_the_state_is_empty_as_without_what_is_read(name):
    mixer = make(ZOO[name], 16, rngs=nnx.Rngs(0), **SELECTIVE[name])
    x, everyone = noise(1, 6, 16), jnp.ones(6, bool)

    def cut(part, sources, targets):
        return Cut(part, sources, targets)(nnx.clone(mixer))(x, CTX)[0]

    written, read = cut('B', everyone, NOBODY), cut('C', NOBODY, everyone)
    np.testing.assert_allclose(written, read, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(cut('state', everyone, everyone), read, rtol=1e-4, atol=1e-6)
    assert float(jnp.max(jnp.abs(written - mixer(x, CTX)[0]))) > 1e-4
    # Targets read what the state would be; others read it as it is.
    both = cut('state', SOURCE, LATER)
    np.testing.assert_array_equal(both[:, :2], mixer(x, CTX)[0][:, :2])
    np.testing.assert_allclose(both[:, 2:], cut('B', SOURCE, NOBODY)[:, 2:], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize('name', ['mamba', 'mamba2'])
def test_convolution_and_state_together_are_all_there_is(name):
    # The first token is the source: of one behind others it stays known how far it let these fade.
    source, later = jnp.arange(6) == 0, jnp.arange(6) > 0
    model = prepared(name)
    x = values_at(model, TOKENS, CTX, ['layers[0].mixer.input'])['layers[0].mixer.input']
    mixer = next(iter(model.stack.layers())).mixer
    cut = Cut('state', source, later)(Cut('conv', source, later)(mixer))
    first, _ = cut(x, CTX)
    second, _ = cut(x.at[0, 0].add(1.0), CTX)
    np.testing.assert_array_equal(first[:, 1:], second[:, 1:])
    assert float(jnp.max(jnp.abs(first[:, 0] - second[:, 0]))) > 1e-3


@pytest.mark.parametrize('name', ['mamba', 'mamba2', 'mamba3'])
def test_what_passes_a_source_fades_as_before(name):
    mixer = make(ZOO[name], 16, rngs=nnx.Rngs(0), **SELECTIVE[name])
    silent = Cut('B', jnp.arange(6) == 4, NOBODY)(nnx.clone(mixer))
    only = Cut('B', jnp.arange(6) > 0, NOBODY)(nnx.clone(mixer))
    none = Cut('B', jnp.ones(6, bool), NOBODY)(nnx.clone(mixer))
    x = noise(1, 6, 16)
    # Outputs are linear in what is written up to the norm of heads, which is left out here.
    if getattr(mixer, 'norm', None) is not None:
        for each in (silent, only, none, mixer):
            each.norm = None
    whole = mixer(x, CTX)[0]
    without = silent(x, CTX)[0]
    first = only(x, CTX)[0] - none(x, CTX)[0]
    # The last token loses what token 4 wrote and keeps what token 0 did.
    others = Cut('B', jnp.isin(jnp.arange(6), jnp.asarray([0, 4])), NOBODY)(nnx.clone(mixer))(x, CTX)[0]
    np.testing.assert_allclose((without - others)[0, 5], first[0, 5], rtol=1e-3, atol=1e-6)
    assert float(jnp.max(jnp.abs((whole - without)[0, 5]))) > 1e-4


def test_mixers_that_read_both_ways_and_side_by_side_lose_the_part_in_both():
    two = make(ZOO['vim'], 16, rngs=nnx.Rngs(0))
    x, everyone = noise(1, 6, 16), jnp.ones(6, bool)
    assert parts_of(two) == ('inputs', 'B', 'C', 'conv', 'state')
    written, read = (
        Cut(*each)(nnx.clone(two))(x, CTX)[0] for each in (('B', everyone, NOBODY), ('C', NOBODY, everyone))
    )
    np.testing.assert_allclose(written, read, rtol=1e-4, atol=1e-6)
    for name, parts in (('hymba', set(PARTS)), ('s_mamba', {'inputs', 'B', 'C', 'conv', 'state'})):
        mixer = make(ZOO[name], 16, rngs=nnx.Rngs(0))
        assert set(parts_of(mixer)) == parts
        written, read = (
            Cut(*each)(nnx.clone(mixer))(x, CTX)[0] for each in (('B', everyone, NOBODY), ('C', NOBODY, everyone))
        )
        np.testing.assert_allclose(written, read, rtol=1e-4, atol=1e-5)
        assert float(jnp.max(jnp.abs(written - mixer(x, CTX)[0]))) > 1e-4
    # Of a row read from its end, sources are those of the row as it stands.
    cut = Cut('state', SOURCE, everyone)(nnx.clone(mixer))(x, CTX)[0]
    moved = jnp.abs(cut - mixer(x, CTX)[0]).max(-1)[0]
    assert float(moved.min()) > 1e-6


def test_what_is_not_there_is_refused():
    attention, mamba = prepared('nope'), prepared('mamba2')
    with pytest.raises(
        UserError, match='layer 0 is of Attention, which has no part B to cut; of it there is inputs, scores'
    ):
        cuts(attention, 'B', (0,), NOBODY, NOBODY)
    with pytest.raises(UserError, match='no layer has a part scores to cut: the mixers are StateSpaceDual; of them'):
        layers_with(mamba, 'scores')
    with pytest.raises(UserError, match="there is no part 'D' of a mixer"):
        cuts(mamba, 'D', (0,), NOBODY, NOBODY)
    with pytest.raises(UserError, match='layer 2 is no block with a mixer; the model has layers 0 to 1'):
        cuts(mamba, 'B', (2,), NOBODY, NOBODY)
    with pytest.raises(UserError, match='TrapezoidalSSM has no part conv to cut; of it there is inputs, B, C, state'):
        hidden_with(prepared('mamba3'), TOKENS, CTX, {'layers[0].mixer': Cut('conv', SOURCE, LATER)})
    entries = Entries(noise(1, 2, 1, 4), noise(1, 2, 1, 4), jnp.ones((1, 2), jnp.int32))
    cut = Context(jnp.arange(2)[None], cut=jnp.zeros((1, 2, 2), bool))
    cache = empty_cache(1, 4, kv_heads=1, key_dim=4, value_dim=4, dtype='float32')
    with pytest.raises(UserError, match='cut of Context is given in a call with a state'):
        look(entries, cut, Reach(), cache)


def test_knockouts_are_those_of_single_cuts():
    model = prepared('nope')
    groups = jnp.stack([jnp.arange(6)[None] == token for token in (0, 3)])
    targets = jnp.arange(6)[None] == 5

    def score(hidden):
        return jnp.sum(hidden[0, 5] * jnp.arange(8.0))

    layers, everywhere, clean = jax.jit(
        lambda: knockouts(model, TOKENS, CTX, 'scores', (0, 1), score, groups=groups, targets=targets)
    )()
    np.testing.assert_allclose(clean, score(model.hidden(TOKENS, CTX)[0]), rtol=1e-5)
    for index, token in enumerate((0, 3)):
        for which, found in (((0,), layers[0, index]), ((1,), layers[1, index]), ((0, 1), everywhere[index])):
            one = cutting(model, 'scores', which)(TOKENS, jnp.arange(6) == token, jnp.arange(6) == 5)
            np.testing.assert_allclose(found, score(one), rtol=1e-5)
    # A window of three about each of two layers is all of them.
    wide, *_ = jax.jit(
        lambda: knockouts(model, TOKENS, CTX, 'scores', (0, 1), score, groups=groups, targets=targets, window=3)
    )()
    np.testing.assert_allclose(wide, jnp.stack([everywhere] * 2), rtol=1e-5)


def test_a_block_without_a_mixer_of_parts_is_still_a_block():
    assert all(isinstance(layer, Block) for layer in prepared('mingru').stack.layers())
    assert layers_with(prepared('mingru'), 'inputs') == (0, 1)
