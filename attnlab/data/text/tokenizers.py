"""Tokenizers: text as bytes in, token ids out, and back again without loss.

A tokenizer knows how many bytes each of its ids stands for, so that losses can be given in bits per byte, which are
comparable across tokenizers.
"""

import codecs
import dataclasses
import functools
import hashlib
import itertools
import json
import pathlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int32, Integer, UInt

from attnlab.data import cache
from attnlab.errors import UserError, optional
from attnlab.files import read_text

PIECE = 2**20
"""Texts longer than this many bytes are encoded piece by piece, each cut after a line's end, to bound memory."""

LONG = re.compile(r'\w{4096}|[\W_]{4096}')
"""What tokenizers are not trained on in one: merging takes time quadratic in the length of the longest word.

Words of byte-level BPE, which are letters, digits, other characters or spaces alone, are of either kind.
"""


@runtime_checkable
class Tokenizer(Protocol):
    """A map from bytes to token ids and back."""

    @property
    def vocab(self) -> int:
        """Number of ids; they run from 0."""

    @property
    def token_bytes(self) -> Int32[np.ndarray, 'o']:
        """The number of bytes that each id stands for."""

    @property
    def hash(self) -> str:
        """The identity of the encoding: equal hashes imply equal ids."""

    def encode(self, contents: Sequence[bytes]) -> list[UInt[np.ndarray, '_']]:
        """The ids of every text of a list. Raises `UserError` for a text it cannot represent."""

    def decode(self, ids: Integer[np.ndarray, 't'] | Sequence[int]) -> bytes:
        """The bytes that `ids`, any ids, stand for."""

    def describe(self) -> dict[str, Any]:
        """A record of the tokenizer for run.json."""


@runtime_checkable
class Untrained(Protocol):
    """A tokenizer that must be trained on text first."""

    @property
    def vocab(self) -> int:
        """Number of ids it will have."""

    def train(self, contents: Iterable[bytes]) -> Tokenizer:
        """The tokenizer trained on `contents`, a pure function of them."""


@dataclasses.dataclass(frozen=True)
class Bytes:
    """Every byte is its own token: 256 ids, no training, any content."""

    @property
    def vocab(self) -> int:
        return 256

    @property
    def token_bytes(self) -> Int32[np.ndarray, 'o']:
        return np.ones(256, np.int32)

    @property
    def hash(self) -> str:
        return hashlib.sha256(b'bytes').hexdigest()

    def encode(self, contents: Sequence[bytes]) -> list[UInt[np.ndarray, '_']]:
        return [np.frombuffer(content, np.uint8) for content in contents]

    def decode(self, ids: Integer[np.ndarray, 't'] | Sequence[int]) -> bytes:
        return bytes(np.asarray(ids, np.uint8))

    def describe(self) -> dict[str, Any]:
        return {'kind': 'bytes', 'vocab': self.vocab, 'hash': self.hash}


@dataclasses.dataclass(frozen=True)
class BytePairs:
    """Byte-level byte-pair encoding, to be trained on the `train` split (Sennrich et al. 2016; Radford et al. 2019).

    The 256 bytes are the first tokens, so any UTF-8 text has an exact encoding; the most frequent neighbours are then
    merged until there are `vocab` tokens. Needs the extra `bpe`.

    Attributes:
      vocab: number of tokens, at least 256.
      train_bytes: how much of the `train` split, from its beginning, it is trained on, to the end of the document in
        which that is reached, or of a part of about 1 MiB of a longer one.
    """

    vocab: int = 4096
    train_bytes: int = 32 * 2**20

    def train(self, contents: Iterable[bytes]) -> 'TrainedBytePairs':
        """The tokenizer trained on `contents` up to `train_bytes`, see there; deterministic.

        Runs of more than 4096 characters without a break, such as of DNA, are taken in parts.

        Raises `UserError` for text that is not UTF-8, or too little of it to fill the vocabulary.
        """
        if self.vocab < 256:
            raise UserError(f'vocab of BytePairs is {self.vocab}; the single bytes alone are 256 tokens')
        library, tokenizer = _library(), _untrained()
        alphabet = library.pre_tokenizers.ByteLevel.alphabet()
        trainer = library.trainers.BpeTrainer(vocab_size=self.vocab, initial_alphabet=alphabet, show_progress=False)
        tokenizer.train_from_iterator(_head(contents, self.train_bytes), trainer)
        reached = tokenizer.get_vocab_size()
        if reached < self.vocab:
            raise UserError(f'vocab of BytePairs is {self.vocab}, but the training text yields only {reached} tokens')
        return TrainedBytePairs(self.vocab, tokenizer.to_str())


