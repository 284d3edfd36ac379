"""Ways to continue a text: against enumeration, greedy decoding, and exact distributions."""

import collections
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from scipy.stats import chi2, chisquare

from attnlab.blocks.block import Block
from attnlab.config import build, spec
from attnlab.context import Context
from attnlab.data.text.grammar import Derivable, Grammar
from attnlab.data.text.pattern import Matching, Pattern
from attnlab.errors import UserError
from attnlab.functional.constrained import Masked, Rejected
from attnlab.functional.sampling import Sampling
from attnlab.models.decoding import (
    accepted,
    beam_search,
    constrained,
    contrastive_search,
    generate_many,
    speculate,
)
from attnlab.models.model import Model
from attnlab.models.sampling import generate
from attnlab.models.stack import Stack
from attnlab.nn.experts import MixtureOfExperts
from attnlab.quantize.formats import Affine, Crossed, Symmetric
from attnlab.quantize.layers import Quantization
from attnlab.quantize.training import Rounded
from attnlab.zoo import ZOO
from tests.data.text.test_pattern import Spelled

PROMPT = np.array([3, 1, 4, 1, 0])
GREEDY = Sampling(temperature=0.0)


def made(seed, vocab=5, mlp=None):
    """An untrained model of a recurrence and of attention, with logits far enough apart."""
    mixers = (ZOO['mingru'].spec, ZOO['nope'].spec.copy_and_resolve_references())
    mixers[1].heads = 2
    blocks = tuple(spec(Block, mixer=mixer, **({} if mlp is None else {'mlp': mlp})) for mixer in mixers)
    config = spec(Model, dim=8, stack=spec(Stack, depth=2, blocks=blocks))
    model = build(config)(vocab, dtype='float32', rngs=nnx.Rngs(seed))
    model.embedding.table[...] = 3 * model.embedding.table[...]
    return model


@pytest.fixture(scope='module')
def model():
    return made(0)


@jax.jit
def log_probabilities(model, tokens):
    """Of the last three tokens of each row."""
    hidden, _ = model.hidden(tokens, Context.full(*tokens.shape))
    logs = jax.nn.log_softmax(model.logits(hidden), axis=-1)[:, -4:-1]
    return jnp.sum(jnp.take_along_axis(logs, tokens[:, -3:, None], axis=2), axis=(1, 2))


def test_prompts_of_several_lengths_go_on_as_each_alone(model):
    prompts = [PROMPT, PROMPT[:2], PROMPT[1:]]
    drawn = generate_many(model, prompts, 4, Sampling(temperature=0.0))
    for prompt, tokens in zip(prompts, drawn, strict=True):
        np.testing.assert_array_equal(tokens, list(generate(model, prompt, 4, Sampling(0.0))))


def test_prompts_longer_than_a_window_go_on_as_they_are_read_whole():
    mixers = (*ZOO['sliding_window'].sized(heads=2, window=4), ZOO['mingru'].spec)
    config = spec(Model, dim=8, stack=spec(Stack, depth=2, blocks=tuple(spec(Block, mixer=each) for each in mixers)))
    model = build(config)(5, dtype='float32', rngs=nnx.Rngs(0))
    model.embedding.table[...] = 3 * model.embedding.table[...]
    long = np.concatenate([PROMPT, PROMPT[::-1], PROMPT])
    (tokens,) = generate_many(model, [long], 6, GREEDY)
    logits = model.logits(whole(model, jnp.asarray([[*long, *tokens]])))[0]
    np.testing.assert_array_equal(np.argmax(logits[len(long) - 1 : -1], axis=-1), tokens)
    # States with rings are taken back where what a draft proposes is not accepted.
    pieces = list(speculate(model, made(1), long, 6, GREEDY, ahead=3))
    np.testing.assert_array_equal(list(itertools.chain(*pieces)), tokens)
    assert min(map(len, pieces)) < 4


