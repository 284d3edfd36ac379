"""Long tails: how many of every class are kept, and that nothing else changes."""

import numpy as np
import pytest

from attnlab.data.long_range.digits import Digits
from attnlab.data.long_range.long_tailed import LongTailed
from attnlab.errors import UserError


def labels(rows):
    return np.array([rows[index]['label'] for index in range(len(rows))])


def test_classes_have_geometrically_fewer_examples():
    whole, kept = (np.bincount(labels(data.rows('train')), minlength=10) for data in (Digits(), LongTailed(ratio=50.0)))
    np.testing.assert_array_equal(kept, np.maximum(1, np.round(whole * 50.0 ** (-np.arange(10) / 9))))
    assert kept[0] == whole[0] and kept[9] == round(whole[9] / 50)
    assert len(LongTailed(ratio=1.0).rows('train')) == 1437 and labels(LongTailed(ratio=1e6).rows('train')).max() == 9


def test_seeds_choose_and_other_splits_are_whole():
    one, other = (LongTailed(seed=seed).rows('train').indices for seed in (0, 1))
    assert one == LongTailed(seed=0).rows('train').indices != other and len(one) == len(other)
    np.testing.assert_array_equal(labels(LongTailed().rows('test')), labels(Digits().rows('test')))
    assert LongTailed().describe() == {**Digits().describe(), 'ratio': 50.0, 'chosen': 0}


def test_a_ratio_below_one_is_named():
    with pytest.raises(UserError, match=r'ratio of LongTailed is 0\.5; it must be at least 1'):
        LongTailed(ratio=0.5)
