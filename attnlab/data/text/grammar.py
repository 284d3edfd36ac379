"""Texts of a context-free grammar, as places of an Earley parser of bytes that tokens move between."""

import functools
import math
from collections import defaultdict
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Int

from attnlab.data.text.pattern import NEVER, Pattern
from attnlab.data.text.tokenizers import Tokenizer
from attnlab.errors import UserError, optional

START = 'start'
"""The rule that a whole text is."""


class Terminal(NamedTuple):
    """The automaton of a terminal: from every place the places that bytes lead to, of those that it can end from.

    Attributes:
      steps: by place and byte.
      ends: whether the terminal may end at a place.
      rest: the fewest bytes until it may.
      start: its first place.
    """

    steps: list[dict[int, int]]
    ends: list[bool]
    rest: list[int]
    start: int = 0


class _Column:
    """What an Earley parser knows after some bytes; it refers to the columns in which its items began.

    Attributes:
      waiting: by nonterminal, the rules before it, how many of their symbols have been read, and where they began.
      scans: the items in the middle or at the beginning of a terminal.
      outside: by nonterminal that may begin here, the fewest bytes of a text after it.
      rest: the fewest bytes until the text is one of the grammar.
    """

    __slots__ = ('outside', 'rest', 'scans', 'waiting')

    def __init__(self) -> None:
        self.waiting: dict[int, list[tuple[int, int, _Column]]] = {}
        self.scans: list[Item] = []
        self.outside: dict[int, float] = {}
        self.rest = math.inf


Item = tuple[int, int, int, _Column]
"""A rule, how many of its symbols have been read, the place in the terminal being read or -1, and where it began."""


