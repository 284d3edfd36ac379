"""Data that are drawn from seeds, and editions, which tell apart what one seed drew before and draws now."""

import dataclasses
import hashlib
import re
from collections.abc import Iterator
from typing import Any, ClassVar

_SAID = re.compile(r'(?P<kind>\w+)\(.*?(?:, edition (?P<edition>\d+))?', re.DOTALL)


class Editioned:
    """A distribution of examples: a frozen dataclass whose fields set the difficulty.

    Attributes:
      edition: raised where examples drawn from the same seed become others.
    """

    edition: ClassVar[int] = 1

    @property
    def name(self) -> str:
        """All fields and the edition, if not the first: what identifies the examples of a seed."""
        return repr(self) if self.edition == 1 else f'{self!r}, edition {self.edition}'

    @property
    def content(self) -> str:
        """SHA-256 over the class and the edition, and those of its parts that are not of the first.

        Not over the name, which is another when a distribution gains a field, though its examples stay.
        """
        later = {(type(part).__name__, part.edition) for part in _parts(self) if part.edition > 1}
        return _hash(type(self).__name__, self.edition, *sorted(later))


def content_of(name: str) -> str | None:
    """The content of a distribution whose name was recorded without it; `None` for what is no such name.

    Names do not say the editions of parts: they count as the first.
    """
    said = _SAID.fullmatch(name)
    return None if said is None else _hash(said['kind'], int(said['edition'] or 1))


def _hash(kind: str, edition: int, *parts: tuple[str, int]) -> str:
    lines = '\n'.join(f'{name}\0{number}' for name, number in ((kind, edition), *parts))
    return hashlib.sha256(lines.encode()).hexdigest()


def _parts(of: Any) -> Iterator[Editioned]:
    """The distributions among its fields, and those among theirs."""
    for field in dataclasses.fields(of):
        value = getattr(of, field.name)
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, Editioned):
                yield part
                yield from _parts(part)
