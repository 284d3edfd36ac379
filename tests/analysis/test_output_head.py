"""Statistics of heads on matrices and sources whose answers are known."""

import jax
import jax.numpy as jnp
import numpy as np

from attnlab.analysis import output_head
from attnlab.analysis.output_head import Predictions

RNG = np.random.default_rng(0)


def test_singular_entropy_and_rank_of_an_isotropic_matrix_and_of_one_direction():
    isotropic = np.linalg.qr(RNG.standard_normal((40, 8)))[0]
    np.testing.assert_allclose(output_head.singular_entropy(isotropic), 0, atol=1e-12)
    np.testing.assert_allclose(output_head.effective_rank(isotropic), 8)
    one = np.outer(np.arange(1, 41), np.ones(8))
    np.testing.assert_allclose(
        [output_head.singular_entropy(one), output_head.effective_rank(one)], [np.log(8), 1], atol=1e-6
    )
    assert output_head.directions_for(isotropic, 0.5) == 4 and output_head.directions_for(one, 0.99) == 1


def test_singular_entropy_of_a_gaussian_matrix():
    gaussian = RNG.standard_normal((2000, 64))
    assert abs(output_head.singular_entropy(gaussian) - 0.0042) < 3e-4
    assert abs(output_head.effective_rank(gaussian) - 63.7) < 0.1


def test_a_mean_that_all_states_share_is_anisotropy_until_it_is_subtracted():
    states = RNG.standard_normal((300, 16))
    assert abs(output_head.anisotropy(states)) < 0.01
    moved = states + 100
    assert output_head.anisotropy(moved) > 0.99 and abs(output_head.anisotropy(moved, centred=True)) < 0.01
    pairs = states / np.linalg.norm(states, axis=1, keepdims=True)
    np.testing.assert_allclose(output_head.anisotropy(states), (pairs @ pairs.T)[~np.eye(300, dtype=bool)].mean())


def test_log_probabilities_of_counts():
    found = output_head.log_probabilities(np.array([5, 5, 2]), np.array([0, 0, 1]), 2)
    np.testing.assert_allclose(np.exp(found), [[1 / 3, 2 / 3], [3 / 4, 1 / 4]])


def test_a_refit_needs_the_rank_of_the_source():
    """Of logits of rank 3 the head of rank 3 reaches the entropy, and smaller ones do not."""
    rng = np.random.default_rng(1)
    hidden = rng.standard_normal((600, 6)).astype(np.float32)
    left, right = (np.linalg.qr(rng.standard_normal((size, 3)))[0] for size in (9, 6))
    source = 6 * left @ right.T
    logits = hidden @ source.T
    targets = np.argmax(logits + rng.gumbel(size=logits.shape), axis=1).astype(np.int32)
    asked = Predictions(hidden, targets)
    best = -np.mean(np.asarray(jax.nn.log_softmax(jnp.asarray(logits)))[np.arange(600), targets])
    start = source + 0.1 * rng.standard_normal((9, 6))
    two, three, six = output_head.refits(start, asked, asked, (2, 3, 6))
    assert [each.rank for each in (two, three, six)] == [2, 3, 6]
    assert best - 0.1 < three.fitted < best + 0.01 < two.fitted - 0.1
    # More rank than three may fit the noise of the draws, and nothing else.
    assert three.fitted - 0.05 < six.fitted <= three.fitted + 0.005
    np.testing.assert_allclose(three.held_out, three.fitted, rtol=1e-5)