@pytest.mark.parametrize(
    'go_on',
    [
        lambda model, jit: generate_many(model, [PROMPT, PROMPT[::-1]], 2, GREEDY, jit=jit),
        lambda model, jit: beam_search(model, PROMPT, 2, 2, jit=jit),
        lambda model, jit: list(contrastive_search(model, PROMPT, 1, candidates=2, jit=jit)),
    ],
    ids=['prompts of one length', 'beams', 'candidates'],
)
def test_streams_that_have_read_as_many_tokens_begin_blocks_together(go_on):
    """Hyena makes its filter for all slots where a block begins, by a choice in the program and not at every token."""
    stack = spec(Stack, depth=1, blocks=(spec(Block, mixer=ZOO['hyena'].spec),))
    model = build(spec(Model, dim=8, stack=stack))(5, dtype='float32', rngs=nnx.Rngs(0))
    programs = []

    def noting(function):
        compiled = jax.jit(function)

        def call(*arguments):
            programs.append(compiled.lower(*arguments).as_text())
            return compiled(*arguments)

        return call

    go_on(model, noting)
    # The program that gives hidden states of both streams.
    (step,) = (text for text in programs if 'tensor<2x1x8xf32>' in text)
    assert 'stablehlo.case' in step


TEXT = np.array([[3, 1, 4, 1, 0, 2, 2, 3, 0, 4], [0, 0, 2, 4, 1, 3, 3, 1, 2, 0]])


def with_experts(capacity):
    return made(0, mlp=spec(MixtureOfExperts, experts=4, active=2, hidden=4, capacity=capacity))


@jax.jit
def whole(model, tokens):
    """Hidden states of rows read in one pass."""
    return model.hidden(tokens, Context.full(*tokens.shape))[0]


def by_steps(model, tokens):
    """Hidden states of rows read together, a token of each at a time."""
    read = jax.jit(lambda column, state, at: model.hidden(column, Context.full(*column.shape, start=at), state))
    state, found = model.init_state(*tokens.shape), []
    for at in range(tokens.shape[1]):
        hidden, state = read(tokens[:, at : at + 1], state, jnp.int32(at))
        found.append(hidden)
    return jnp.concatenate(found, axis=1)


def test_experts_with_room_for_all_decode_as_they_read_a_whole_text():
    model = with_experts(None)
    np.testing.assert_allclose(by_steps(model, TEXT), whole(model, TEXT), atol=1e-5)
    # A choice belongs to its token alone: nothing of it is kept for the next one.
    states = [jax.tree.map(jnp.shape, each.init_state(2, 10)) for each in (model, made(0))]
    assert states[0] == states[1]
    for prompt, tokens in zip(TEXT, generate_many(model, list(TEXT), 6, Sampling(temperature=0.0)), strict=True):
        assert list(generate(model, prompt, 6, Sampling(0.0))) == list(tokens)
        row = jnp.asarray([[*prompt, *tokens]])
        logits = model.logits(whole(model, row))[0]
        np.testing.assert_array_equal(np.argmax(logits[len(prompt) - 1 : -1], axis=-1), tokens)


def test_one_row_that_is_decoded_has_room_whatever_the_capacity():
    free, tight = with_experts(None), with_experts(0.25)
    # One token has a choice of an expert, and an expert has room for one or more.
    alone = by_steps(tight, TEXT[:1])
    np.testing.assert_allclose(alone, whole(free, TEXT[:1]), atol=1e-5)
    assert np.abs(alone - whole(tight, TEXT[:1])).max() > 0.1
    # Rows that are read in one batch share the room of a step: here an expert has room for one of both.
    together = by_steps(tight, TEXT)
    assert np.abs(together[:1] - alone).max() > 0.1
    # Prompts that go on side by side do not: each has the room of a row. What its prompt has no room for is lost.
    drawn = generate_many(tight, list(TEXT), 4, Sampling(temperature=0.0))
    for prompt, tokens in zip(TEXT, drawn, strict=True):
        assert list(generate(tight, prompt, 4, Sampling(0.0))) == list(tokens)
    short = [prompt[:1] for prompt in TEXT]
    drawn = [generate_many(each, short, 8, Sampling(temperature=0.0)).tolist() for each in (tight, free)]
    assert drawn[0] == drawn[1]


def test_a_beam_as_wide_as_all_continuations_finds_the_likeliest(model):
    tokens, total = beam_search(model, PROMPT, 3, 25)
    every = np.array(list(itertools.product(range(5), repeat=3)))
    found = log_probabilities(model, jnp.asarray([[*PROMPT, *part] for part in every]))
    np.testing.assert_array_equal(tokens, every[np.argmax(found)])
    np.testing.assert_allclose(total, np.max(found), atol=1e-5)
    one, _ = beam_search(model, PROMPT, 3, 1)
    np.testing.assert_array_equal(one, list(generate(model, PROMPT, 3, Sampling(0.0))))