@dataclasses.dataclass(frozen=True)
class TrainedBytePairs:
    """The tokenizer that `BytePairs.train` returns.

    Attributes:
      vocab: number of tokens.
      definition: the merges, in the JSON format of the `tokenizers` library.
    """

    vocab: int
    definition: str = dataclasses.field(repr=False)

    @functools.cached_property
    def token_bytes(self) -> Int32[np.ndarray, 'o']:
        return np.array([len(token) for token in self._tokens], np.int32)

    @functools.cached_property
    def hash(self) -> str:
        return hashlib.sha256(self.definition.encode()).hexdigest()

    def encode(self, contents: Sequence[bytes]) -> list[UInt[np.ndarray, '_']]:
        """The ids of every text of a list. Raises `UserError` for a text that is not UTF-8."""
        pieces = [list(_pieces(content)) for content in contents]
        encodings = iter(self._encoder.encode_batch_fast([piece for row in pieces for piece in row]))
        none = np.empty(0, ids_dtype(self.vocab))
        return [np.concatenate([none, *(np.array(next(encodings).ids, none.dtype) for _ in row)]) for row in pieces]

    def decode(self, ids: Integer[np.ndarray, 't'] | Sequence[int]) -> bytes:
        return b''.join(self._tokens[index] for index in ids)

    def describe(self) -> dict[str, Any]:
        return {'kind': 'byte pairs', 'vocab': self.vocab, 'hash': self.hash}

    @functools.cached_property
    def _encoder(self) -> Any:
        return _library().Tokenizer.from_str(self.definition)

    @functools.cached_property
    def _tokens(self) -> list[bytes]:
        spelled = json.loads(self.definition)['model']['vocab']
        to_byte = _alphabet()
        return [bytes(to_byte[c] for c in token) for token in sorted(spelled, key=spelled.__getitem__)]


