"""Texts that match a regular expression, as places of an automaton of bytes that tokens move between."""

import functools
import pathlib
import subprocess
import sys
from collections.abc import Iterable
from typing import Literal

import numpy as np
from jaxtyping import Bool, Int, UInt8
from scipy.sparse import csr_array
from scipy.sparse.csgraph import dijkstra

from attnlab.data.text.tokenizers import Tokenizer
from attnlab.errors import UserError, optional

END = '\U0010ffff'.encode()
"""What stands for the end of a text; no text has it where it could end."""

SECONDS, SIZE = 10, 2**31
"""How long an automaton may take to build, and the bytes that it may take: tens of thousands of places."""

NEVER = np.iinfo(np.int32).max
"""How many bytes or tokens a text needs from where it can never match."""


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

    A token is one step of its bytes. How many tokens are still needed is found for every place when it is first asked.
    """

    counts: Literal['tokens', 'bytes'] = 'tokens'

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
        never = len(self._pattern.table) - 1
        moving = np.arange(len(tokens))
        for column in range(bytes_.shape[1]):
            # Of most tokens the first byte already leads to where a text stays.
            moving = moving[(places[moving] != never) & (lengths[tokens[moving]] > column)]
            if not len(moving):
                break
            places[moving] = self._pattern.table[places[moving], bytes_[tokens[moving], column]]
        return places

    def rest(self, places: Int[np.ndarray, 'n']) -> Int[np.ndarray, 'n']:
        """The fewest tokens after which a text matches; `NEVER` where it cannot."""
        return self._rest[places]

    def ends(self, place: int) -> bool:
        """Whether no text that goes on from a place matches."""
        return bool(np.all(self._pattern.rest[self._pattern.table[place]] == NEVER))

    def __repr__(self) -> str:
        """The expression, as errors show it."""
        return repr(self._pattern.expression)

    @functools.cached_property
    def _rest(self) -> Int[np.ndarray, 's']:
        bytes_, lengths = self._bytes
        beginning = [np.flatnonzero((bytes_[:, 0] == byte) & (lengths > 0)) for byte in range(256)]
        never = len(self._pattern.table) - 1

        def following(place: int) -> Int[np.ndarray, 'n']:
            # At most places few bytes can come next, and so few tokens: the others are not looked at.
            tokens = [beginning[byte] for byte in np.flatnonzero(self._pattern.table[place] != never)]
            return self.after(place, np.concatenate(tokens)) if tokens else np.array([never])

        return _rest(map(following, range(never + 1)), self._pattern.matches)

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
    library = optional('outlines_core', 'a pattern')
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


def _rest(rows: Iterable[Int[np.ndarray, 'n']], matches: Bool[np.ndarray, 's']) -> Int[np.ndarray, 's']:
    """The fewest steps from every place to one that matches, by the places that the steps from each lead to."""
    if not matches.any():
        return np.full(len(matches), NEVER, np.int32)
    following = [np.flatnonzero(np.bincount(row, minlength=len(matches))).astype(np.int32) for row in rows]
    places = np.repeat(np.arange(len(following)), [len(each) for each in following])
    backwards = (np.ones(len(places)), (np.concatenate(following), places))
    graph = csr_array(backwards, shape=(len(matches), len(matches)))
    steps = dijkstra(graph, indices=np.flatnonzero(matches), unweighted=True, min_only=True)
    return np.where(np.isfinite(steps), steps, NEVER).astype(np.int32)