@pytest.mark.parametrize('capacity', [None, 4.0, 0.25])
def test_beams_of_a_model_with_experts_take_no_room_from_each_other(capacity):
    """Of all continuations the likeliest, by the model that has room for all; a prompt of one token has room too."""
    free, limited = with_experts(None), with_experts(capacity)
    every = np.array(list(itertools.product(range(5), repeat=3)))
    prompt = PROMPT if capacity != 0.25 else PROMPT[:1]
    found = log_probabilities(free, jnp.asarray([[*prompt, *part] for part in every]))
    tokens, total = beam_search(limited, prompt, 3, 25)
    np.testing.assert_array_equal(tokens, every[np.argmax(found)])
    np.testing.assert_allclose(total, np.max(found), atol=1e-5)
    # Beside two others a beam is as likely as it is alone.
    tokens, total = beam_search(limited, prompt, 3, 3)
    np.testing.assert_allclose(total, found[np.flatnonzero((every == tokens).all(axis=1))[0]], atol=1e-5)


def test_a_piece_that_is_read_at_once_would_share_the_room_of_experts():
    """So that tokens would not be drawn as the model alone draws them."""
    with pytest.raises(UserError, match=r'experts of this model have a capacity, 0\.25, .* token by token'):
        next(speculate(with_experts(0.25), made(1), PROMPT, 4))
    assert len(next(speculate(with_experts(2.0), with_experts(0.25), PROMPT, 1))) == 1


@pytest.mark.parametrize(
    'rounding',
    [
        Quantization(inputs=Crossed(8)),
        Quantization(inputs=Affine(8, scope='tensor')),
        Rounded(inputs=Crossed(8)),
    ],
)
def test_a_piece_that_is_read_at_once_would_share_a_scale(rounding):
    """So that tokens would not be drawn as the model alone draws them."""
    sentence = r'inputs of the linear map stack\.\S+ are rounded by a scale that tokens that a draft .* such as affine8'
    with pytest.raises(UserError, match=sentence):
        next(speculate(rounding(made(0)), made(1), PROMPT, 4))


def test_a_piece_is_drawn_where_every_token_has_its_scale():
    rounded = Quantization(weights=Symmetric(8, scope='tensor'), inputs=Affine(8))(made(0))
    # What the draft rounds together matters to what it proposes alone.
    assert len(next(speculate(rounded, Quantization(inputs=Crossed(8))(made(1)), PROMPT, 1))) == 1


@pytest.mark.slow
def test_contrastive_search(model):
    greedy = list(generate(model, PROMPT, 4, Sampling(0.0)))
    assert list(contrastive_search(model, PROMPT, 4, penalty=0.0, candidates=3)) == greedy
    # With nothing but the penalty the first token is the candidate that repeats the least.
    (first,) = contrastive_search(model, PROMPT, 1, penalty=1.0, candidates=5)
    rows = jnp.asarray([[*PROMPT, token] for token in range(5)])
    hidden = np.asarray(jax.jit(lambda rows: model.hidden(rows, Context.full(*rows.shape))[0])(rows))
    hidden = hidden / np.linalg.norm(hidden, axis=-1, keepdims=True)
    alike = np.max(np.einsum('btd,bd->bt', hidden[:, :-1], hidden[:, -1]), axis=1)
    assert first == int(np.argmin(alike))
    with pytest.raises(UserError, match=r'penalty is 2\.0; it must be from 0 to 1'):
        next(contrastive_search(model, PROMPT, 1, penalty=2.0))


def test_what_is_taken_of_a_draft_is_distributed_as_the_target_says():
    rng = np.random.default_rng(0)
    target, draft = (rng.dirichlet(np.ones(4), size) for size in (3, 2))
    draft[0, 2] = 0.0
    draft[0] /= draft[0].sum()
    count = 40_000

    def run(key):
        first, second = jax.random.split(key)
        tokens = jax.random.categorical(first, jnp.log(jnp.asarray(draft)))
        taken, following = accepted(jnp.asarray(target), jnp.asarray(draft), tokens, second)
        return jnp.where(jnp.arange(3) < taken, jnp.append(tokens, 0), following), taken

    drawn, taken = jax.device_get(jax.jit(jax.vmap(run))(jax.random.split(jax.random.key(1), count)))
    assert chisquare(np.bincount(drawn[:, 0], minlength=4), count * target[0]).pvalue > 1e-3
    for length in (1, 2):
        reached = drawn[taken >= length]
        expected = len(reached) * target[length]
        assert chisquare(np.bincount(reached[:, length], minlength=4), expected).pvalue > 1e-3
    # The share of first tokens that are taken is what both distributions have in common.
    np.testing.assert_allclose(np.mean(taken > 0), np.minimum(target[0], draft[0]).sum(), atol=0.01)


