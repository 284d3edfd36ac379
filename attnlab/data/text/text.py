"""Corpora from any file or folder of text."""

import collections
import dataclasses
import hashlib
import pathlib
import re
from collections.abc import Iterator
from typing import Any

from absl import logging

from attnlab.data import cache
from attnlab.data.text.corpus import Corpus, Document
from attnlab.data.text.tokenizers import utf8
from attnlab.errors import UserError

ENCODINGS = ('utf-8', 'bytes')


@dataclasses.dataclass(frozen=True)
class TextFiles(Corpus):
    """A file, or the files of a folder, as a corpus; one document per file, or per part between separators.

    Without `valid_path` the validation split is cut from the same files: a document of at most a tenth of what `valid`
    should hold goes there whole or not at all, by the SHA-256 of its content, so that equal ones stay together; of a
    larger one (a single big file, say) the last `valid_fraction` goes there, from the start of a line if one is near.

    Files are read whole, one at a time. Hidden files and folders are skipped, and so are empty files, which are named
    in the log and the record of the run.

    Attributes:
      path: a file, or a folder that is searched with `pattern`.
      pattern: which files of a folder, as in `**/*.txt`; not used where `path` is a file.
      separator: what ends a document inside a file and stays part of it, two newlines for a blank line (in a shell
        `$'\\n\\n'`); `None`: one per file.
      encoding: `utf-8`, checked, or `bytes` for content of any kind.
      valid_fraction: how much of the corpus goes to `valid`, above 0 and below 1.
      valid_path: a file or folder that is the validation split; what else is at `path` is then `train`. Where both are
        one path, both splits are all of it.
      cache: folder for trained tokenizers and token ids; `None`: no caching, tokens are held in memory.
    """

    path: str
    pattern: str = '**/*.txt'
    separator: str | None = None
    encoding: str = 'utf-8'
    valid_fraction: float = 0.05
    valid_path: str | None = None
    cache: str | None = cache.FOLDER

    def __post_init__(self) -> None:
        if self.encoding not in ENCODINGS:
            raise UserError(f'encoding of TextFiles is {self.encoding!r}; it must be one of {", ".join(ENCODINGS)}')
        if not 0 < self.valid_fraction < 1:
            raise UserError(f'valid_fraction of TextFiles is {self.valid_fraction}; it must be above 0 and below 1')
        if self.separator == '':
            raise UserError('separator of TextFiles is empty; None makes every file one document')
        if self.separator is not None and (spelled := re.search(r'\\[nrt]', self.separator)) is not None:
            raise UserError(
                f'separator of TextFiles has a backslash and the letter {spelled[0][1]}, not what they stand for; '
                f"a shell passes that as --config.task.text.separator=$'{self.separator}'"
            )

    @property
    def splits(self) -> tuple[str, ...]:
        return ('train', 'valid')

    def documents(self, split: str) -> Iterator[Document]:
        if self.valid_path is not None:
            yield from self._documents(self._training_files() if split == 'train' else self._files(self.valid_path))
            return
        files = self._files(self.path)
        largest_whole = sum(path.stat().st_size for _, path in files) * self.valid_fraction / 10
        for name, content in self._documents(files):
            if len(content) > largest_whole:
                cut = _cut(content, self.valid_fraction)
                part = content[:cut] if split == 'train' else content[cut:]
            else:
                part = content if _falls_below(content, self.valid_fraction) == (split == 'valid') else b''
            if part:
                yield Document(name, part)

    def describe(self) -> dict[str, Any]:
        paths = [_resolved(path) for path in (self.path, self.valid_path) if path is not None]
        empty = [str(file) for path in paths for file in _empty(_listed(path, self.pattern))]
        split = {'valid_fraction': self.valid_fraction} if self.valid_path is None else {'valid_path': str(paths[-1])}
        return {
            'source': 'files',
            'path': str(paths[0]),
            'pattern': self.pattern,
            'separator': self.separator,
            'encoding': self.encoding,
            **split,
            'empty_files': empty,
        }

    def _files(self, path: str) -> list[tuple[str, pathlib.Path]]:
        """The files that are not empty, with their names inside the corpus, in the order of these names."""
        root = _resolved(path)
        files = _listed(root, self.pattern)
        empty = _empty(files)
        if len(empty) == len(files):
            raise UserError(f'{root} holds no text: {len(files)} matching file(s), every one empty')
        if empty:
            logging.warning('%d empty file(s) skipped in %s, such as %s', len(empty), root, empty[0])
        return [(name, file) for name, file in files if file not in empty]

    def _training_files(self) -> list[tuple[str, pathlib.Path]]:
        """The files of `path` that are not at `valid_path`, unless that is the same."""
        path, valid_path = (_resolved(str(each)).resolve() for each in (self.path, self.valid_path))
        files = self._files(self.path)
        if path == valid_path:
            return files
        # Files of both may be links to those of the other.
        held = {file.resolve() for _, file in self._files(str(self.valid_path))}
        found = [(name, file, file.resolve()) for name, file in files]
        left = [(name, file) for name, file, real in found if not real.is_relative_to(valid_path) and real not in held]
        if not left:
            raise UserError(f'every file of {path} is in {valid_path}, which is valid_path: none is left to train on')
        return left

    def _documents(self, files: list[tuple[str, pathlib.Path]]) -> Iterator[Document]:
        for name, path in files:
            content = _read(path)
            if self.encoding == 'utf-8':
                utf8(content, str(path), "encoding='bytes' takes any content")
            if self.separator is None:
                yield Document(name, content)
            else:
                for index, part in enumerate(_parts(content, self.separator.encode())):
                    yield Document(f'{name}#{index}', part)


