"""The trigram model of the documents, by hand on a few bytes."""

import importlib.util
import math
import pathlib
from fractions import Fraction

import pytest

SCRIPT = pathlib.Path(__file__).parents[2] / 'scripts' / 'trigram.py'


@pytest.fixture(scope='module')
def trigram():
    made = importlib.util.spec_from_file_location('trigram', SCRIPT)
    module = importlib.util.module_from_spec(made)
    made.loader.exec_module(module)
    return module


def by_hand(train, asked, start):
    """`p` of every byte by the recursion as it is written, from lists of bytes."""
    docs = [[start] * 2 + list(document) for document in train]

    def p(context, byte):
        if context is None:
            return Fraction(1, 256)
        after = [doc[i] for doc in docs for i in range(2, len(doc)) if tuple(doc[i - len(context) : i]) == context]
        shorter = p(context[1:] if context else None, byte)
        kinds = len(set(after))
        return (after.count(byte) + kinds * shorter) / (len(after) + kinds) if after else shorter

    for document in asked:
        doc = [start] * 2 + list(document)
        yield from (p(tuple(doc[i - 2 : i]), doc[i]) for i in range(2, len(doc)))


def test_bits_are_those_of_the_recursion(trigram):
    train, asked = (b'abracadabra', b'abba', b''), (b'abcab', b'zz')
    chances = list(by_hand(train, asked, trigram.START))
    expected = -sum(math.log2(one) for one in chances) / len(chances)
    assert math.isclose(trigram.bits_per_byte(train, asked), expected)