class Pairs:
    """Reads next tokens from logits by the two tokens before, in the place of a model's reader; its state is the text.

    A state that is not of the position it is read at is a fault of the loop.
    """

    def __init__(self, logits):
        self.logits = logits

    def start(self, capacity):
        return ()

    def read(self, tokens, state, position):
        assert len(state) == position
        text = (*state, *map(int, tokens))
        # Before a text stands a zero.
        read = [self.logits[text[place - 1] if place else 0, text[place]] for place in range(position, len(text))]
        return None, jnp.asarray(np.stack(read)), text


def test_a_text_that_a_draft_proposes_is_distributed_as_the_model_says(model, monkeypatch):
    rng, count = np.random.default_rng(0), 1_200
    target, draft = 1.5 * rng.standard_normal((2, 3, 3, 3)).astype(np.float32)
    readers = iter((Pairs(target), Pairs(draft)))
    monkeypatch.setattr('attnlab.models.decoding.Reader', lambda model, jit: next(readers))
    pieces = list(speculate(model, model, np.array([0, 0]), count, ahead=3, seed=1))
    # Of all lengths, so that states were taken back after every number of tokens.
    assert {len(piece) for piece in pieces} == {1, 2, 3, 4}
    text = np.array([0, 0, *itertools.chain(*pieces)])
    assert len(text) == 2 + count
    counts = np.zeros((3, 3, 3))
    np.add.at(counts, (text[:-2], text[1:-1], text[2:]), 1)

    def apart(logits):
        expected = np.asarray(jax.nn.softmax(logits, axis=-1)) * counts.sum(axis=-1, keepdims=True)
        return chi2.sf(np.sum((counts - expected) ** 2 / expected), 9 * 2)

    assert apart(target) > 1e-3 and apart(draft) < 1e-9


def test_speculation_goes_on_as_the_model_alone(model):
    greedy = list(generate(model, PROMPT, 9, Sampling(0.0)))
    for draft in (made(1), model):
        pieces = list(speculate(model, draft, PROMPT, 9, Sampling(temperature=0.0), ahead=3))
        assert [token for piece in pieces for token in piece] == greedy
    assert [len(piece) for piece in pieces] == [4, 4, 1]
    with pytest.raises(UserError, match='the draft has 6 tokens, the model 5'):
        next(speculate(model, made(1, vocab=6), PROMPT, 2))


def test_restrictions_by_hand():
    logits = jnp.log(jnp.array([[0.5, 0.3, 0.15, 0.05]]))
    for sampling, kept in (
        (Sampling(), 4),
        (Sampling(top_k=2), 2),
        (Sampling(top_k=9), 4),
        (Sampling(top_p=0.75), 2),
        (Sampling(min_p=0.25), 3),
        (Sampling(min_p=1.0), 1),
        (Sampling(top_k=3, min_p=0.5), 2),
        (Sampling(temperature=0.0), 1),
        # Squared, 0.3 is 0.36 of the likeliest.
        (Sampling(temperature=0.5, min_p=0.4), 1),
    ):
        restricted = sampling.restricted(logits)
        assert int(jnp.sum(jnp.isfinite(restricted))) == kept
    weights = jax.nn.softmax(Sampling(top_k=2).restricted(logits))
    np.testing.assert_allclose(weights, [[0.625, 0.375, 0, 0]], rtol=1e-6)
    for options, sentence in (
        ({'top_p': 0.0}, 'top_p is 0.0; it must be a probability above 0, up to 1'),
        ({'min_p': 2.0}, 'min_p is 2.0; it must be a share from 0 to 1'),
        ({'top_k': 0}, 'top_k of Sampling is 0'),
    ):
        with pytest.raises(UserError, match=sentence):
            Sampling(**options)


