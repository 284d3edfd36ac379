import concurrent.futures
import dataclasses
import errno
import hashlib
import json
import os
import pathlib
import pickle
import re
import shutil
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from attnlab.data import cache
from attnlab.data.text import corpus
from attnlab.data.text.corpus import Corpus, Document, Text, content_hash
from attnlab.data.text.tokenizers import BytePairs, Bytes
from attnlab.errors import UserError

WORDS = b'one two three four five six seven eight nine ten eleven twelve ' * 20
DOCUMENTS = {
    'train': [Document('a', WORDS), Document('b', b''), Document('c', WORDS[7:99])],
    'valid': [Document('d', b'twelve eleven')],
}
PAIRS = BytePairs(270)


@dataclasses.dataclass(frozen=True)
class Given(Corpus):
    """The documents above."""

    cache: str | None = None

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(DOCUMENTS)

    def documents(self, split: str) -> Iterator[Document]:
        return iter(DOCUMENTS[split])

    def describe(self) -> dict[str, Any]:
        return {'source': 'given'}


@dataclasses.dataclass(frozen=True)
class Counted(Given):
    """Tells how often its documents were read, in a file."""

    log: str = ''

    def documents(self, split: str) -> Iterator[Document]:
        with pathlib.Path(self.log).open('a') as log:
            log.write(f'{split}\n')
        return super().documents(split)

    def fingerprint(self, split: str) -> str:
        return split


@pytest.mark.parametrize('cached', [False, True])
@pytest.mark.parametrize('tokenizer', [Bytes(), PAIRS])
def test_a_text_is_its_documents_end_to_end(tokenizer, cached, tmp_path):
    text = Given(str(tmp_path) if cached else None).load('train', tokenizer)
    assert isinstance(text.tokens, np.memmap) == cached
    assert text.tokens.dtype == (np.uint8 if tokenizer == Bytes() else np.uint16)
    assert text.tokenizer.decode(text.tokens) == WORDS + WORDS[7:99]
    assert text.ends.dtype == np.int64
    pieces = np.split(text.tokens, text.ends)
    # The empty document is none.
    assert [text.tokenizer.decode(piece) for piece in pieces] == [WORDS, WORDS[7:99], b'']


def test_provenance_is_complete_and_survives_json(tmp_path):
    text = Given(str(tmp_path)).load('train', PAIRS)
    expected = hashlib.sha256(b'a\0' + WORDS + b'\0' + b'b\0\0' + b'c\0' + WORDS[7:99] + b'\0').hexdigest()
    assert text.content_hash == expected == content_hash(DOCUMENTS['train'])
    assert json.loads(json.dumps(text.provenance)) == {
        'source': 'given',
        'split': 'train',
        'content_hash': expected,
        'documents': 2,
        'bytes': len(WORDS) + 92,
        'tokens': len(text),
        'tokenizer': {'kind': 'byte pairs', 'vocab': 270, 'hash': text.tokenizer.hash},
    }


def test_byte_pairs_are_trained_on_train_whatever_the_split(tmp_path):
    for folder in (None, str(tmp_path)):
        train, valid = (Given(folder).load(split, PAIRS) for split in ('train', 'valid'))
        assert valid.tokenizer == train.tokenizer == PAIRS.train([WORDS, WORDS[7:99]])
        assert valid.tokenizer.decode(valid.tokens) == b'twelve eleven'


def test_a_trained_tokenizer_is_taken_as_it_is():
    trained = BytePairs(260).train([b'eleven ' * 20])
    assert Given().load('valid', trained).tokenizer is trained


def test_the_second_load_reads_no_documents(tmp_path):
    log = tmp_path / 'log'
    source = Counted(str(tmp_path / 'cache'), log=str(log))
    first = source.load('valid', PAIRS)
    assert log.read_text().split() == ['train', 'valid']
    second = source.load('valid', PAIRS)
    assert log.read_text().split() == ['train', 'valid']
    assert np.array_equal(first.tokens, second.tokens)
    assert np.array_equal(first.ends, second.ends)
    assert first.provenance == second.provenance


