"""Rows that something is measured on lie all over their split."""

from unittest import mock

import numpy as np
import pytest

from attnlab.errors import UserError
from attnlab.train.rows import places_of, rows_of
from attnlab.train.setup import Setup


@pytest.fixture
def setup():
    rows = [{'tokens': np.array([i, i]), 'weights': np.float32(i)} for i in range(11)]
    made = mock.Mock(spec=Setup, length=2, task=mock.Mock())
    made.task.source.return_value = rows
    return made


def test_they_are_spread_and_stacked(setup):
    assert places_of(setup, 'train', 3) == [0, 5, 10] and places_of(setup, 'train', 11) == list(range(11))
    batches = rows_of(setup, 'train', 5, at_once=2)
    assert [batch['weights'].tolist() for batch in batches] == [[0, 2], [5, 7], [10]]
    assert batches[0]['tokens'].tolist() == [[0, 0], [2, 2]]


def test_more_than_there_are_is_named(setup):
    with pytest.raises(UserError, match='rows is 12; the train split has 11 rows of 2'):
        rows_of(setup, 'train', 12)