class Ends:
    """Texts of tokens 0 to 2 in which every 0 is followed by a 2: place 1 after a 0, 2 for what cannot be mended."""

    start = 0
    counts = 'tokens'

    def after(self, place, tokens):
        mended = np.where(tokens == 0, 1, np.where(tokens > 2, 2, 0))
        return np.where(place == 0, mended, np.where((place == 1) & (tokens == 2), 0, 2))

    def rest(self, places):
        return np.array([0, 1, 100])[places]

    def ends(self, place):
        return False


class Table:
    """Reads from a table of logits, in the place of a model's reader."""

    def __init__(self, logits):
        self.logits = logits

    def start(self, capacity):
        return ()

    def read(self, tokens, state, position):
        state = (*state, *map(int, tokens))
        return None, self.logits[state][None], state


def test_constrained_texts_are_drawn_and_weighted_exactly(model, monkeypatch):
    rng = np.random.default_rng(5)
    every = [(7, *text) for length in range(3) for text in itertools.product(range(4), repeat=length)]
    table = {state: rng.normal(size=4) for state in every}
    monkeypatch.setattr('attnlab.models.decoding.Reader', lambda model, jit: Table(table))
    own, conditional = {}, {}
    for text in itertools.product(range(4), repeat=3):
        own[text] = conditional[text] = 1.0
        place = 0
        for index, token in enumerate(text):
            weights = np.exp(table[7, *text[:index]])
            weights /= weights.sum()
            may = Ends().rest(Ends().after(np.full(4, place), np.arange(4))) <= 2 - index
            if not may[token]:
                own[text] = conditional[text] = 0.0
                break
            own[text] *= weights[token]
            conditional[text] *= weights[token] / weights[may].sum()
            place = int(Ends().after(np.array([place]), np.array([token]))[0])
    texts = [text for text, share in own.items() if share]
    assert texts == [text for text in own if max(text) < 3 and '0' not in ''.join(map(str, text)).replace('02', '')]
    assert sum(conditional.values()) == pytest.approx(1.0)
    for choice, count in ((Masked(), 300), (Rejected(), 1_000)):
        found = [list(constrained(model, np.array([7]), 3, Ends(), choice, seed=seed)) for seed in range(count)]
        drawn = [tuple(each.token for each in text) for text in found]
        assert chisquare([drawn.count(text) for text in texts], [count * conditional[t] for t in texts]).pvalue > 1e-3
        weights = np.exp([sum(each.log_weight for each in text) for text in found])
        for part in (texts, texts[:4], texts[4:]):
            each = weights * np.array([text in part for text in drawn])
            assert abs(each.mean() - sum(own[text] for text in part)) < 4 * each.std() / np.sqrt(count)


def test_texts_of_a_grammar_are_drawn_and_weighted_exactly(model, monkeypatch):
    tokens = (b'(', b')', b'()', b'x')
    rng = np.random.default_rng(6)
    every = [(7, *text) for length in range(3) for text in itertools.product(range(4), repeat=length)]
    table = {state: rng.normal(size=4) for state in every}
    monkeypatch.setattr('attnlab.models.decoding.Reader', lambda model, jit: Table(table))
    # Three tokens, as parentheses can always go on: those that are balanced, by taking pairs away.
    texts = []
    for text in itertools.product(range(4), repeat=3):
        letters = b''.join(tokens[token] for token in text)
        for _ in range(3):
            letters = letters.replace(b'()', b'')
        texts += [] if letters else [text]
    assert len(texts) == 4
    own, left = dict.fromkeys(texts, 1.0), dict.fromkeys(texts, 1.0)
    for text in texts:
        for index, token in enumerate(text):
            weights = np.exp(table[7, *text[:index]])
            weights /= weights.sum()
            own[text] *= weights[token]
            # The share of the tokens with which one of the texts goes on.
            left[text] *= weights[sorted({each[index] for each in texts if each[:index] == text[:index]})].sum()
    constraint = Derivable(Grammar('start: "(" start ")" start |'), Spelled(tokens=tokens))
    for choice, count in ((Masked(), 200), (Rejected(), 600)):
        found = [list(constrained(model, np.array([7]), 3, constraint, choice, seed=seed)) for seed in range(count)]
        drawn = [tuple(each.token for each in text) for text in found]
        expected = [count * own[text] / left[text] for text in texts]
        assert chisquare([drawn.count(text) for text in texts], expected).pvalue > 1e-3
        weights = np.exp([sum(each.log_weight for each in text) for text in found])
        if choice == Masked():
            np.testing.assert_allclose(weights, [left[text] for text in drawn], rtol=1e-5)
        for part in (texts, texts[:1], texts[1:]):
            each = weights * np.array([text in part for text in drawn])
            assert abs(each.mean() - sum(own[text] for text in part)) < 4 * each.std() / np.sqrt(count)


