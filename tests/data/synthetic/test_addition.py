"""The table of an addition: every sum once, in one split."""

import numpy as np
import pytest

from attnlab.data.synthetic.addition import ModularAddition
from attnlab.errors import UserError


def operands(table, split):
    sums = table.sums(split)
    return {tuple(sums[index]['tokens'].tolist()) for index in range(len(sums))}


def test_splits_are_disjoint_and_complete():
    table = ModularAddition(modulus=7, share=0.4)
    train, test = operands(table, 'train'), operands(table, 'test')
    assert len(train) == len(table.sums('train')) == 20 and len(test) == len(table.sums('test')) == 29
    assert not train & test
    assert train | test == {(a, b) for a in range(7) for b in range(7)}


def test_sums_are_right():
    sums = ModularAddition(modulus=11).sums('test')
    for row in (sums[index] for index in range(len(sums))):
        assert row['target'] == row['tokens'].sum() % 11 and row['weights'] == 1
        assert (row['tokens'].dtype, row['target'].dtype, row['weights'].dtype) == (np.int32, np.int32, np.float32)


def test_the_seed_decides_and_nothing_else():
    assert operands(ModularAddition(modulus=7), 'train') == operands(ModularAddition(modulus=7), 'train')
    assert operands(ModularAddition(modulus=7, seed=1), 'train') != operands(ModularAddition(modulus=7), 'train')


def test_there_is_no_sum_beyond_the_last():
    with pytest.raises(IndexError, match='sum 20 of 20'):
        ModularAddition(modulus=7).sums('train')[20]


@pytest.mark.parametrize(
    ('made', 'message'),
    [
        (
            lambda: ModularAddition(modulus=1),
            'modulus of ModularAddition is 1; it must be a whole number of at least 2',
        ),
        (
            lambda: ModularAddition(modulus=3, share=0.01),
            'share of ModularAddition is 0.01; it leaves one of the splits',
        ),
        (lambda: ModularAddition(share=1.0), 'share of ModularAddition is 1.0; it leaves one of the splits'),
        (lambda: ModularAddition(seed=-1), 'seed of ModularAddition is -1'),
        (lambda: ModularAddition().sums('valid'), "ModularAddition has no split 'valid'"),
    ],
)
def test_what_makes_no_sense_is_refused(made, message):
    with pytest.raises(UserError, match=message):
        made()
