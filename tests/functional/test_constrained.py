"""Drawing what is allowed: exact distributions and weights."""

import numpy as np
import pytest
from scipy.special import softmax
from scipy.stats import chisquare

from attnlab.errors import UserError
from attnlab.functional.constrained import Masked, Rejected
from attnlab.functional.sampling import Sampling

LOGITS = np.log(np.array([0.45, 0.3, 0.12, 0.08, 0.04, 0.01]))
MAY = np.array([False, True, False, True, True, False])


def allowed(tokens):
    return MAY[tokens]


def drawn(choice, count, logits=LOGITS, allowed=allowed):
    rng = np.random.default_rng(0)
    found = [choice.draw(logits, allowed, rng) for _ in range(count)]
    return np.array([each.token for each in found]), np.exp([each.log_weight for each in found]), found


@pytest.mark.parametrize('temperature', [1.0, 0.5])
def test_both_ways_draw_from_what_is_allowed_in_proportion(temperature):
    own = softmax(LOGITS / temperature)
    mass = float(own[MAY].sum())
    for choice, count in ((Masked(Sampling(temperature)), 3_000), (Rejected(temperature), 20_000)):
        tokens, weights, found = drawn(choice, count)
        counts = np.bincount(tokens, minlength=6)
        assert counts[~MAY].sum() == 0
        assert chisquare(counts[MAY], count * own[MAY] / mass).pvalue > 1e-3
        # Jointly with the token the weights have the mean of what they stand for.
        for token in np.flatnonzero(MAY):
            each = weights * (tokens == token)
            assert abs(each.mean() - own[token]) < 4 * each.std() / np.sqrt(count)
        if isinstance(choice, Masked):
            np.testing.assert_allclose(weights, mass, rtol=1e-6)
            assert {each.tested for each in found} == {6}
        else:
            assert np.std(weights) > 0.1 and {1, 2} <= {each.tested for each in found} <= set(range(1, 7))


def test_a_weight_is_one_over_the_draws_until_the_second_that_is_allowed():
    # One token of probability 1/4 is allowed: the number of draws before two successes is negative binomial.
    logits, count = np.log(np.array([0.75, 0.25])), 20_000
    _, weights, found = drawn(Rejected(), count, logits, lambda tokens: tokens == 1)
    rejections = np.rint(1 / weights - 1).astype(int)
    shares = np.array([(r + 1) * 0.25**2 * 0.75**r for r in range(20)])
    counts = np.bincount(np.minimum(rejections, 20), minlength=21)
    assert chisquare(counts, count * np.append(shares, 1 - shares.sum())).pvalue > 1e-3
    # However often it would have been drawn, the other is tested once.
    assert max(each.tested for each in found) == 2


def test_restrictions_are_of_what_is_allowed():
    tokens, weights, _ = drawn(Masked(Sampling(top_k=2)), 200)
    assert set(tokens.tolist()) == {1, 3}
    np.testing.assert_allclose(weights, 0.38, rtol=1e-6)
    tokens, weights, _ = drawn(Masked(Sampling(temperature=0.0)), 3)
    assert set(tokens.tolist()) == {1}
    np.testing.assert_allclose(weights, 0.3, rtol=1e-6)


def test_masses_near_nothing_keep_their_bits():
    logits = np.array([0.0, -60.0, -61.0])
    tokens, weights, _ = drawn(Rejected(), 4_000, logits, lambda tokens: tokens > 0)
    np.testing.assert_allclose(np.mean(tokens == 1), 1 / (1 + np.exp(-1)), atol=0.03)
    np.testing.assert_allclose(weights.mean(), np.exp(-60) + np.exp(-61), rtol=0.1)


def test_where_nothing_is_allowed_that_is_said():
    for choice in (Masked(), Rejected()):
        with pytest.raises(UserError, match='no token is allowed here'):
            choice.draw(LOGITS, lambda tokens: tokens < 0, np.random.default_rng(0))
    with pytest.raises(UserError, match=r'temperature is 0\.0; rejection needs one above 0'):
        Rejected(0.0)
