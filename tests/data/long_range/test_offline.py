"""What there is without a network, and rows as a model takes them."""

import sys

import numpy as np
import pytest

from attnlab.config import build, spec
from attnlab.data.long_range.authorship import MODULES, Authorship
from attnlab.data.long_range.dataset import Kind
from attnlab.data.long_range.digits import Digits, _digits
from attnlab.data.long_range.rows import Chosen, Padded, blank, padded
from attnlab.data.text.stdlib import StdlibText
from attnlab.errors import UserError

from .probes import linear_probe


def test_digits():
    pytest.importorskip('sklearn')
    source = Digits()
    parts = {split: source.rows(split) for split in source.splits}
    assert {split: len(rows) for split, rows in parts.items()} == source.splits
    images = np.array([row['x'] for rows in parts.values() for row in rows])
    assert images.shape == (1797, 64) and images.dtype == np.uint8 and images.max() == 16
    assert len(np.unique(images, axis=0)) == 1797
    assert abs(images.mean() - source.kind.mean) < 1e-3 and abs(images.std() - source.kind.deviation) < 1e-3
    counts = np.bincount([row['label'] for row in parts['train']])
    assert len(counts) == 10 and counts.min() > 120
    # The labels belong to the images: a linear map of pixels finds nine in ten.
    labels = np.array([int(row['label']) for row in parts['train']])
    assert linear_probe(np.array([row['x'] for row in parts['train']], float), labels)[0] > 0.9


def test_larger_digits_repeat_their_pixels():
    pytest.importorskip('sklearn')
    large, small = (Digits(side).rows('valid')[7] for side in (32, 8))
    assert large['label'] == small['label'] and Digits(32).kind.length == 1024
    np.testing.assert_array_equal(large['x'].reshape(32, 32)[3::4, 2::4], small['x'].reshape(8, 8))
    assert large['x'].sum() == 16 * small['x'].sum()
    with pytest.raises(UserError, match='side of Digits is 20; it must be a multiple of 8'):
        Digits(20)


def test_without_the_library_the_extra_is_named(monkeypatch):
    _digits.cache_clear()
    monkeypatch.setitem(sys.modules, 'sklearn.datasets', None)
    with pytest.raises(UserError, match=r'pip install "attnlab\[offline\]"'):
        Digits().rows('train')
    with pytest.raises(UserError, match="has no split 'dev'"):
        Digits().rows('dev')


def test_authorship():
    source = Authorship(span=256)
    parts = {split: source.rows(split) for split in source.splits}
    texts = {split: {row['x'].tobytes() for row in rows} for split, rows in parts.items()}
    total = sum(len(rows) for rows in parts.values())
    assert sum(len(part) for part in texts.values()) == len(set.union(*texts.values())) == total > 5000
    assert all(len(row['x']) == 256 for row in parts['test'])
    for rows in parts.values():
        counts = np.bincount([row['label'] for row in rows], minlength=10)
        assert counts.min() > 0.9 * counts.max()
    # Every passage is in a file of its module, except where two files meet.
    content = dict.fromkeys(MODULES, b'')
    for split in ('train', 'valid'):
        for document in StdlibText().documents(split):
            module = document.name.split('/')[0].removesuffix('.py').lstrip('_')
            content[module] = content.get(module, b'') + b'\0' + document.content
    inside = [row['x'].tobytes() in content[MODULES[row['label']]] for row in parts['test']]
    assert np.mean(inside) > 0.9
    assert build(spec(Authorship, span=64)) == Authorship(64)
    with pytest.raises(UserError, match='span of Authorship is 8'):
        Authorship(span=8)


IDS = Kind(classes=3, length=4, vocab=257, offset=1)
NUMBERS = Kind(classes=3, length=4, mean=2.0, deviation=4.0)
PAIRS = Kind(classes=2, length=4, vocab=9, documents=2)


def test_ids_are_padded_and_cut_off():
    example = {'x': np.array([0, 255], np.uint8), 'label': np.int32(2)}
    row = padded(example, IDS, 3)
    assert row['tokens'].tolist() == [1, 256, 0] and row['segments'].tolist() == [1, 1, 0]
    assert row['positions'].tolist() == [0, 1, 0] and (row['label'], row['weights']) == (2, 1)
    assert padded(example, IDS, 1)['tokens'].tolist() == [1]
    assert {name: value.dtype for name, value in row.items()} == {
        'tokens': np.int32,
        'segments': np.int32,
        'positions': np.int32,
        'label': np.int32,
        'weights': np.float32,
    }


def test_numbers_are_standardised_and_their_padding_is_zero():
    row = padded({'x': np.array([0, 10], np.uint8), 'label': np.int32(0)}, NUMBERS, 3)
    assert row['tokens'].tolist() == [[-0.5], [2.0], [0.0]] and row['tokens'].dtype == np.float32


def test_a_pair_shares_a_row():
    pair = {'x': np.array([1, 2, 3]), 'second': np.array([4]), 'label': np.int32(1)}
    row = padded(pair, PAIRS, 4)
    assert row['tokens'].tolist() == [1, 2, 4, 0] and row['segments'].tolist() == [1, 1, 2, 0]
    assert row['positions'].tolist() == [0, 1, 0, 0]


@pytest.mark.parametrize('kind', [IDS, NUMBERS, PAIRS])
def test_a_blank_row_has_the_shapes_of_any(kind):
    example = {'x': np.arange(3), 'second': np.arange(2), 'label': np.int32(1)}
    row = Padded(Chosen([example], (0, 0)), kind, 4)[1]
    zeros = blank(kind, 4)
    assert not any(np.any(value) for value in zeros.values())
    assert {name: (np.shape(value), value.dtype) for name, value in zeros.items()} == {
        name: (np.shape(value), value.dtype) for name, value in row.items()
    }
