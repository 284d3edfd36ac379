"""Authorship: which standard-library module a passage is from. A byte-level task that needs no network."""

import dataclasses
import functools
import hashlib
import platform
from collections.abc import Mapping
from typing import Any

import numpy as np

from attnlab.data.long_range.dataset import Dataset, Example, Kind, digest_of, known_split
from attnlab.data.text.stdlib import StdlibText
from attnlab.errors import UserError

MODULES = (
    'asyncio', 'email', 'http', 'importlib', 'logging', 'multiprocessing', 'pydecimal', 'unittest', 'urllib', 'xml'
)  # fmt: skip
"""The modules by label: ten of the largest in Python 3.12 and later."""

PLACES = {'train': range(8), 'valid': range(8, 9), 'test': range(9, 10)}
"""The indices of each split's passages among ten consecutive ones."""


@dataclasses.dataclass(frozen=True)
class Authorship(Dataset):
    """Passages of `span` bytes of the running Python's sources, labelled by module, one of ten.

    A module's files are concatenated and cut into passages that do not overlap; of every ten the ninth is for
    validation, the tenth for testing. Equally many are cut of every module; those that occur twice are left out. The
    passages depend on the version of Python, which is recorded: results are comparable only for the same version.

    Attributes:
      span: bytes of a passage.
    """

    span: int = 512

    def __post_init__(self) -> None:
        if not 16 <= self.span <= 8192:
            raise UserError(f'span of Authorship is {self.span}; it must be from 16 to 8192 bytes')

    @property
    def kind(self) -> Kind:
        return Kind(classes=len(MODULES), length=self.span, vocab=257, offset=1)

    @property
    def splits(self) -> Mapping[str, int | None]:
        return dict.fromkeys(PLACES)

    def rows(self, split: str) -> list[Example]:
        known_split(self, split)
        return [example for place, example in _passages(self.span) if place % 10 in PLACES[split]]

    def describe(self) -> dict[str, Any]:
        return {
            'source': 'authorship of the Python standard library',
            'python': platform.python_version(),
            'content': _content(self.span),
        }


@functools.lru_cache(maxsize=2)
def _content(span: int) -> str:
    """SHA-256 over the passages and their places."""
    digest = hashlib.sha256()
    for place, passage in _passages(span):
        digest.update(place.to_bytes(8) + digest_of(passage))
    return digest.hexdigest()


@functools.lru_cache(maxsize=2)
def _passages(span: int) -> list[tuple[int, Example]]:
    """Passages with their index in their module."""
    content = dict.fromkeys(MODULES, b'')
    for split in ('train', 'valid'):
        for document in StdlibText().documents(split):
            module = document.name.split('/')[0].removesuffix('.py').lstrip('_')
            if module in content:
                content[module] += document.content
    each = min(len(text) for text in content.values()) // span
    if each < 10:
        raise UserError(
            f'the standard library of this Python has {each} passages of {span} bytes a module; 10 are needed'
        )
    cut = [
        (place, label, content[module][place * span : (place + 1) * span])
        for label, module in enumerate(MODULES)
        for place in range(each)
    ]
    times: dict[bytes, int] = {}
    for _, _, passage in cut:
        times[passage] = times.setdefault(passage, 0) + 1
    return [
        (place, {'x': np.frombuffer(passage, np.uint8), 'label': np.int32(label)})
        for place, label, passage in cut
        if times[passage] == 1
    ]
