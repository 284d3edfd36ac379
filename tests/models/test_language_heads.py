"""What heads over a vocabulary do beyond the contract: penalties, corrections, and mistakes named."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.errors import UserError
from attnlab.losses import softmax_loss
from attnlab.models.heads.adaptive import AdaptiveSoftmax
from attnlab.models.heads.hierarchical import HierarchicalSoftmax
from attnlab.models.heads.language import BoundedHead, LanguageHead
from attnlab.models.heads.links import Evidence, SigSoftmax, Spherical, StableMax, Taylor
from attnlab.models.heads.mixture import MixtureOfSoftmaxes
from attnlab.models.heads.sampled import NEGATIVES, AugmentAndReduce, SampledSoftmax, log_expected, log_uniform
from attnlab.testing.noise import noise, perturbed

HIDDEN = noise(5, 4)
TARGETS = jnp.asarray([0, 3, 5, 1, 2], jnp.int32)


LINKS = {
    'stablemax': (StableMax(), lambda x: np.where(x >= 0, x + 1, 1 / (1 + np.abs(x)))),
    'taylor': (Taylor(), lambda x: 1 + x + x**2 / 2),
    'spherical': (Spherical(eps=0.3), lambda x: x**2 + 0.3),
    'sigsoftmax': (SigSoftmax(), lambda x: np.exp(x) / (1 + np.exp(-x))),
    'evidence': (Evidence(), lambda x: 1 + np.log1p(np.exp(x))),
}


@pytest.mark.parametrize('name', LINKS)
def test_a_link_is_the_function_of_its_paper(name):
    # Losses and logits of a head have the same link, so that only values from elsewhere can tell it is the right one.
    link, g = LINKS[name]
    scores = np.array([[-3.0, -1.0, -0.25, 0.0], [0.5, 1.0, 2.0, 4.0]])
    np.testing.assert_allclose(link.log_numerators(jnp.asarray(scores, jnp.float32)), np.log(g(scores)), atol=1e-5)


@pytest.mark.parametrize('cap', [None, 2.0])
def test_the_penalty_of_the_normaliser_is_in_the_gradient_alone(cap):
    head = BoundedHead(4, 6, z_loss=0.1, soft_cap=cap, rngs=nnx.Rngs(0))
    key = jax.random.key(0)
    np.testing.assert_array_equal(head.objective(HIDDEN, TARGETS, key), head.losses(HIDDEN, TARGETS))

    def whole(hidden):
        normalisers = jax.nn.logsumexp(head.logits(hidden), axis=-1)
        return jnp.sum(head.losses(hidden, TARGETS) + 0.1 * normalisers**2)

    found = jax.grad(lambda hidden: jnp.sum(head.objective(hidden, TARGETS, key)))(HIDDEN)
    np.testing.assert_allclose(found, jax.grad(whole)(HIDDEN), rtol=1e-4, atol=1e-6)


def test_augmenting_and_reducing_bounds_the_loss_from_above():
    head = AugmentAndReduce(4, 6, negatives=3, rngs=nnx.Rngs(0))
    draws = jax.vmap(lambda key: head.objective(HIDDEN, TARGETS, key))(jax.random.split(jax.random.key(0), 2000))
    mean, error = np.mean(draws, axis=0), np.std(draws, axis=0) / np.sqrt(2000)
    assert (mean + 4 * error > head.losses(HIDDEN, TARGETS)).all()
    # Many tokens estimate the sum well, and then the bound is tight.
    many = AugmentAndReduce(4, 6, negatives=4000, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(
        many.objective(HIDDEN, TARGETS, jax.random.key(0)), many.losses(HIDDEN, TARGETS), atol=0.1
    )


@pytest.mark.parametrize('correction', [True, False])
def test_the_correction_makes_the_distribution_of_the_data_the_minimum(correction, monkeypatch):
    """Of one drawn token the expected gradient can be summed over targets and draws: at `log p` it is zero."""
    classes = 4
    chances = jnp.asarray([0.1, 0.2, 0.3, 0.4])
    drawing = jnp.exp(log_expected(jnp.arange(classes), 1, classes))
    np.testing.assert_allclose(jnp.sum(drawing), 1, rtol=1e-6)
    head = SampledSoftmax(classes, classes, negatives=1, correction=correction, rngs=nnx.Rngs(0))
    head.weight[...] = jnp.eye(classes)

    def expected(logits):
        total = 0.0
        for drawn in range(classes):
            monkeypatch.setattr(
                'attnlab.models.heads.sampled.log_uniform', lambda *_, drawn=drawn: jnp.full(1, drawn, jnp.int32)
            )
            hidden = jnp.broadcast_to(logits[None], (classes, classes))
            losses = head.objective(hidden, jnp.arange(classes), jax.random.key(0))
            total += drawing[drawn] * jnp.sum(chances * losses)
        return total

    gradient = np.asarray(jax.grad(expected)(jnp.log(chances)))
    assert (np.abs(gradient).max() < 1e-6) == correction
    # Without it the most frequent in the draws is held down: its logit should fall.
    assert correction or gradient[0] > 0.01


@pytest.mark.parametrize('correction', [True, False])
def test_draws_of_the_target_do_not_count(correction):
    head, key = SampledSoftmax(4, 6, negatives=7, correction=correction, rngs=nnx.Rngs(0)), jax.random.key(0)
    drawn = np.asarray(log_uniform(jax.random.fold_in(key, NEGATIVES), 7, 6))
    assert set(TARGETS.tolist()) & set(drawn.tolist())
    often = 7 * np.log((np.arange(6) + 2) / (np.arange(6) + 1)) / np.log(7)
    logits = np.asarray(HIDDEN, np.float64) @ np.asarray(head.weight[...], np.float64).T - correction * np.log(often)
    # A token drawn twice counts twice.
    expected = [
        np.log1p(sum(np.exp(row[j] - row[target]) for j in drawn if j != target))
        for row, target in zip(logits, TARGETS.tolist(), strict=True)
    ]
    np.testing.assert_allclose(head.objective(HIDDEN, TARGETS, key), expected, rtol=1e-4, atol=1e-6)


def test_draws_are_log_uniform():
    drawn = np.asarray(log_uniform(jax.random.key(0), 20_000, 7))
    counts = np.bincount(drawn, minlength=7)
    expected = np.exp(np.asarray(log_expected(jnp.arange(7), 20_000, 7)))
    assert len(counts) == 7 and np.sum((counts - expected) ** 2 / expected) < 30


def test_a_mixture_of_one_component_is_a_softmax():
    head = MixtureOfSoftmaxes(4, 6, components=1, rngs=nnx.Rngs(0))
    plain = LanguageHead(4, 6, rngs=nnx.Rngs(0))
    plain.weight[...] = head.weight[...]
    states = jnp.tanh(head.latent(HIDDEN))
    np.testing.assert_allclose(head.losses(HIDDEN, TARGETS), plain.losses(states, TARGETS), rtol=1e-5)


@pytest.mark.parametrize('kind', [MixtureOfSoftmaxes, SampledSoftmax])
def test_training_takes_a_tenth_of_the_memory_of_whole_logits(kind):
    """Compiled and not run, so that nothing of this size is ever stored."""
    head = kind(8, 8192, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(head)
    hidden, targets = jax.ShapeDtypeStruct((1024, 8), jnp.float32), jax.ShapeDtypeStruct((1024,), jnp.int32)

    def temporary(losses):
        def total(params, hidden, targets):
            return jnp.sum(losses(nnx.merge(graphdef, params), hidden, targets))

        compiled = jax.jit(jax.grad(total, argnums=(0, 1))).lower(params, hidden, targets).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    ours = temporary(lambda head, hidden, targets: head.objective(hidden, targets, jax.random.key(0)))
    dense = temporary(lambda head, hidden, targets: softmax_loss(head.logits(hidden), targets))
    # At least one number for each of 1024 x 8192 logits, which says that the whole is measured.
    assert dense >= 4 * 1024 * 8192 and ours < dense / 10, (ours, dense)


@pytest.mark.parametrize('kind', [SampledSoftmax, AugmentAndReduce, HierarchicalSoftmax])
def test_the_gradient_of_a_token_that_thousands_ask_for_is_summed_in_the_type_of_the_weight(kind):
    """In bfloat16 a sum of ones stands still at 256."""
    head = perturbed(kind(4, 6, rngs=nnx.Rngs(0)), 0.1)
    hidden, targets = (1 + noise(4096, 4) / 4).astype(jnp.bfloat16), jnp.full(4096, 5, jnp.int32)

    def gradient(hidden):
        total = nnx.grad(lambda head: jnp.sum(head.objective(hidden, targets, jax.random.key(0))))(head)
        return np.asarray(total.weight[...])

    expected = gradient(hidden.astype(jnp.float32))
    assert np.linalg.norm(gradient(hidden) - expected) < 0.01 * np.linalg.norm(expected)


def test_mixtures_go_beyond_the_rank_of_the_width():
    def rank(head):
        return int(np.linalg.matrix_rank(jax.nn.log_softmax(head.logits(noise(40, 2))), tol=1e-3))

    assert rank(LanguageHead(2, 20, rngs=nnx.Rngs(0))) <= 3 < rank(MixtureOfSoftmaxes(2, 20, rngs=nnx.Rngs(0)))


MISTAKES = {
    'more tokens than there are': (
        lambda: HierarchicalSoftmax(4, 6, rngs=nnx.Rngs(0)).likeliest(HIDDEN, 7),
        'count is 7; it must be from 1 to 6',
    ),
    'a narrow beam': (
        lambda: HierarchicalSoftmax(4, 6, rngs=nnx.Rngs(0)).beam(HIDDEN, 3, width=2),
        'width is 2; a beam that gives 3 tokens',
    ),
    'an empty tail': (
        lambda: AdaptiveSoftmax(4, 6, cutoffs=(2, 6), rngs=nnx.Rngs(0)),
        'cutoffs is .2, 6., which leaves',
    ),
    'an empty head': (lambda: AdaptiveSoftmax(4, 6, cutoffs=(0, 2), rngs=nnx.Rngs(0)), 'leaves the head or a cluster'),
    'no tail': (lambda: AdaptiveSoftmax(4, 6, cutoffs=(), rngs=nnx.Rngs(0)), 'leaves the head or a cluster empty'),
    'a cluster of no tokens': (lambda: AdaptiveSoftmax(4, 6, cutoffs=(2, 2), rngs=nnx.Rngs(0)), 'must rise from'),
    'wider tails': (
        lambda: AdaptiveSoftmax(4, 6, divisor=0.5, rngs=nnx.Rngs(0)),
        'divisor is 0.5; it must be at least',
    ),
    'a tree of one token': (lambda: HierarchicalSoftmax(4, 1, rngs=nnx.Rngs(0)), 'vocab is 1; a tree needs at least 2'),
    'counts of others': (lambda: HierarchicalSoftmax(4, 3, counts=(1, 2), rngs=nnx.Rngs(0)), 'counts has 2 entries'),
    'counts below zero': (lambda: HierarchicalSoftmax(4, 2, counts=(1, -2), rngs=nnx.Rngs(0)), 'from -2 up; it must'),
    'a cap of zero': (lambda: BoundedHead(4, 6, soft_cap=0.0, rngs=nnx.Rngs(0)), 'soft_cap is 0.0; it must be pos'),
    'a penalty below zero': (lambda: BoundedHead(4, 6, z_loss=-1.0, rngs=nnx.Rngs(0)), 'z_loss is -1.0; it must be at'),
    'no constant': (lambda: Spherical(eps=0.0), 'eps of Spherical is 0.0; it must be positive'),
    'no negatives': (lambda: SampledSoftmax(4, 6, negatives=0, rngs=nnx.Rngs(0)), 'negatives of SampledSoftmax is 0'),
    'a class outside': (
        lambda: LanguageHead(4, 6, rngs=nnx.Rngs(0)).losses(HIDDEN, TARGETS + 1),
        'targets are from 1 to 6; there are 6 classes, so they must be from 0 to 5',
    ),
}


@pytest.mark.parametrize('case', MISTAKES)
def test_mistakes_are_named_in_one_line(case):
    call, sentence = MISTAKES[case]
    with pytest.raises(UserError, match=sentence) as caught:
        call()
    assert '\n' not in str(caught.value)


@pytest.mark.parametrize(
    ('counts', 'lengths'), [((1, 1, 2, 4, 8), [4, 4, 3, 2, 1]), (None, [1, 2, 3, 4, 4])], ids=['given', 'by number']
)
def test_frequent_tokens_have_short_paths(counts, lengths):
    # In an even tree of five none is nearer than two steps. Of no hidden state every step is a coin's.
    head = HierarchicalSoftmax(4, 5, counts=counts, rngs=nnx.Rngs(0))
    found = head.losses(jnp.zeros((5, 4)), jnp.arange(5, dtype=jnp.int32))
    np.testing.assert_allclose(found / np.log(2), lengths, rtol=1e-5)


def test_rarer_clusters_are_narrower():
    head = perturbed(AdaptiveSoftmax(16, 32, rngs=nnx.Rngs(0)), 0.3)
    assert head.cutoffs == (4, 16) and [cluster.weight.shape for cluster in head.clusters] == [(12, 4), (16, 1)]
    hidden = np.asarray(noise(3, 16), np.float64)
    first, *rest = (
        hidden @ down @ weight.T
        for down, weight in [
            (np.eye(16), np.asarray(head.weight[...], np.float64)),
            *((np.asarray(each.down.weight[...], np.float64), np.asarray(each.weight[...])) for each in head.clusters),
        ]
    )
    first, *rest = (each - np.log(np.exp(each).sum(axis=1, keepdims=True)) for each in (first, *rest))
    # A frequent token, and the second of each cluster, whose gates are the last two of the first softmax.
    expected = [first[0, 3], first[1, 4] + rest[0][1, 1], first[2, 5] + rest[1][2, 1]]
    found = head.losses(jnp.asarray(hidden, jnp.float32), jnp.asarray([3, 5, 17], jnp.int32))
    np.testing.assert_allclose(found, -np.asarray(expected), rtol=1e-4)


def test_the_likeliest_tokens_of_a_tree_are_found_without_opening_all_of_it():
    head = perturbed(HierarchicalSoftmax(4, 12, rngs=nnx.Rngs(0)), 1.0)
    hidden = 3 * noise(5, 4)
    logits = np.asarray(head.logits(hidden))
    order = np.argsort(-logits, axis=1)
    every, best = head.likeliest(hidden, 12), head.likeliest(hidden)
    np.testing.assert_array_equal(every.tokens, order)
    np.testing.assert_allclose(every.log_probabilities, np.take_along_axis(logits, order, axis=1), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(best.tokens[:, 0], order[:, 0])
    assert (np.asarray(every.opened) == 11).all() and np.mean(best.opened) < 8
    whole, narrow = head.beam(hidden, 3, width=12), head.beam(hidden, width=1)
    np.testing.assert_array_equal(whole.tokens, order[:, :3])
    # What a beam finds has the probability that it says, and is at most the best.
    np.testing.assert_allclose(
        narrow.log_probabilities, np.take_along_axis(logits, np.asarray(narrow.tokens), axis=1), rtol=1e-4, atol=1e-5
    )
    assert (np.asarray(narrow.opened) <= head.nodes.shape[1]).all()
