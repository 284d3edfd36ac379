"""Retrieval from a set."""

import dataclasses

import numpy as np

from attnlab.data.synthetic.problem import Example, Problem, require, require_length


@dataclasses.dataclass(frozen=True)
class MaxRetrieval(Problem):
    """The class of the item with the highest priority, predicted at a query that follows all items.

        item_i = (priority_i, one-hot class_i, 0),   query = (0, 0, u)    label at the query: class of the top priority

    Priorities and `u` are uniform in [0, 1). There are from `fewest` items to as many as fit before the query; with
    `fewest=None` always as many as fit. The items are a set: a mixer without positions suffices.

    Attributes:
      classes: number of classes.
      fewest: the fewest items; `None` for as many as fit.

    Source: Velickovic, Perivolaropoulos, Barbero and Pascanu, "softmax is not enough (for sharp out-of-distribution)",
    2024, https://arxiv.org/abs/2410.01104.
    """

    classes: int = 10
    fewest: int | None = 1

    @property
    def vocab(self) -> int:
        return self.classes

    @property
    def features(self) -> int:
        return self.classes + 2

    def check(self, length: int) -> None:
        require(self, 'classes', self.classes >= 2, 'a whole number of at least 2')
        require(self, 'fewest', self.fewest is None or self.fewest >= 1, 'a whole number of at least 1, or None')
        require_length(self, length, length > (self.fewest or 1), f'at least {(self.fewest or 1) + 1} tokens')

    def labels(self, length: int) -> int:
        return 1

    def generate(self, rng: np.random.Generator, length: int) -> Example:
        size = length - 1 if self.fewest is None else int(rng.integers(self.fewest, length))
        priorities, classes = rng.random(size, np.float32), rng.integers(self.classes, size=size)
        tokens = np.zeros((size + 1, self.features), np.float32)
        tokens[:size, 0] = priorities
        tokens[np.arange(size), 1 + classes] = 1
        tokens[size, -1] = rng.random()
        return Example(tokens, np.array([size]), classes[[priorities.argmax()]])

    def stretched(self) -> Problem:
        return dataclasses.replace(self, fewest=None)