def test_a_constraint_on_a_model(model):
    # Greedy: at every token the likeliest that may come, by reading the text anew.
    text = list(PROMPT)
    place, expected = 0, []
    for index in range(4):
        hidden, _ = model.hidden(jnp.asarray(text)[None], Context.full(1, len(text)))
        logits = np.asarray(model.logits(hidden)[0, -1])
        may = Ends().rest(Ends().after(np.full(5, place), np.arange(5))) <= 3 - index
        expected.append(int(np.argmax(np.where(may, logits, -np.inf))))
        text.append(expected[-1])
        place = int(Ends().after(np.array([place]), np.array([expected[-1]]))[0])
    found = list(constrained(model, PROMPT, 4, Ends(), Masked(Sampling(temperature=0.0))))
    assert [each.token for each in found] == expected


class Until0(Ends):
    """Texts that end with their first 0."""

    def rest(self, places):
        return np.array([1, 0, 2**31 - 1])[places]

    def ends(self, place):
        return place == 1


class Odd(Ends):
    """Texts of an odd number of zeros."""

    def after(self, place, tokens):
        return np.where((tokens == 0) & (place < 2), 1 - place, 2)

    def rest(self, places):
        return np.array([1, 0, 2**31 - 1])[places]


class Never(Until0):
    """None."""

    def rest(self, places):
        return np.full(len(places), 2**31 - 1)


class Far(Until0):
    """The same, of two tokens at least."""

    def rest(self, places):
        return np.array([2, 0, 2**31 - 1])[places]


def test_a_text_ends_where_nothing_can_follow_and_must_fit(model, monkeypatch):
    monkeypatch.setattr(
        'attnlab.models.decoding.Reader', lambda model, jit: Table(collections.defaultdict(lambda: np.zeros(4)))
    )
    found = [list(constrained(model, PROMPT, 2, Until0(), Rejected(), seed=seed)) for seed in range(30)]
    texts = [tuple(each.token for each in text) for text in found]
    assert set(texts) == {(0,), (1, 0), (2, 0)}
    for choice, steps in itertools.product((Masked(), Rejected()), (1, 2, 3, 4)):
        text = list(constrained(model, PROMPT, steps, Odd(), choice))
        assert [each.token for each in text] == [0] * (steps - (steps % 2 == 0))
    with pytest.raises(UserError, match=r'no text of at most 1 tokens matches .*; the shortest has 2; allow as many'):
        next(constrained(model, PROMPT, 1, Far(), Masked()))
    with pytest.raises(UserError, match=r'no text of any length matches'):
        next(constrained(model, PROMPT, 1, Never(), Masked()))


def test_a_text_of_one_token_of_several_bytes(model, monkeypatch):
    monkeypatch.setattr(
        'attnlab.models.decoding.Reader', lambda model, jit: Table(collections.defaultdict(lambda: np.zeros(3)))
    )
    tokenizer = Spelled(tokens=(b'a', b'b', b'ab'))
    (drawn,) = constrained(model, PROMPT, 1, Matching(Pattern('ab'), tokenizer), Masked())
    assert drawn.token == 2 and drawn.log_weight == pytest.approx(np.log(1 / 3))
    with pytest.raises(UserError, match=r"no text of at most 1 tokens matches 'abc\?ab'; the shortest has 2; allow"):
        next(constrained(model, PROMPT, 1, Matching(Pattern('abc?ab'), tokenizer), Masked()))
    # Of a grammar bytes are counted, and the error does not say more.
    sentence = r'the shortest text that matches the grammar has 2 bytes, each of which is counted as a token, and 1'
    with pytest.raises(UserError, match=sentence):
        next(constrained(model, PROMPT, 1, Derivable(Grammar('start: "ab"'), tokenizer), Masked()))
