"""Problems of several kinds and lengths in one training stream."""

import dataclasses

import numpy as np

from attnlab.data.synthetic.problem import Example, Problem, require, require_length


@dataclasses.dataclass(frozen=True)
class Mixture(Problem):
    """Examples of several problems, each with a length of its own: of at most `lengths[i]` tokens from `parts[i]`.

    Rows are as long as the longest and padded. In evaluation each part is a slice, `part=NAME`; beyond the training
    length the part with the longest examples is asked.

    Attributes:
      parts: the problems, of one vocabulary.
      lengths: the most tokens of an example of each.
      names: of the slices.
      shares: of the examples, in any unit; empty: equal.

    Source: the training of Arora et al., "Simple linear attention language models balance the recall-throughput
    tradeoff", 2024, https://arxiv.org/abs/2402.18668.
    """

    parts: tuple[Problem, ...]
    lengths: tuple[int, ...]
    names: tuple[str, ...]
    shares: tuple[float, ...] = ()

    @property
    def vocab(self) -> int:
        return max(part.vocab for part in self.parts)

    @property
    def features(self) -> int | None:
        return self.parts[0].features

    def check(self, length: int) -> None:
        count = len(self.parts)
        require(self, 'parts', count > 0, 'at least one problem')
        require(self, 'lengths', len(self.lengths) == count, f'one length for each of {count} parts')
        require(self, 'names', len(set(self.names)) == len(self.names) == count, f'{count} different names')
        right = not self.shares or (len(self.shares) == count and min(self.shares) > 0)
        require(self, 'shares', right, f'empty, or {count} numbers above 0')
        same = len({(part.vocab, part.features) for part in self.parts}) == 1
        require(self, 'parts', same, 'problems of one vocabulary')
        require_length(
            self, length, length >= max(self.lengths), f'at least the longest part, {max(self.lengths)} tokens'
        )
        for part, most in zip(self.parts, self.lengths, strict=True):
            part.check(most)

    def labels(self, length: int) -> int:
        return max(part.labels(most) for part, most in zip(self.parts, self.lengths, strict=True))

    def generate(self, rng: np.random.Generator, length: int) -> Example:
        part, most = self._drawn(rng)
        return part.generate(rng, most)

    def draw(self, rng: np.random.Generator, length: int, split: str) -> Example:
        part, most = self._drawn(rng)
        return part.draw(rng, most, split)

    def variants(self, length: int) -> dict[str, Problem]:
        every = zip(self.names, self.parts, self.lengths, strict=True)
        return {f'part={name}': Mixture((part,), (most,), (name,)) for name, part, most in every}

    def stretched(self) -> Problem:
        return self.parts[int(np.argmax(self.lengths))].stretched()

    def _drawn(self, rng: np.random.Generator) -> tuple[Problem, int]:
        """One of the problems, and its length."""
        shares = np.asarray(self.shares or np.ones(len(self.parts)), np.float64)
        which = int(rng.choice(len(self.parts), p=shares / shares.sum()))
        return self.parts[which], self.lengths[which]