class StreamDecoder:
    """Decodes tokens as they are generated, holding back bytes until they complete a character.

    Bytes that are not UTF-8 become U+FFFD. The pieces joined equal the result of decoding everything at once.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder('utf-8')(errors='replace')

    def feed(self, ids: Integer[np.ndarray, 't'] | Sequence[int]) -> str:
        """The characters that `ids` complete."""
        return self._decoder.decode(self._tokenizer.decode(ids))

    def finish(self) -> str:
        """Returns the replacement of an incomplete character at the end of the stream, and resets."""
        rest = self._decoder.decode(b'', final=True)
        self._decoder.reset()
        return rest


def save_tokenizer(tokenizer: Tokenizer, path: pathlib.Path) -> None:
    """Writes a tokenizer of this module as JSON, atomically. Raises `UserError` for any other."""
    if not isinstance(tokenizer, Bytes | TrainedBytePairs):
        raise UserError(
            f'{type(tokenizer).__name__} is no tokenizer that can be saved; take one of attnlab.data.text.tokenizers'
        )
    fields = tokenizer.describe()
    if isinstance(tokenizer, TrainedBytePairs):
        fields['definition'] = tokenizer.definition
    cache.write_file(path, json.dumps(fields, ensure_ascii=False, indent=2) + '\n')


def load_tokenizer(path: pathlib.Path) -> Bytes | TrainedBytePairs:
    """Reads what `save_tokenizer` wrote. Raises `UserError` naming the file where it is missing, damaged or altered."""
    try:
        fields = json.loads(read_text(path))
        tokenizer = Bytes() if fields['kind'] == 'bytes' else _byte_pairs(fields['vocab'], fields['definition'])
        if tokenizer.hash != fields['hash']:
            raise UserError(f'the tokenizer {path} was altered since it was written: its hash is not {fields["hash"]}')
        if isinstance(tokenizer, TrainedBytePairs):
            _check_definition(tokenizer)
    except OSError as error:
        raise UserError(f'cannot read the tokenizer {path}: {error.strerror}') from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f'{path} is not a tokenizer that attnlab wrote: {error!r}') from error
    return tokenizer


def _byte_pairs(vocab: Any, definition: Any) -> TrainedBytePairs:
    if type(vocab) is not int or not isinstance(definition, str):
        raise TypeError('vocab is a whole number, definition a text')
    return TrainedBytePairs(vocab, definition)


def _check_definition(tokenizer: TrainedBytePairs) -> None:
    """Raises `ValueError` and the like for a definition that is none, or encodes otherwise than those of training."""
    # Of a copy, since what is read of a definition is kept, and pickled with it.
    read = dataclasses.replace(tokenizer)
    tokens = read._tokens
    try:
        # As the library writes it today, whichever version wrote it.
        found = _parts(read._encoder)
    except (UserError, ImportError):
        raise
    # The library raises no class of its own.
    except Exception as error:
        raise ValueError(str(error)) from error
    ids = sorted(found.pop('vocab').values())
    if not len(ids) == len(tokens) == tokenizer.vocab:
        raise ValueError(f'vocab is {tokenizer.vocab}, and the definition has {len(ids)} tokens')
    if ids != list(range(len(ids))):
        raise ValueError('its ids do not run from 0 without a gap')
    if absent := {bytes([byte]) for byte in range(256)} - set(tokens):
        raise ValueError(f'it has no token for the byte 0x{min(absent).hex()}')
    written = _parts(_untrained())
    for name, value in found.items():
        if name != 'merges' and value != written.get(name):
            raise ValueError(f'its {name} is {value!r}, where attnlab writes {written.get(name)!r}')


def _parts(tokenizer: Any) -> dict[str, Any]:
    """The fields of a tokenizer of the library and of its model."""
    fields = json.loads(tokenizer.to_str())
    return fields | fields.pop('model')


def encode_prompt(tokenizer: Tokenizer, text: str) -> UInt[np.ndarray, 't']:
    """The ids of a prompt. Raises `UserError` for one that is empty, or whose bytes were no text of the terminal."""
    try:
        content = text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f'the prompt is not UTF-8: {text!r}; give it in the encoding of the terminal') from error
    if not text:
        raise UserError('the prompt is empty; give at least one character')
    (ids,) = tokenizer.encode([content])
    return ids


def ids_dtype(vocab: int) -> np.dtype:
    """The smallest unsigned type that holds ids below `vocab`."""
    return np.min_scalar_type(vocab - 1)


def utf8(content: bytes, name: str, advice: str, offset: int = 0) -> str:
    """Decodes strictly. Raises `UserError` saying that `name` is not UTF-8 at which byte, counted from `offset`."""
    try:
        return content.decode('utf-8')
    except UnicodeDecodeError as error:
        where = f'byte {offset + error.start} is 0x{content[error.start]:02x}'
        raise UserError(f'{name} is not UTF-8: {where}; {advice}') from error


def _pieces(content: bytes) -> Iterator[str]:
    start = 0
    while start < len(content):
        stop = min(start + PIECE, len(content))
        if stop < len(content):
            stop = content.rfind(b'\n', start, stop) + 1 or _character_start(content, stop)
        yield utf8(content[start:stop], 'a text for byte pairs', 'the Bytes tokenizer takes any content', start)
        start = stop


def _character_start(content: bytes, index: int) -> int:
    """The last position at or shortly before `index` where a UTF-8 character starts."""
    return next((i for i in range(index, index - 4, -1) if content[i] & 0xC0 != 0x80), index)


def _head(contents: Iterable[bytes], size: int) -> Iterator[str]:
    for piece in (piece for content in contents for piece in _pieces(content)):
        if size <= 0:
            return
        size -= len(piece.encode())
        yield from _cut(piece)


def _cut(piece: str) -> Iterator[str]:
    """The piece as it is, or in parts where a run without a break is `LONG`."""
    stops = [run.end() for run in LONG.finditer(piece)]
    for start, stop in itertools.pairwise([0, *stops, len(piece)]):
        if start < stop:
            yield piece[start:stop]


def _alphabet() -> dict[str, int]:
    """The characters that byte-level BPE spells bytes with (Radford et al. 2019): printable ones, or from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _untrained() -> Any:
    """A tokenizer of the library, without tokens."""
    library = _library()
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def _library() -> Any:
    return optional('tokenizers', 'BytePairs')