def test_equal_content_shares_its_entry_and_other_content_or_tokenizers_do_not(tmp_path, monkeypatch):
    def entries():
        return sum(path.is_dir() for path in tmp_path.iterdir())

    Given(str(tmp_path)).load('train', Bytes())
    Given(str(tmp_path)).load('train', Bytes())
    assert entries() == 1
    Given(str(tmp_path)).load('train', PAIRS)
    assert entries() == 2
    monkeypatch.setitem(DOCUMENTS, 'train', [Document('a', WORDS)])
    assert len(Given(str(tmp_path)).load('train', Bytes())) == len(WORDS)
    assert entries() == 3


def test_unknown_splits_and_splits_without_text(monkeypatch):
    with pytest.raises(UserError, match="Given has no split 'vlaid'; did you mean 'valid'"):
        Given().load('vlaid', Bytes())
    monkeypatch.setitem(DOCUMENTS, 'valid', [Document('d', b'')])
    with pytest.raises(UserError, match=r"'valid' of Given.* holds no text"):
        Given().load('valid', Bytes())


def test_a_source_that_changes_while_it_is_read_is_not_cached(tmp_path, monkeypatch):
    class Changing(Given):
        def fingerprint(self, split):
            return str(len(list(tmp_path.rglob('*'))))

    with pytest.raises(UserError, match='changed while it was being read'):
        Changing(str(tmp_path)).load('train', Bytes())
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_entry_is_named(tmp_path):
    Given(str(tmp_path)).load('train', Bytes())
    (entry,) = tmp_path.iterdir()
    for name in ('tokens.npy', 'ends.npy', 'text.json'):
        content = (entry / name).read_bytes()
        (entry / name).write_bytes(content[: len(content) // 2])
        with pytest.raises(UserError, match=f'cache entry {entry} is damaged; delete it'):
            Given(str(tmp_path)).load('train', Bytes())
        (entry / name).write_bytes(content)
    shutil.rmtree(entry)
    assert len(Given(str(tmp_path)).load('train', Bytes())) == len(WORDS) + 92


@pytest.mark.parametrize(
    ('name', 'content'),
    [
        ('tokens.npy', np.zeros(5)),
        ('tokens.npy', np.zeros(5, np.uint8)),
        ('tokens.npy', np.zeros((len(WORDS) + 92, 1), np.uint8)),
        ('ends.npy', np.array([3])),
        ('ends.npy', np.array([3, 5])),
        ('ends.npy', np.array([len(WORDS) + 100, len(WORDS) + 92])),
        ('ends.npy', np.array([len(WORDS), len(WORDS) + 92.0])),
        ('text.json', '{}'),
        ('text.json', '[]'),
        ('text.json', '7'),
        ('text.json', '{"documents": 2, "tokens": 1352}'),
        pytest.param('text.json', '[' * 100_000, id='nested'),
    ],
)
def test_an_entry_that_contradicts_itself_is_named(tmp_path, name, content):
    Given(str(tmp_path)).load('train', Bytes())
    (entry,) = tmp_path.iterdir()
    if isinstance(content, str):
        (entry / name).write_text(content)
    else:
        np.save(entry / name, content)
    with pytest.raises(UserError, match=f'cache entry {entry} is damaged; delete it'):
        Given(str(tmp_path)).load('train', Bytes())


def test_an_entry_without_text_is_not_damaged(tmp_path, monkeypatch):
    monkeypatch.setitem(DOCUMENTS, 'valid', [Document('d', b'')])
    for _ in range(2):
        with pytest.raises(UserError, match=r"'valid' of Given.* holds no text"):
            Given(str(tmp_path)).load('valid', Bytes())


def test_a_mapped_text_is_pickled_as_its_path(tmp_path):
    text = Given(str(tmp_path)).load('train', Bytes())
    assert len(pickle.dumps(text)) < len(text)
    again = pickle.loads(pickle.dumps(text))
    assert isinstance(again.tokens, np.memmap)
    assert np.array_equal(again.tokens, text.tokens)
    # A part of a mapped text is not the file.
    part = pickle.loads(pickle.dumps(text.head(70)))
    assert part.tokens.tobytes() == WORDS[:70]
    held = Given().load('train', Bytes())
    assert np.array_equal(pickle.loads(pickle.dumps(held)).tokens, held.tokens)


@pytest.mark.parametrize(
    ('length', 'ends'),
    [(1, [1]), (4, [4]), (5, [5]), (6, [5, 6]), (8, [5, 8]), (9, [5, 8, 9]), (12, [5, 8, 12]), (99, [5, 8, 12])],
)
def test_the_head_of_a_text_ends_its_last_document(length, ends):
    text = Text(np.arange(12, dtype=np.uint8), np.array([5, 8, 12]), Bytes(), 'hash', {'source': 'x'})
    head = text.head(length)
    assert head.tokens.tolist() == list(range(min(length, 12)))
    assert head.ends.tolist() == ends
    assert head.provenance == {'source': 'x', 'head': min(length, 12)}


def test_documents_are_encoded_in_groups_with_the_same_result(monkeypatch):
    whole = Given().load('train', PAIRS)
    monkeypatch.setattr(corpus, 'GROUP', 1)
    single = Given().load('train', PAIRS)
    assert np.array_equal(whole.tokens, single.tokens)
    assert np.array_equal(whole.ends, single.ends)
    assert whole.content_hash == single.content_hash


def test_writers_at_the_same_time_do_not_disturb_each_other(tmp_path):
    barrier = threading.Barrier(4)

    def load(_):
        barrier.wait()
        return Given(str(tmp_path)).load('train', PAIRS).tokens.tolist()

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        loaded = list(pool.map(load, range(4)))
    assert loaded == [Given().load('train', PAIRS).tokens.tolist()] * 4
    assert len(list(tmp_path.iterdir())) == 2


def test_an_entry_made_by_someone_else_meanwhile_stays(tmp_path):
    with cache.new_folder(tmp_path / 'entry') as folder:
        (folder / 'mine').touch()
        (tmp_path / 'entry').mkdir()
        (tmp_path / 'entry' / 'theirs').touch()
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob('*')] == ['entry', 'entry/theirs']


class Filling:
    """A file on a disk that has room for so many more writes, and for half of the one after that."""

    room = 0

    def __init__(self, file):
        self.file = file

    def write(self, content):
        Filling.room -= 1
        if Filling.room >= 0:
            return self.file.write(content)
        self.file.write(content[: len(content) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def __getattr__(self, name):
        return getattr(self.file, name)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.file.close()


def test_a_full_disk_leaves_nothing_half_written(tmp_path, monkeypatch):
    source, path_open = Given(str(tmp_path)), pathlib.Path.open
    monkeypatch.setattr(pathlib.Path, 'open', lambda *a, **k: Filling(f) if (f := path_open(*a, **k)).writable() else f)
    for writes in range(30):
        Filling.room = writes
        try:
            source.load('train', PAIRS)
            break
        except UserError as error:
            message = rf'cannot write to {tmp_path}: No space left on device; make room or name another folder'
            assert re.fullmatch(message, str(error))
        # Nothing but a finished tokenizer is ever there.
        assert all(path.name.endswith('.tokenizer.json') for path in tmp_path.iterdir())
    # Tokenizer, tokens, ends and record, and headers among them.
    assert writes >= 6
    monkeypatch.undo()
    assert np.array_equal(source.load('train', PAIRS).tokens, Given().load('train', PAIRS).tokens)


@pytest.mark.skipif(sys.platform == 'win32', reason='there are no such limits')
def test_a_file_that_cannot_grow_leaves_nothing_half_written(tmp_path, monkeypatch):
    import resource

    monkeypatch.setitem(DOCUMENTS, 'train', [Document('long', b'x' * 2**20)])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limits[1]))
    try:
        with pytest.raises(UserError, match=rf'cannot write to {tmp_path}: File too large; make room'):
            Given(str(tmp_path)).load('train', Bytes())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / 'file').touch()
    with pytest.raises(
        UserError, match=rf'cannot write to {tmp_path}/file: Not a directory; make room or name another'
    ):
        Given(str(tmp_path / 'file')).load('train', Bytes())
