"""Text corpora: named documents at the source; when loaded, one flat array of tokens with document ends."""

import abc
import array
import dataclasses
import hashlib
import json
import mmap
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from absl import logging
from jaxtyping import Int64, UInt

from attnlab.data import cache
from attnlab.data.archives import UNREADABLE
from attnlab.data.text.tokenizers import Tokenizer, Untrained, ids_dtype, load_tokenizer, save_tokenizer
from attnlab.errors import UserError, nearest

GROUP = 4 * 2**20
"""Documents are encoded in groups of about this many bytes: many small ones together, a large one alone."""


class Document(NamedTuple):
    """One document of a corpus: a name that is the same on every machine, and its bytes."""

    name: str
    content: bytes


@dataclasses.dataclass(frozen=True, eq=False)
class Text:
    """The tokens of one split, document after document.

    Attributes:
      tokens: the ids, `t`, in memory or mapped from a file; every document in it has at least one.
      ends: where each document ends, cumulative: document `i` is `tokens[ends[i - 1]:ends[i]]`.
      tokenizer: the tokenizer of the ids.
      content_hash: SHA-256 over the names and bytes of the documents, independent of the tokenizer.
      provenance: the record of all this for run.json.
    """

    tokens: UInt[np.ndarray, 't']
    ends: Int64[np.ndarray, '_']
    tokenizer: Tokenizer
    content_hash: str
    provenance: dict[str, Any]

    def __len__(self) -> int:
        return len(self.tokens)

    def part(self, start: int, stop: int) -> 'Text':
        """The tokens from `start` to `stop`, and the ends of the documents among them."""
        first, last = np.searchsorted(self.ends, (start, stop), side='right')
        inside = self.ends[first:last]
        ends = inside if len(inside) and inside[-1] == stop else np.append(inside, stop)
        part = {'part': [start, stop]}
        return dataclasses.replace(
            self, tokens=self.tokens[start:stop], ends=ends - start, provenance=self.provenance | part
        )

    def head(self, length: int) -> 'Text':
        """The first `length` tokens of this text, or all of it if it has no more."""
        length = min(length, len(self))
        ends = np.append(self.ends[: np.searchsorted(self.ends, length)], length)
        return dataclasses.replace(
            self, tokens=self.tokens[:length], ends=ends, provenance=self.provenance | {'head': length}
        )

    def __getstate__(self) -> dict[str, Any]:
        """Pickles a mapped file by its path, so that a worker process maps it instead of receiving its content."""
        if isinstance(self.tokens, np.memmap) and isinstance(self.tokens.base, mmap.mmap):
            return self.__dict__ | {'tokens': pathlib.Path(self.tokens.filename)}
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        if isinstance(state['tokens'], pathlib.Path):
            state = state | {'tokens': np.load(state['tokens'], mmap_mode='r')}
        self.__dict__.update(state)