def _resolved(path: str) -> pathlib.Path:
    return pathlib.Path(path).expanduser().absolute()


def _listed(root: pathlib.Path, pattern: str) -> list[tuple[str, pathlib.Path]]:
    if root.is_file():
        return [(root.name, root)]
    if not root.is_dir():
        raise UserError(f'there is no text corpus at {root}: no such file or folder')
    try:
        files = {file.relative_to(root).as_posix(): file for file in root.glob(pattern) if file.is_file()}
    except (ValueError, NotImplementedError) as error:
        raise UserError(f'pattern of TextFiles is {pattern!r}: {error}') from error
    files = {name: file for name, file in files.items() if not _hidden(name)}
    if not files:
        raise UserError(f'no file in {root} matches the pattern {pattern!r}{_instead(root)}')
    return sorted(files.items())


def _hidden(name: str) -> bool:
    return any(part.startswith('.') for part in name.split('/'))


def _instead(root: pathlib.Path) -> str:
    """How the files of a folder end, the most frequent first, and a pattern that has these."""
    names = (file.relative_to(root).as_posix() for file in root.rglob('*') if file.is_file())
    found = collections.Counter(sorted(pathlib.PurePath(name).suffix for name in names if not _hidden(name)))
    if not found:
        return '; the folder is empty, or all of it is hidden'
    ends = [suffix for suffix, _ in found.most_common(10)]
    listed = ', '.join(suffix or 'none' for suffix in ends)
    return f"; the files there end in {listed}: set pattern, as by '--config.task.text.pattern=**/*{ends[0]}'"


def _empty(files: list[tuple[str, pathlib.Path]]) -> list[pathlib.Path]:
    return [file for _, file in files if not file.stat().st_size]


def _read(path: pathlib.Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f'cannot read {path}: {error.strerror}') from error


def _parts(content: bytes, separator: bytes) -> Iterator[bytes]:
    start = 0
    while start < len(content):
        found = content.find(separator, start)
        stop = len(content) if found < 0 else found + len(separator)
        yield content[start:stop]
        start = stop


def _falls_below(content: bytes, fraction: float) -> bool:
    return int.from_bytes(hashlib.sha256(content).digest()[:8]) < fraction * 2**64


def _cut(content: bytes, fraction: float) -> int:
    """Where the last `fraction` of a document begins: at the start of a line not far before, or else of a character."""
    cut = round(len(content) * (1 - fraction))
    nearby = cut - round(len(content) * fraction / 10)
    line = content.rfind(b'\n', nearby, cut)
    if line >= 0:
        return line + 1
    # A character has at most four bytes; what is no text may go on like the middle of one.
    back = range(cut, max(cut - 4, -1), -1)
    return next((at for at in back if at == len(content) or content[at] & 0xC0 != 0x80), cut)