class Grammar:
    """A context-free grammar in the notation of Lark, whose rule `start` is the whole text.

    Terminals are regular expressions in the syntax of Rust's `regex`, without look-around; what is ignored
    (`%ignore`) may stand before every terminal and at the end. A text is one of the grammar if it can be divided in
    any way into terminals that its rules derive: terminals have no priorities, and none is read as far as it goes.

    Bytes are read by Earley's algorithm (1970, https://doi.org/10.1145/362007.362035), with empty rules after Aycock
    and Horspool (2002, https://doi.org/10.1093/comjnl/45.6.620) and terminals read byte by byte by their automata.
    The fewest bytes to the end of a text are known at every place: those of what is open within each rule, and, by
    the rules that wait for it, after it.

    Needs the extra `grammar`. Raises `UserError` for what is no grammar, for terminals without an automaton, and where
    no text is derived.
    """

    def __init__(self, text: str):
        rules, terminals, names = _read(text)
        self._terminals = terminals
        least = _least(rules, terminals, len(names))
        if least[0] == math.inf:
            raise UserError(f'the grammar derives no text: {START} needs itself in every rule')
        # Without rules that derive nothing, every byte that can be read can be gone on from.
        self._rules = [rule for rule in rules if all(self._length(symbol, least) < math.inf for symbol in rule[1])]
        self._tails = [
            [float(sum(self._length(symbol, least) for symbol in symbols[dot:])) for dot in range(len(symbols) + 1)]
            for _, symbols in self._rules
        ]
        self._of = defaultdict(list)
        for index, (name, _) in enumerate(self._rules):
            self._of[name].append(index)
        self._least = least
        # The place of texts that the grammar does not have comes first.
        self._columns: list[_Column] = [_Column()]
        self._places: dict[frozenset[Item], int] = {}
        self._following: dict[int, dict[int, frozenset[Item]]] = {0: {}}
        first = _Column()
        self._close(first, [(index, 0, -1, first) for index in self._of[0]])
        self._columns.append(first)

    start = 1
    """The place of the empty text."""

    def step(self, place: int, byte: int) -> int:
        """The place that a byte leads to."""
        kernel = self._moves(place).get(byte)
        if kernel is None:
            return 0
        if kernel not in self._places:
            column = _Column()
            self._close(column, list(kernel))
            self._places[kernel] = len(self._columns)
            self._columns.append(column)
        return self._places[kernel]

    def rest(self, place: int) -> int:
        """The fewest bytes from a place until the text is one of the grammar; `NEVER` where it cannot be."""
        return int(min(self._columns[place].rest, NEVER))

    def ends(self, place: int) -> bool:
        """Whether no text goes on from a place."""
        return not self._moves(place)

    def _length(self, symbol: int, least: list[float]) -> float:
        """The fewest bytes of a symbol."""
        if symbol >= 0:
            return least[symbol]
        terminal = self._terminals[~symbol]
        return float(terminal.rest[terminal.start])

    def _close(self, column: _Column, kernel: list[Item]) -> None:
        """Predicts and completes all that follows from the items that a byte left, and finds the fewest bytes."""
        waiting, seen, agenda = column.waiting, set(kernel), kernel
        ended = False

        def add(rule: int, dot: int, within: int, origin: _Column) -> None:
            item = rule, dot, within, origin
            if item not in seen:
                seen.add(item)
                agenda.append(item)

        while agenda:
            item = agenda.pop()
            rule, dot, within, origin = item
            name, symbols = self._rules[rule]
            if within >= 0:
                column.scans.append(item)
            elif dot == len(symbols):
                ended = ended or name == 0
                for other, place, began in origin.waiting.get(name, ()):
                    add(other, place + 1, -1, began)
            elif symbols[dot] < 0:
                terminal = self._terminals[~symbols[dot]]
                column.scans.append((rule, dot, terminal.start, origin))
                if terminal.ends[terminal.start]:
                    add(rule, dot + 1, -1, origin)
            else:
                wanted = symbols[dot]
                if wanted not in waiting:
                    waiting[wanted] = []
                    for predicted in self._of[wanted]:
                        add(predicted, 0, -1, column)
                waiting[wanted].append((rule, dot, origin))
                if self._least[wanted] == 0:
                    add(rule, dot + 1, -1, origin)
        self._reach(column)
        column.rest = 0.0 if ended else min(map(self._needed, column.scans), default=math.inf)

    def _reach(self, column: _Column) -> None:
        """Finds the fewest bytes after every nonterminal that may begin in a column, until no rule betters any."""
        outside = column.outside
        outside.update(dict.fromkeys(column.waiting, math.inf))
        better = True
        while better:
            better = False
            for name, waiting in column.waiting.items():
                found = min(self._tails[rule][dot + 1] + self._after(rule, origin) for rule, dot, origin in waiting)
                if found < outside[name]:
                    outside[name], better = found, True

    def _after(self, rule: int, origin: _Column) -> float:
        """The fewest bytes after a rule that began in a column; the first nonterminal is the whole text."""
        name = self._rules[rule][0]
        return 0.0 if name == 0 else origin.outside[name]

    def _needed(self, item: Item) -> float:
        """The fewest bytes until the end of a text that goes on by an item within a terminal."""
        rule, dot, within, origin = item
        terminal = self._terminals[~self._rules[rule][1][dot]]
        return terminal.rest[within] + self._tails[rule][dot + 1] + self._after(rule, origin)

    def _moves(self, place: int) -> dict[int, frozenset[Item]]:
        """The items that are left after every byte that can follow."""
        if place not in self._following:
            found: dict[int, set[Item]] = defaultdict(set)
            for rule, dot, within, origin in self._columns[place].scans:
                terminal = self._terminals[~self._rules[rule][1][dot]]
                for byte, following in terminal.steps[within].items():
                    if terminal.steps[following]:
                        found[byte].add((rule, dot, following, origin))
                    if terminal.ends[following]:
                        found[byte].add((rule, dot + 1, -1, origin))
            self._following[place] = {byte: frozenset(items) for byte, items in found.items()}
        return self._following[place]