class Corpus(abc.ABC):
    """A corpus in a config: a frozen dataclass that reads nothing until its documents are requested.

    Attributes:
      cache: folder for trained tokenizers and token ids, keyed by content; `None`: no caching.
    """

    cache: str | None

    @property
    @abc.abstractmethod
    def splits(self) -> tuple[str, ...]:
        """The names of its splits; `train` is among them."""

    @abc.abstractmethod
    def documents(self, split: str) -> Iterator[Document]:
        """The documents of a split, always in the same order.

        Raises `UserError`, naming the path, for a corpus that is missing or cannot be read.
        """

    @abc.abstractmethod
    def describe(self) -> dict[str, Any]:
        """A record of the source and its splits for run.json."""

    def fingerprint(self, split: str) -> str:
        """The identity of a split's documents in the cache: equal fingerprints imply equal documents."""
        return content_hash(self.documents(split))

    def load(self, split: str, tokenizer: Tokenizer | Untrained) -> Text:
        """The tokens of a split. An untrained tokenizer is first trained on `train`, for any split.

        Raises `UserError` for an unknown split, a corpus that is missing, empty or unreadable, a cache that cannot be
        written, and for text that the tokenizer rejects.
        """
        if split not in self.splits:
            raise UserError(f'{type(self).__name__} has no split {split!r}{nearest(split, self.splits)}')
        tokenizer = self._trained(tokenizer)
        if self.cache is None:
            tokens = _Tokens(self.documents(split), tokenizer)
            ids = np.concatenate([np.empty(0, ids_dtype(tokenizer.vocab)), *tokens])
            return self._text(split, tokenizer, ids, np.array(tokens.ends, np.int64), tokens.tally())
        fingerprint = self.fingerprint(split)
        entry = pathlib.Path(self.cache).expanduser() / cache.key(fingerprint, tokenizer.hash)
        if not entry.is_dir():
            self._fill(entry, split, tokenizer, fingerprint)
        try:
            ids = np.load(entry / 'tokens.npy', mmap_mode='r')
            ends = np.load(entry / 'ends.npy')
            tally = json.loads((entry / 'text.json').read_text())
            _check_entry(ids, ends, tally)
        except (*UNREADABLE, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(
                f'the cache entry {entry} is damaged; delete it, and it will be made again: {error}'
            ) from error
        return self._text(split, tokenizer, ids, ends, tally)

    def _trained(self, tokenizer: Tokenizer | Untrained) -> Tokenizer:
        if not isinstance(tokenizer, Untrained):
            return tokenizer
        if self.cache is None:
            return tokenizer.train(document.content for document in self.documents('train'))
        name = f'{cache.key(self.fingerprint("train"), repr(tokenizer))}.tokenizer.json'
        path = pathlib.Path(self.cache).expanduser() / name
        if not path.exists():
            logging.info('training %s for %s', tokenizer, path)
            save_tokenizer(tokenizer.train(document.content for document in self.documents('train')), path)
        return load_tokenizer(path)

    def _fill(self, entry: pathlib.Path, split: str, tokenizer: Tokenizer, fingerprint: str) -> None:
        logging.info('tokenising %s of %s into %s', split, self, entry)
        tokens = _Tokens(self.documents(split), tokenizer)
        with cache.new_folder(entry) as folder:
            cache.write_array(folder / 'tokens.npy', tokens, ids_dtype(tokenizer.vocab))
            cache.write_array(folder / 'ends.npy', [np.array(tokens.ends, np.int64)], np.dtype(np.int64))
            cache.write_file(folder / 'text.json', json.dumps(tokens.tally(), indent=2) + '\n')
            if self.fingerprint(split) != fingerprint:
                raise UserError(f'{self} changed while it was being read; start again when it no longer changes')

    def _text(self, split: str, tokenizer: Tokenizer, ids: np.ndarray, ends: np.ndarray, tally: dict[str, Any]) -> Text:
        if not len(ids):
            raise UserError(f'the split {split!r} of {self} holds no text')
        provenance = self.describe() | {'split': split, **tally, 'tokenizer': tokenizer.describe()}
        return Text(ids, ends, tokenizer, tally['content_hash'], provenance)


class _Tokens:
    """The token arrays of documents, one by one, with running totals; empty documents are ignored."""

    def __init__(self, documents: Iterable[Document], tokenizer: Tokenizer) -> None:
        self._documents, self._tokenizer = documents, tokenizer
        self._hash, self._bytes = hashlib.sha256(), 0
        self.ends = array.array('q')

    def __iter__(self) -> Iterator[UInt[np.ndarray, '_']]:
        length = 0
        for group in _groups(self._documents):
            for document in group:
                _absorb(self._hash, document)
                self._bytes += len(document.content)
            for ids in self._tokenizer.encode([document.content for document in group if document.content]):
                length += len(ids)
                self.ends.append(length)
                yield ids

    def tally(self) -> dict[str, Any]:
        return {
            'content_hash': self._hash.hexdigest(),
            'documents': len(self.ends),
            'bytes': self._bytes,
            'tokens': self.ends[-1] if self.ends else 0,
        }


def _check_entry(ids: Any, ends: Any, tally: Any) -> None:
    """Raises `ValueError` or another error of Python for arrays that are not those of the record beside them."""
    documents, tokens, known = (tally[name] for name in ('documents', 'tokens', 'content_hash'))
    if ids.dtype.kind != 'u' or ids.shape != (tokens,):
        raise ValueError(f'tokens.npy holds {ids.dtype} {ids.shape}, and text.json says {tokens} tokens')
    if ends.dtype != np.int64 or ends.shape != (documents,):
        raise ValueError(f'ends.npy holds {ends.dtype} {ends.shape}, and text.json says {documents} documents')
    if (np.diff(ends, prepend=0) < 0).any() or (ends[-1] if documents else 0) != tokens:
        raise ValueError(f'ends.npy does not ascend to {tokens}')
    if not isinstance(known, str):
        raise TypeError(f'content_hash is {known!r}')


def content_hash(documents: Iterable[Document]) -> str:
    """SHA-256, in hexadecimal, over name, NUL, content, NUL of every document in turn."""
    digest = hashlib.sha256()
    for document in documents:
        _absorb(digest, document)
    return digest.hexdigest()


def _absorb(digest: 'hashlib._Hash', document: Document) -> None:
    # A name that is no UTF-8 holds its bytes as surrogates.
    digest.update(document.name.encode(errors='surrogateescape') + b'\0')
    digest.update(document.content)
    digest.update(b'\0')


def _groups(documents: Iterable[Document]) -> Iterator[list[Document]]:
    group, size = [], 0
    for document in documents:
        group.append(document)
        size += len(document.content)
        if size >= GROUP:
            yield group
            group, size = [], 0
    yield group
