"""Word problems of finite groups."""

import dataclasses
import functools
import itertools
import re

import numpy as np

from attnlab.data.synthetic.problem import Example, Problem, require, require_length

LARGEST = 720
"""Order of the largest group whose table is computed."""


@dataclasses.dataclass(frozen=True)
class WordProblem(Problem):
    """The running product of uniformly random elements of a group, predicted after each of them.

        acc_0 = e,   acc_i = acc_{i-1} x_i        label at x_i: acc_i

    Tokens are the elements, 0 being the identity, and a start mark, the last token id, which comes first.
    Elements of `S<n>` and `A<n>` are permutations in lexicographic order, with `(p q)(i) = p(q(i))`; those of `Z<n>`
    are numbers under addition; those of a product `GxH` are pairs, `(g, h)` numbered `g |H| + h`. Every prefix has a
    label, so an example holds those of all shorter lengths.

    Parity is `Z2`. `A5` and `S5` are not solvable, and complete for NC1: no model of constant depth whose steps are a
    fixed number of parallel ones tracks them at every length, under the usual conjectures.

    Attributes:
      group: `S<n>`, `A<n>`, `Z<n>`, or a product of those such as `A4xZ5`, of at most 720 elements.
      moved: draws only the permutations that move at most so many things, of which the products still are all of the
        group: with 2 and `S5` the ten swaps and the identity. None draws all elements.

    Source: Merrill, Petty and Sabharwal, "The Illusion of State in State-Space Models", 2024,
    https://arxiv.org/abs/2404.08819; Liu et al., "Transformers Learn Shortcuts to Automata", 2022,
    https://arxiv.org/abs/2210.10749; swaps alone: Grazzi et al., "Unlocking State-Tracking in Linear RNNs Through
    Negative Eigenvalues", 2024, https://arxiv.org/abs/2411.12537.
    """

    group: str = 'S5'
    moved: int | None = None

    @property
    def vocab(self) -> int:
        return len(group_table(self.group)) + 1

    def check(self, length: int) -> None:
        wanted = f'S<n>, A<n>, Z<n> or a product such as A4xZ5, of 2 to {LARGEST} elements'
        require(self, 'group', 2 <= order(self.group) <= LARGEST, wanted)
        if self.moved is not None:
            least, most = _moved_things(self.group)
            wanted = f'{least} to {most}' if most else f'None, for {self.group} is no group S<n> or A<n>'
            require(self, 'moved', least <= self.moved <= most, wanted)
        require_length(self, length, length >= 2, 'at least 2 tokens: the mark and an element')

    def labels(self, length: int) -> int:
        return length - 1

    def generate(self, rng: np.random.Generator, length: int) -> Example:
        table = group_table(self.group)
        if self.moved is None:
            steps = rng.integers(len(table), size=length - 1)
        else:
            steps = rng.choice(moving_at_most(self.group, self.moved), size=length - 1)
        products = list(itertools.accumulate(steps.tolist(), lambda acc, step: table[acc][step], initial=0))
        return Example(np.concatenate([[len(table)], steps]), np.arange(1, length), np.array(products[1:]))


def order(group: str) -> int:
    """Number of elements; 0 for a string that does not name a group."""
    return functools.reduce(lambda size, factor: size * _order(factor), group.split('x'), 1)


@functools.lru_cache(maxsize=16)
def group_table(group: str) -> list[list[int]]:
    """The multiplication table: `table[a][b]` is the number of `a b`."""
    return functools.reduce(_product, map(_table, group.split('x')))


def elements(n: int, even: bool) -> list[tuple[int, ...]]:
    """The permutations of `n` things in lexicographic order, or the even ones among them."""
    return [p for p in itertools.permutations(range(n)) if not even or _inversions(p) % 2 == 0]


@functools.lru_cache(maxsize=16)
def moving_at_most(group: str, things: int) -> tuple[int, ...]:
    """Numbers of those elements of `S<n>` or `A<n>` that leave all but `things` things in place."""
    members = elements(int(group[1:]), even=group[0] == 'A')
    return tuple(i for i, p in enumerate(members) if sum(j != k for j, k in enumerate(p)) <= things)


def _moved_things(group: str) -> tuple[int, int]:
    """The fewest things that an element other than 0 moves, and the most; (1, 0) for groups of anything else."""
    match = re.fullmatch('([SA])([0-9]+)', group)
    return (1, 0) if match is None else ({'S': 2, 'A': 3}[match[1]], int(match[2]))


def _order(factor: str) -> int:
    match = re.fullmatch('([SAZ])([1-9][0-9]{0,2})', factor)
    if match is None:
        return 0
    n = int(match[2])
    if match[1] == 'Z':
        return n
    size = functools.reduce(int.__mul__, range(1, n + 1))
    return size if match[1] == 'S' or n == 1 else size // 2


def _table(factor: str) -> list[list[int]]:
    kind, n = factor[0], int(factor[1:])
    if kind == 'Z':
        return [[(a + b) % n for b in range(n)] for a in range(n)]
    members = elements(n, even=kind == 'A')
    number = {p: i for i, p in enumerate(members)}
    return [[number[tuple(p[i] for i in q)] for q in members] for p in members]


def _product(left: list[list[int]], right: list[list[int]]) -> list[list[int]]:
    size = len(right)
    pairs = list(itertools.product(range(len(left)), range(size)))
    return [[left[a][c] * size + right[b][d] for c, d in pairs] for a, b in pairs]


def _inversions(p: tuple[int, ...]) -> int:
    return sum(a > b for a, b in itertools.combinations(p, 2))
