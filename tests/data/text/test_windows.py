import dataclasses

import numpy as np
import pytest

from attnlab.data.text.corpus import Text
from attnlab.data.text.tokenizers import Bytes
from attnlab.data.text.windows import UNITS, Sample, Windows
from attnlab.errors import UserError


class TwoBytesEach(Bytes):
    """Bytes, but for a table of lengths: id `i` stands for `i` bytes."""

    @property
    def token_bytes(self):
        return np.arange(256, dtype=np.int32)


def text(*lengths, tokenizer=None):
    tokens = np.arange(sum(lengths), dtype=np.uint8) + 10
    return Text(tokens, np.cumsum(lengths, dtype=np.int64), tokenizer or Bytes(), 'hash', {})


def test_a_row_by_hand():
    # Documents: 10 11 12 | 13 | 14 15 16 17 18 | 19 20
    windows = Windows(text(3, 1, 5, 2, tokenizer=TwoBytesEach()), 5)
    assert len(windows) == 2
    expected = {
        'tokens': [10, 11, 12, 13, 14],
        'targets': [11, 12, 13, 14, 15],
        'segments': [1, 1, 1, 2, 3],
        'positions': [0, 1, 2, 0, 0],
        'weights': [1, 1, 0, 0, 1],
        'bytes': [11, 12, 13, 14, 15],
    }
    row = windows[0]
    assert {name: values.tolist() for name, values in row.items()} == expected
    # It begins inside a document: positions count from the window, and segments from 1.
    row = windows[1]
    assert row['tokens'].tolist() == [15, 16, 17, 18, 19]
    assert row['segments'].tolist() == [1, 1, 1, 1, 2]
    assert row['positions'].tolist() == [0, 1, 2, 3, 0]
    assert row['weights'].tolist() == [1, 1, 1, 0, 1]


def test_types_and_shapes():
    for windows in (Windows(text(7), 3), Windows(text(7), 5, pad=True)):
        for row in windows:
            assert {name: (v.dtype.name, v.shape) for name, v in row.items()} == {
                'tokens': ('int32', (windows.length,)),
                'targets': ('int32', (windows.length,)),
                'segments': ('int32', (windows.length,)),
                'positions': ('int32', (windows.length,)),
                'weights': ('float32', (windows.length,)),
                'bytes': ('int32', (windows.length,)),
            }


def test_a_document_that_begins_with_the_window_and_one_that_ends_with_it():
    windows = Windows(text(4, 4, 1), 4)
    assert windows[1]['segments'].tolist() == [1, 1, 1, 1]
    assert windows[1]['positions'].tolist() == [0, 1, 2, 3]
    assert windows[0]['weights'].tolist() == windows[1]['weights'].tolist() == [1, 1, 1, 0]


def by_definition(text, length):
    """Each token's document, counted one by one."""
    documents = np.repeat(np.arange(len(text.ends)), np.diff(text.ends, prepend=0))
    for start in range(0, len(text) - length, length):
        inside = documents[start : start + length]
        segments = [1 + len(set(inside[: j + 1])) - 1 for j in range(length)]
        positions = [int(np.sum(inside[:j] == inside[j])) for j in range(length)]
        weights = [float(documents[start + j + 1] == documents[start + j]) for j in range(length)]
        yield segments, positions, weights


@pytest.mark.parametrize('length', [1, 2, 5, 16])
def test_against_the_definition_on_random_documents(length):
    rng = np.random.default_rng(length)
    corpus = text(*rng.integers(1, 9, size=30))
    windows = Windows(corpus, length)
    expected = list(by_definition(corpus, length))
    assert len(windows) == len(expected)
    for row, (segments, positions, weights) in zip(windows, expected, strict=True):
        assert row['segments'].tolist() == segments
        assert row['positions'].tolist() == positions
        assert row['weights'].tolist() == weights


@pytest.mark.parametrize('size', [9, 16, 17, 18, 40, 64, 65, 66])
@pytest.mark.parametrize('length', [4, 8, 16, 32, 100])
def test_padded_windows_predict_every_target_once_whatever_the_length(size, length):
    row = list(Windows(text(size), length, pad=True))
    targets = np.concatenate([w['targets'][w['weights'] > 0] for w in row])
    assert targets.tolist() == (np.arange(1, size) + 10).tolist()
    padding = np.concatenate([w['segments'] for w in row]) == 0
    for name in ('tokens', 'targets', 'positions', 'weights', 'bytes'):
        assert not np.concatenate([w[name] for w in row])[padding].any()
    assert not padding[: size - 1].any()
    assert padding[size - 1 :].all()


