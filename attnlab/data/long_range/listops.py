"""ListOps: the value of a nested expression of list operations."""

import dataclasses
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from attnlab.data.long_range.dataset import Example, Kind
from attnlab.data.long_range.drawn import Distribution
from attnlab.errors import UserError

TRIALS = 300_000
"""Attempts at an expression of the right length before settings are refused; those of papers take some tens."""

OPERATORS = ('[MIN', '[MAX', '[MED', '[SM')
SYMBOLS = ('', *map(str, range(10)), *OPERATORS, ']')
"""The symbols by token id; 0 is padding."""
DIGIT, OPERATOR, CLOSE = 1, 11, 15
"""Ids of the digit 0, of the first operator, and of the closing bracket."""


class Level(NamedTuple):
    """The nodes of one depth of an expression, from left to right.

    Attributes:
      inner: which of them are operators, bool.
      arguments: how many arguments each operator has, one entry an operator.
    """

    inner: np.ndarray
    arguments: np.ndarray


class Filled(NamedTuple):
    """The nodes of one depth with their symbols.

    Attributes:
      ids: the digit or operator of every node.
      extents: the number of tokens of every node with everything inside it.
    """

    ids: np.ndarray
    extents: np.ndarray


@dataclasses.dataclass(frozen=True)
class ListOps(Distribution):
    """Expressions such as `[MAX 3 [MED 1 9 4 ] 0 ]`, and their value from 0 to 9.

    A node is an operator with probability `operators`, otherwise, and at depth `max_depth`, a uniform digit; an
    operator, uniform among MIN, MAX, MED and SM, has from 2 to `max_arguments` arguments, also uniform. MED is the
    median, the mean of the middle two rounded down where there are two; SM is the sum modulo 10. Expressions are drawn
    until one is longer than `shortest` and shorter than `longest` tokens, closing brackets among them.

    The released files of the Long Range Arena follow the same distribution, drawn without a seed, so that they cannot
    be reproduced; `x` are the ids of `SYMBOLS`, and `depth` is that of the deepest operator.

    Nangia and Bowman 2018, https://arxiv.org/abs/1804.06028; Tay et al. 2021, https://arxiv.org/abs/2011.04006.

    Attributes:
      shortest: every expression has more tokens than this.
      longest: and fewer than this.
      max_depth: depth at which all nodes are digits, the root being at depth 1.
      max_arguments: the most arguments of an operator.
      operators: probability of an operator.
    """

    shortest: int = 500
    longest: int = 2000
    max_depth: int = 10
    max_arguments: int = 10
    operators: float = 0.25

    def __post_init__(self) -> None:
        if not 4 <= self.shortest + 1 < self.longest or self.max_depth < 2 or self.max_arguments < 2:
            raise UserError(
                'ListOps needs shortest of at least 3, longest above shortest + 1, and max_depth and max_arguments '
                f'of at least 2; got {self}'
            )
        most = 1
        for _ in range(self.max_depth - 1):
            most = 2 + self.max_arguments * most
            if most > self.shortest:
                break
        else:
            raise UserError(f'no expression of {self} has more than {most} tokens; shortest is {self.shortest}')
        if not 0.0 < self.operators < 1.0:
            raise UserError(f'operators of ListOps is {self.operators}; it must be a probability between 0 and 1')

    @property
    def kind(self) -> Kind:
        quarter = (self.longest - self.shortest) // 4
        return Kind(
            classes=10,
            length=self.longest,
            vocab=len(SYMBOLS),
            difficulties={
                'depth': tuple(range(1, self.max_depth)),
                'length': tuple(self.shortest + 1 + i * quarter for i in range(4)),
            },
        )

    def draw(self, stream: np.random.SeedSequence) -> Example:
        rng = np.random.default_rng(stream)
        levels = next((found for _ in range(TRIALS) if (found := self._levels(rng)) is not None), None)
        if levels is None:
            raise UserError(
                f'{TRIALS} expressions were too short or too long for {self}; choose other lengths or depths'
            )
        return _expression(levels, rng)

    def _levels(self, rng: np.random.Generator) -> list[Level] | None:
        """The shape of an expression, level by level; `None` where it is too long or too short."""
        levels: list[Level] = []
        nodes, length = 1, 0
        while nodes:
            inner = rng.random(nodes) < self.operators if len(levels) + 1 < self.max_depth else np.zeros(nodes, bool)
            arguments = rng.integers(2, self.max_arguments + 1, np.count_nonzero(inner))
            levels.append(Level(inner, arguments))
            length += nodes + len(arguments)
            if length >= self.longest:
                return None
            nodes = int(arguments.sum())
        return levels if length > self.shortest else None


def _expression(levels: list[Level], rng: np.random.Generator) -> Example:
    """Fills a shape with operators and digits from the deepest level up, then orders them from the root down."""
    filled: list[Filled] = []
    values, sizes = np.empty(0, np.int64), np.empty(0, np.int64)
    for level in reversed(levels):
        nodes = len(level.inner)
        digits = rng.integers(0, 10, nodes)
        ids, results, extents = DIGIT + digits, digits.copy(), np.ones(nodes, np.int64)
        if len(level.arguments):
            operators = rng.integers(0, len(OPERATORS), len(level.arguments))
            starts = _starts(level.arguments)
            ids[level.inner] = OPERATOR + operators
            results[level.inner] = _applied(operators, values, starts, level.arguments)
            extents[level.inner] = 2 + np.add.reduceat(sizes, starts)
        filled.append(Filled(ids, extents))
        values, sizes = results, extents
    tokens = np.full(int(sizes[0]), CLOSE, np.uint8)
    places = np.zeros(1, np.int64)
    for level in levels:
        ids, extents = filled.pop()
        tokens[places] = ids
        if filled:
            # Arguments follow their operator one after another; those of the next operator start behind it.
            before = _starts(filled[-1].extents)
            first = places[level.inner] + 1 - before[_starts(level.arguments)]
            places = before + np.repeat(first, level.arguments)
    return {'x': tokens, 'label': np.int32(values[0]), 'depth': np.int32(len(levels) - 1)}


def _applied(
    operators: Int[np.ndarray, '_'],
    values: Int[np.ndarray, 's'],
    starts: Int[np.ndarray, '_'],
    counts: Int[np.ndarray, '_'],
) -> Int[np.ndarray, '_']:
    """The value of every operator, whose `counts` arguments begin at `starts` in `values`."""
    order = np.argsort(10 * np.repeat(np.arange(len(counts)), counts) + values)
    ascending = values[order]
    median = (ascending[starts + (counts - 1) // 2] + ascending[starts + counts // 2]) // 2
    largest = ascending[starts + counts - 1]
    return np.choose(operators, (ascending[starts], largest, median, np.add.reduceat(values, starts) % 10))


def _starts(counts: Int[np.ndarray, '_']) -> Int[np.ndarray, '_']:
    return np.cumsum(counts) - counts
