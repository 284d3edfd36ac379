"""Weight maps of whole rows against their definitions, in numpy float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.errors import UserError
from attnlab.functional.dense import ScoreRows
from attnlab.mixers.softmax.attention import Attention
from attnlab.module import Module
from attnlab.nn.dense_maps import StickBreaking
from attnlab.testing.contract import Subject
from attnlab.testing.contract.documents import check_packing
from attnlab.testing.contract.streaming import check_decoding
from attnlab.testing.noise import noise


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


LENGTH = 7


def broken(scores: jax.Array, **options: bool) -> jax.Array:
    """The weights of a causal row of one head, `t t`."""
    visible = jnp.tril(jnp.ones(scores.shape, bool))
    each = (each[None, None] for each in (jnp.where(visible, scores, 0), visible, scores))
    rows = ScoreRows(*each, jnp.arange(len(scores)))
    return StickBreaking(heads=1, rngs=nnx.Rngs(0), **options)(rows, None)[0, 0]


def test_stick_breaking_is_its_product():
    """Of sticks that are broken a little, a lot, and to the last."""
    for scale in (1.0, 10.0, 1000.0):
        scores = scale * noise(LENGTH, LENGTH, dtype=jnp.float64)
        shares, found = np.asarray(jax.nn.sigmoid(scores)), np.asarray(broken(scores))
        left = np.asarray(jax.nn.sigmoid(-scores))
        for i in range(LENGTH):
            for j in range(LENGTH):
                expected = shares[i, j] * np.prod(left[i, j + 1 : i]) if j < i else 0.0
                np.testing.assert_allclose(found[i, j], expected, rtol=1e-9, atol=1e-200)
            np.testing.assert_allclose(found[i].sum() + np.prod(left[i, :i]), 1.0, rtol=1e-12)


def test_what_is_left_of_the_stick_may_be_given_to_the_own_value():
    """All of it in the first row, which has no key before; the other weights are as they were, and so are gradients."""
    scores, a = (3 * noise(LENGTH, LENGTH, seed=seed, dtype=jnp.float64) for seed in (0, 1))
    whole, left = np.asarray(broken(scores, remainder=True)), np.asarray(jax.nn.sigmoid(-scores))
    np.testing.assert_array_equal(np.tril(whole, -1), broken(scores))
    np.testing.assert_allclose(np.diag(whole), [np.prod(row[:i]) for i, row in enumerate(left)], rtol=1e-12)
    np.testing.assert_allclose(whole.sum(axis=1), 1.0, rtol=1e-12)
    shares = jax.grad(lambda scores: jnp.sum(a * broken(scores)))(scores)
    found = jax.grad(lambda scores: jnp.sum(a * broken(scores, remainder=True)))(scores)
    rest = -np.tril((1 - left) * (np.diag(a) * np.diag(whole))[:, None], -1)
    np.testing.assert_allclose(found, shares + rest, rtol=1e-9, atol=1e-12)


def test_a_stick_given_out_whole_streams_and_keeps_documents_apart():
    make = functools.partial(Attention, heads=2, weights=functools.partial(StickBreaking, remainder=True))
    with jax.enable_x64(False):
        subject = Subject(make, causal=True)
        check_decoding(subject)
        check_packing(subject, causal=True)


def test_equal_scores_give_geometric_weights_and_very_low_ones_none():
    share = 1 / (1 + np.exp(-0.3))
    for i, row in enumerate(broken(jnp.full((LENGTH, LENGTH), 0.3))):
        np.testing.assert_allclose(row[:i], share * (1 - share) ** np.arange(i - 1, -1, -1), rtol=1e-12)
    assert not np.any(broken(jnp.full((LENGTH, LENGTH), -1e4)))


def test_of_certain_keys_the_newest_is_read():
    np.testing.assert_array_equal(broken(jnp.full((LENGTH, LENGTH), 1e4)), np.eye(LENGTH, k=-1))


def test_gradients_of_stick_breaking_are_those_of_the_closed_form():
    """`dz_ij = A_ij a_ij (1 - s_ij) - s_ij sum_(j' < j) A_ij' a_ij'` for gradients `a` of the weights."""
    scores, a = (3 * noise(LENGTH, LENGTH, seed=seed, dtype=jnp.float64) for seed in (0, 1))
    found = jax.grad(lambda scores: jnp.sum(a * broken(scores)))(scores)
    weighted, shares = np.asarray(broken(scores) * a), np.asarray(jax.nn.sigmoid(scores))
    before = np.cumsum(weighted, axis=1) - weighted
    expected = np.tril(weighted * (1 - shares) - shares * before, -1)
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)


class Latest(Module):
    """A map of one's own: the last key that is seen, whose place says which that is."""

    ordered = True

    def __init__(self, *, heads: int, rngs: nnx.Rngs):
        del heads, rngs


@pytest.mark.parametrize('weights', [StickBreaking, Latest])
@pytest.mark.parametrize('parts', [{'window': 3}, {'causal': False}])
def test_what_is_ordered_needs_all_keys_in_order(weights, parts):
    said = f'^{weights.__name__} needs all keys of a causal row, in order; give it causal=True and window=None$'
    with pytest.raises(UserError, match=said):
        Attention(8, heads=2, weights=weights, rngs=nnx.Rngs(0), **parts)