@pytest.mark.parametrize(('size', 'length', 'stride'), [(20, 8, 3), (21, 8, 4), (22, 8, 1), (9, 8, 2), (30, 5, 5)])
def test_overlapping_windows_predict_every_target_once_with_enough_before_it(size, length, stride):
    scored = []
    for index, row in enumerate(Windows(text(size), length, stride, pad=True)):
        counted = np.flatnonzero(row['weights'])
        scored += row['targets'][counted].tolist()
        assert index == 0 or counted[0] == length - stride
    assert scored == (np.arange(1, size) + 10).tolist()


def test_what_is_left_at_the_end_is_left_out_of_training():
    windows = Windows(text(12), 5)
    assert [row['tokens'][0] for row in windows] == [10, 15]
    with pytest.raises(IndexError):
        windows[2]
    with pytest.raises(IndexError):
        windows[-1]


def test_a_text_shorter_than_a_window_says_how_short():
    with pytest.raises(UserError, match=r'the text has 8 tokens and a window of length 8 needs 9; choose a shorter'):
        Windows(text(8), 8)
    assert len(Windows(text(9), 8)) == 1
    assert len(Windows(text(2), 8, pad=True)) == 1
    with pytest.raises(UserError, match='1 tokens'):
        Windows(text(1), 8, pad=True)


@pytest.mark.parametrize('stride', [0, 9, -1])
def test_strides_out_of_bounds(stride):
    with pytest.raises(UserError, match=f'stride is {stride}; it must be from 1 to .* 8'):
        Windows(text(30), 8, stride)


def test_rows_do_not_share_memory_with_the_text():
    corpus = text(10)
    row = Windows(corpus, 4)[0]
    row['tokens'][:] = 0
    assert corpus.tokens[0] == 10


def places(sample):
    """Where in the text the targets that count are, window after window."""
    return [row['targets'][row['weights'] > 0] - 10 for row in sample]


def test_a_sample_is_spread_over_all_documents():
    """A prefix of 60 of 200 tokens is of the first two documents; the sample has some of each."""
    corpus = text(*[40] * 5)
    sample = Sample(corpus, 4, tokens=60)
    assert not sample.whole and sample.documents == 5 and len(sample) == 15
    assert {int(document) for row in sample for document in row['documents']} == set(range(5))
    found = np.concatenate(places(sample))
    assert len(found) == len(set(found.tolist())) and found.max() > 190
    for row in sample:
        np.testing.assert_array_equal(row['documents'], (row['tokens'] - 10) // 40)
    again = Sample(corpus, 4, tokens=60)
    assert all((a['tokens'] == b['tokens']).all() for a, b in zip(sample, again, strict=True))


@pytest.mark.parametrize(('tokens', 'block'), [(16, 16), (50, 16), (63, 8), (7, 16), (198, 16), (10, 3)])
def test_blocks_are_apart_inside_the_text_and_the_same_for_every_length(tokens, block):
    corpus = text(200)
    found = [np.sort(np.concatenate(places(Sample(corpus, length, tokens, block)))) for length in (2, 4, 16)]
    assert len(found[0]) == tokens // min(block, tokens) * min(block, tokens)
    assert len(set(found[0].tolist())) == len(found[0])
    for other in found[1:]:
        np.testing.assert_array_equal(other, found[0])
    strided = np.sort(np.concatenate(places(Sample(corpus, 4, tokens, block, stride=2))))
    np.testing.assert_array_equal(strided, found[0])


@pytest.mark.parametrize('tokens', [None, 29, 1000])
def test_a_sample_of_everything_is_every_window(tokens):
    corpus = text(10, 20)
    sample, windows = Sample(corpus, 8, tokens, block=16), Windows(corpus, 8, pad=True)
    assert sample.whole and sample.documents == 2 and len(sample) == len(windows)
    for row, expected in zip(sample, windows, strict=True):
        assert row.keys() - expected.keys() == {'documents'}
        assert all((row[name] == expected[name]).all() for name in expected)


def test_what_is_wrong_with_a_sample():
    with pytest.raises(UserError, match='tokens of a sample is 0'):
        Sample(text(20), 4, 0)
    with pytest.raises(UserError, match='stride is 5'):
        Sample(text(20), 4, 8, stride=5)
    with pytest.raises(IndexError):
        Sample(text(20), 4, 8)[2]
    assert UNITS == 1024, 'what programs that evaluate are compiled for'


def test_a_token_that_the_tokenizer_does_not_know_is_named():
    damaged = dataclasses.replace(text(9), tokens=np.arange(10, 19, dtype=np.uint16))
    damaged.tokens[7] = 300
    assert Windows(damaged, 4)[0]['tokens'].tolist() == [10, 11, 12, 13]
    with pytest.raises(UserError, match=r'window 1 of the text has a token 300, and its tokenizer knows 256; if it is'):
        Windows(damaged, 4)[1]