class Derivable:
    """The constraint that a text of a tokenizer is one of a grammar (`attnlab.models.decoding.Constraint`).

    A token is one step of its bytes, and each byte that is still needed counts as one token: places are found as texts
    reach them, so that what tokens of several bytes would do is not known ahead. The last tokens of a text that is as
    long as it may be are single bytes where they must be.
    """

    counts: Literal['tokens', 'bytes'] = 'bytes'

    def __init__(self, grammar: Grammar, tokenizer: Tokenizer):
        self._grammar = grammar
        self._tokenizer = tokenizer

    @property
    def start(self) -> int:
        return self._grammar.start

    def after(self, place: int, tokens: Int[np.ndarray, 'n']) -> Int[np.ndarray, 'n']:
        """The places that tokens lead to."""
        return np.array([self._moved(place, self._spelled[token]) for token in tokens], np.int64)

    def rest(self, places: Int[np.ndarray, 'n']) -> Int[np.ndarray, 'n']:
        """The fewest tokens of one byte after which a text is one of the grammar."""
        return np.array([self._grammar.rest(int(place)) for place in places], np.int64)

    def ends(self, place: int) -> bool:
        """Whether no text goes on from a place."""
        return self._grammar.ends(place)

    def __repr__(self) -> str:
        """As errors show it."""
        return 'the grammar'

    def _moved(self, place: int, bytes_: bytes) -> int:
        for byte in bytes_:
            place = self._grammar.step(place, byte)
            if not place:
                break
        return place

    @functools.cached_property
    def _spelled(self) -> list[bytes]:
        return [self._tokenizer.decode([token]) for token in range(self._tokenizer.vocab)]


Rule = tuple[int, tuple[int, ...]]
"""A nonterminal, and the symbols that it may be: nonterminals from 0, `~index` of terminals."""


def _read(text: str) -> tuple[list[Rule], list[Terminal], list[str]]:
    """The rules, terminals and names of nonterminals of a grammar; nonterminal 0 is the whole text."""
    library = optional('lark', 'a grammar')
    try:
        made = library.Lark(text, parser='earley', lexer='dynamic_complete', start=START)
    except (library.exceptions.LarkError, OSError, RecursionError) as error:
        reason = ' '.join(str(error).split())
        raise UserError(f'the grammar is none in the notation of Lark: {reason}') from error
    terminals: list[Terminal] = []
    places: dict[str, int] = {}
    for defined in made.terminals:
        places[defined.name] = ~len(terminals)
        terminals.append(_terminal(defined.name, defined.pattern))
    asked = {symbol.name for rule in made.rules for symbol in rule.expansion if symbol.is_term}
    if absent := sorted(asked - places.keys()):
        raise UserError(f'the grammar declares the terminal {absent[0]} and does not say what it is')
    ends = {rule.origin.name for rule in made.rules}
    names = ['', ' ', *sorted(map(str, ends))]
    numbers = {name: index for index, name in enumerate(names)}
    whole, ignored = numbers[''], numbers[' ']
    # What is ignored stands before every terminal and at the end, any number of times.
    rules: list[Rule] = [(whole, (numbers[START], ignored)), (ignored, ())]
    rules += [(ignored, (ignored, places[name])) for name in made.ignore_tokens]
    for rule in made.rules:
        symbols: list[int] = []
        for symbol in rule.expansion:
            symbols += (ignored, places[symbol.name]) if symbol.is_term else (numbers[symbol.name],)
        rules.append((numbers[rule.origin.name], tuple(symbols)))
    return list(dict.fromkeys(rules)), terminals, names


def _terminal(name: str, pattern: Any) -> Terminal:
    """The automaton of a terminal; one that is spelled out needs no regular expression."""
    if pattern.type == 'str' and not pattern.flags:
        bytes_ = pattern.value.encode()
        count = len(bytes_)
        steps: list[dict[int, int]] = [{byte: index + 1} for index, byte in enumerate(bytes_)]
        return Terminal([*steps, {}], [index == count for index in range(count + 1)], [*range(count, -1, -1)])
    try:
        found = Pattern(pattern.to_regexp())
    except UserError as error:
        raise UserError(f'the terminal {name} of the grammar: {error}') from error
    live = found.rest[found.table] < NEVER
    return Terminal(
        [
            {int(byte): int(row[byte]) for byte in np.flatnonzero(lives)}
            for row, lives in zip(found.table, live, strict=True)
        ],
        found.matches.tolist(),
        found.rest.tolist(),
        found.start,
    )


def _least(rules: list[Rule], terminals: list[Terminal], count: int) -> list[float]:
    """The fewest bytes that every nonterminal derives, infinite where it derives none."""
    least = [math.inf] * count

    def length(symbol: int) -> float:
        return least[symbol] if symbol >= 0 else float(terminals[~symbol].rest[terminals[~symbol].start])

    better = True
    while better:
        better = False
        for name, symbols in rules:
            found = float(sum(map(length, symbols)))
            if found < least[name]:
                least[name], better = found, True
    return least
