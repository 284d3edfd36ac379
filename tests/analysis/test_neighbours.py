"""Nearest neighbours and the mixture with them, by hand."""

import sys

import numpy as np
import pytest

from attnlab.analysis.neighbours import Found, log_probabilities, mixed, nearest
from attnlab.errors import UserError


def test_the_nearest_states_and_what_came_after_them():
    pytest.importorskip('sklearn')
    keys = np.array([[0.0, 0], [3, 0], [0, 1]])
    found = nearest(keys, np.array([7, 8, 9]), np.array([[0.0, 0.25]]), 2)
    np.testing.assert_allclose(found.distances, [[0.0625, 0.5625]])
    assert found.values.tolist() == [[7, 9]]
    with pytest.raises(UserError, match='neighbours is 4; 3 hidden states are stored'):
        nearest(keys, np.array([7, 8, 9]), keys, 4)


def test_neighbours_that_agree_share_the_probability():
    found = Found(np.array([[0.0, 2.0, 4.0]]), np.array([[5, 6, 5]]))
    weights = np.exp([0.0, -1, -2])
    np.testing.assert_allclose(
        np.exp(log_probabilities(found, np.array([5]), 2.0)), (weights[0] + weights[2]) / weights.sum()
    )
    assert log_probabilities(found, np.array([1]), 2.0) == -np.inf


def test_a_mixture_of_both_is_one_of_probabilities():
    losses, neighbours = -np.log([0.5, 0.2]), np.log([0.1, 1.0])
    np.testing.assert_allclose(mixed(losses, neighbours, 0.25), -np.mean(np.log([0.4, 0.4])))
    # A target that no neighbour has costs the logarithm of the model's share.
    np.testing.assert_allclose(mixed(losses[:1], np.array([-np.inf]), 0.25), -np.log(0.75 * 0.5))


def test_without_its_extra_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, 'sklearn.neighbors', None)
    with pytest.raises(UserError, match=r'attnlab\[offline\]'):
        nearest(np.zeros((2, 1)), np.zeros(2, int), np.zeros((1, 1)), 1)
