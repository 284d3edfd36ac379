"""Facts that are drawn once and have to be learned by heart: of a subject and a relation, an object."""

import dataclasses
from functools import lru_cache

import numpy as np

from attnlab.data.synthetic.problem import Example, Problem, require, require_length

PROMPT = 4
"""Tokens of a prompt: two of the subject, the relation, and the one after which the object is predicted."""


@dataclasses.dataclass(frozen=True)
class Facts(Problem):
    """Two tokens name a subject, one a relation, and after a fourth, the same for all, the object is predicted.

        ada lovelace born-in ?      label at ?: london

    Subjects are pairs of names that are all different, every name of many subjects, so that neither token alone says
    which one it is; objects are drawn, uniformly and independently. The table is drawn once, from `seed`: training and
    test ask about the same facts, and there is nothing to generalise.

    Attributes:
      subjects: number of them.
      names: number of first names, and of last names.
      relations: that each subject has.
      objects: number of them.
      seed: of the table.

    Source: causal tracing of facts, Meng et al., "Locating and Editing Factual Associations in GPT", 2022,
    https://arxiv.org/abs/2202.05262, whose facts are of the world; drawn facts as in Allen-Zhu and Li, "Physics of
    Language Models: Part 3.3", 2024, https://arxiv.org/abs/2404.05405.
    """

    subjects: int = 256
    names: int = 32
    relations: int = 4
    objects: int = 32
    seed: int = 0

    @property
    def vocab(self) -> int:
        """First names, last names, relations, objects, and the token that asks, in this order."""
        return 2 * self.names + self.relations + self.objects + 1

    def check(self, length: int) -> None:
        for name in ('names', 'relations', 'objects'):
            require(self, name, getattr(self, name) >= 1, 'a whole number of at least 1')
        require(self, 'seed', self.seed >= 0, 'a whole number of at least 0')
        most = self.names**2
        require(self, 'subjects', 2 <= self.subjects <= most, f'a whole number from 2 to the pairs of names, {most}')
        require_length(self, length, length >= PROMPT, f'at least {PROMPT} tokens')

    def labels(self, length: int) -> int:
        return 1

    def generate(self, rng: np.random.Generator, length: int) -> Example:
        return self.fact(int(rng.integers(self.subjects)), int(rng.integers(self.relations)))

    def fact(self, subject: int, relation: int) -> Example:
        """The prompt about a fact, and its object."""
        pairs, objects = _table(self)
        first, last = pairs[subject]
        tokens = np.array([first, self.names + last, 2 * self.names + relation, self.vocab - 1])
        return Example(tokens, np.array([PROMPT - 1]), np.array([self.object(int(objects[subject, relation]))]))

    def object(self, which: int) -> int:
        """The token of an object."""
        return 2 * self.names + self.relations + which


@lru_cache(maxsize=16)
def _table(facts: Facts) -> tuple[np.ndarray, np.ndarray]:
    """The names of subjects, and the objects by subject and relation."""
    rng = np.random.default_rng(facts.seed)
    chosen = rng.choice(facts.names**2, facts.subjects, replace=False)
    pairs = np.stack(np.divmod(chosen, facts.names), axis=1)
    return pairs, rng.integers(facts.objects, size=(facts.subjects, facts.relations))
