"""A corpus available on every machine: the sources of the running Python's standard library."""

import dataclasses
import hashlib
import pathlib
import platform
import sysconfig
from collections.abc import Iterator
from typing import Any

from attnlab.data import cache
from attnlab.data.text.corpus import Corpus, Document, Text, content_hash
from attnlab.data.text.tokenizers import Bytes, Tokenizer, Untrained
from attnlab.errors import UserError

# fmt: off
LEFT_OUT_FOLDERS = {
    'test', 'tests', 'idle_test', 'idlelib', 'tkinter', 'turtledemo', 'lib2to3', 'distutils', 'ensurepip',
    'site-packages', 'dist-packages', 'lib-dynload', 'encodings', 'pydoc_data', 'macholib', '__pycache__',
}
# fmt: on
LEFT_OUT_FILES = {'sitecustomize.py', 'turtle.py', '_distutils_system_mod.py', 'this.py', 'antigravity.py'}
"""Modules to exclude: those missing from some builds of Python, generated per machine, or not ordinary code."""


@dataclasses.dataclass(frozen=True)
class StdlibText(Corpus):
    """The standard library's Python sources, a document a file: about 400 files and 8 MB, with no network and no setup.

    A top-level module goes to `valid` as a whole when the SHA-256 of its name (without leading underscores), modulo 20,
    is 0 or 1: about 8 % of the bytes. The content depends on the Python version, so its hash is recorded, and results
    are comparable only where the hashes are equal. Bytes are held in memory; only trained tokenizers and their tokens
    are cached.

    Attributes:
      cache: folder for trained tokenizers and token ids; `None`: no caching.
    """

    cache: str | None = cache.FOLDER

    @property
    def splits(self) -> tuple[str, ...]:
        return ('train', 'valid')

    def documents(self, split: str) -> Iterator[Document]:
        return (document for document in _documents() if is_valid(document.name) == (split == 'valid'))

    def describe(self) -> dict[str, Any]:
        return {
            'source': 'Python standard library',
            'python': platform.python_version(),
            'corpus_hash': content_hash(_documents()),
        }

    def load(self, split: str, tokenizer: Tokenizer | Untrained) -> Text:
        source = dataclasses.replace(self, cache=None) if isinstance(tokenizer, Bytes) else self
        return super(StdlibText, source).load(split, tokenizer)


def is_valid(name: str) -> bool:
    """Whether the file `name`, such as `email/parser.py`, belongs to the validation split."""
    module = name.split('/')[0].removesuffix('.py').lstrip('_')
    return int(hashlib.sha256(module.encode()).hexdigest(), 16) % 20 in (0, 1)


def _documents() -> Iterator[Document]:
    # The base interpreter's folder, inside a virtual environment as well.
    root = pathlib.Path(sysconfig.get_paths()['stdlib'])
    names = sorted(_names(root))
    if not names:
        raise UserError(f'this Python has no standard library sources under {root}; use TextFiles with your own text')
    for name in names:
        try:
            content = (root / name).read_bytes()
        except OSError as error:
            raise UserError(f'cannot read the standard library source {root / name}: {error.strerror}') from error
        yield Document(name, content)


def _names(root: pathlib.Path) -> Iterator[str]:
    for folder, folders, files in root.walk():
        folders[:] = (name for name in folders if name not in LEFT_OUT_FOLDERS and not name.startswith('config-'))
        for name in files:
            if name.endswith('.py') and name not in LEFT_OUT_FILES and not name.startswith('_sysconfigdata'):
                yield (folder / name).relative_to(root).as_posix()
