"""Texts that match a regular expression, as places of an automaton of bytes that tokens move between."""

import functools
import pathlib
import subprocess
import sys
import types
from collections import deque

import numpy as np
from jaxtyping import Bool, Int, UInt8

from attnlab.data.text.tokenizers import Tokenizer
from attnlab.errors import UserError

END = '\U0010ffff'.encode()
"""What stands for the end of a text; no text has it where it could end."""

SECONDS, SIZE = 10, 2**31
"""How long an automaton may take to build, and the bytes that it may take: tens of thousands of places."""

NEVER = np.iinfo(np.int32).max
"""How many bytes a text needs from where it can never match."""


class Pattern:
    """The automaton of a regular expression in the syntax of Rust's `regex`, which a text matches as a whole.

    Needs the extra `regex`. Raises `UserError` for what is no expression, or one that no automaton of bytes matches:
    with anchors at its start, boundaries of words, references, or parts that nothing matches; and for one whose
    automaton takes more than `SECONDS` of a processor or `SIZE` to build.

    Attributes:
      table: the place that a byte leads to; the last place is that of texts that cannot match, and stays there.
      start: the place of the empty text.
      matches: whether the text so far matches.
      rest: the fewest bytes until it does; `NEVER` where it cannot.
    """

    def __init__(self, expression: str):
        self.expression = expression
        steps, ends, start = _automaton(expression)
        places = {name: place for place, name in enumerate(sorted(steps))}
        self.table = np.full((len(places) + 1, 256), len(places), np.int32)
        for name, bytes_ in steps.items():
            for byte, following in bytes_.items():
                self.table[places[name], byte] = places[following]
        self.start = places[start]
        self.matches = np.array([*(name in ends for name in sorted(steps)), False])
        self.rest = _rest(self.table, self.matches)


class Matching:
    """The constraint that a text of a tokenizer matches a pattern (`attnlab.models.decoding.Constraint`).

    A token is one step of its bytes, and each byte that is still needed counts as one token: with tokens of several
    bytes the last ones of a text that is as long as it may be are single bytes where they must be.
    """

    def __init__(self, pattern: Pattern, tokenizer: Tokenizer):
        self._pattern = pattern
        self._tokenizer = tokenizer

    @property
    def start(self) -> int:
        return self._pattern.start

    def after(self, place: int, tokens: Int[np.ndarray, 'n']) -> Int[np.ndarray, 'n']:
        """The places that tokens lead to."""
        bytes_, lengths = self._bytes
        places = np.full(len(tokens), place, np.int32)
        for column in range(int(lengths[tokens].max(initial=0))):
            moved = self._pattern.table[places, bytes_[tokens, column]]
            places = np.where(column < lengths[tokens], moved, places)
        return places

    def rest(self, places: Int[np.ndarray, 'n']) -> Int[np.ndarray, 'n']:
        """The fewest tokens of one byte after which a text matches."""
        return self._pattern.rest[places]

    def ends(self, place: int) -> bool:
        """Whether no text that goes on from a place matches."""
        return bool(np.all(self._pattern.rest[self._pattern.table[place]] == NEVER))

    def __repr__(self) -> str:
        """The expression, as errors show it."""
        return repr(self._pattern.expression)

    @functools.cached_property
    def _bytes(self) -> tuple[UInt8[np.ndarray, 'o w'], Int[np.ndarray, 'o']]:
        """The bytes of every token, filled up with zeros, and how many there are."""
        spelled = [self._tokenizer.decode([token]) for token in range(self._tokenizer.vocab)]
        lengths = np.array([len(token) for token in spelled])
        filled = b''.join(token.ljust(lengths.max(), b'\0') for token in spelled)
        return np.frombuffer(filled, np.uint8).reshape(len(spelled), -1), lengths


def _automaton(expression: str) -> tuple[dict[int, dict[int, int]], set[int], int]:
    """The steps of every place by byte, the places where a text matches, and the first place.

    The library's automata prefer the first of alternatives that match, so that of `a|ab` only `a` does. With an end
    to be read after the text none is preferred before its end.
    """
    library = _library()
    _check_size(expression)
    bytes_ = library.Vocabulary(256, {bytes([byte]): [byte] for byte in range(256)})
    try:
        # Alone first, so that parentheses cannot reach beyond it.
        library.Index(expression, bytes_)
        index = library.Index(rf'(?:{expression})\x{{10FFFF}}', bytes_)
    except ValueError as error:
        reason = str(error).splitlines()[0].partition('. ')[0]
        raise UserError(
            f'the pattern {expression!r} makes no automaton: {reason}; the whole text is to match, so leave out ^, $ '
            r'and \b, references and parts that match nothing'
        ) from error
    ended = set(index.get_final_states())
    steps = {
        place: {byte: following for byte, following in found.items() if byte < 256 and following not in ended}
        for place, found in index.get_transitions().items()
        if place not in ended
    }

    def ends(place: int) -> bool:
        for byte in END[:-1]:
            if byte not in steps[place]:
                return False
            place = steps[place][byte]
        return index.get_next_state(place, END[-1]) in ended

    return steps, {place for place in steps if ends(place)}, index.get_initial_state()


def _check_size(expression: str) -> None:
    """Raises `UserError` for an automaton that is not built within the limits (see `attnlab/data/text/probe.py`)."""
    # -P: the modules beside the script are not at the root of imports.
    command = [sys.executable, '-P', str(pathlib.Path(__file__).with_name('probe.py')), str(SECONDS), str(SIZE)]
    given = rf'(?:{expression})\x{{10FFFF}}'.encode('utf-8', 'surrogatepass')
    if subprocess.run(command, input=given, capture_output=True, check=False).returncode:
        raise UserError(
            f'the pattern {expression!r} makes too large an automaton: it is not built within {SECONDS} seconds and '
            f'{SIZE / 2**30:.3g} GiB; repeat less'
        )


def _rest(table: Int[np.ndarray, 's 256'], matches: Bool[np.ndarray, 's']) -> Int[np.ndarray, 's']:
    """The fewest bytes from every place to one that matches, breadth first."""
    before: list[set[int]] = [set() for _ in table]
    for place, row in enumerate(table):
        for following in np.unique(row):
            before[following].add(place)
    rest = np.where(matches, 0, NEVER).astype(np.int32)
    waiting = deque(map(int, np.flatnonzero(matches)))
    while waiting:
        place = waiting.popleft()
        for each in before[place]:
            if rest[each] == NEVER:
                rest[each] = rest[place] + 1
                waiting.append(each)
    return rest


def _library() -> types.ModuleType:
    try:
        import outlines_core
    except ImportError as error:
        raise UserError("patterns need the outlines-core library: pip install 'attnlab[regex]'") from error
    return outlines_core
