"""Associative recall: predict the token that followed this one before."""

import dataclasses
from functools import lru_cache

import numpy as np

from attnlab.data.synthetic.mixture import Mixture
from attnlab.data.synthetic.problem import Example, Problem, fitting, require, require_length

FILLER = 0


@dataclasses.dataclass(frozen=True)
class MultiQueryRecall(Problem):
    """Multi-query associative recall: pairs of key and value, then every key again, where its value is predicted.

        k_1 v_1 ... k_n v_n   0 k_i 0 0 0 k_j 0 ...      label at k_i: v_i

    Keys are distinct, from 1 to `vocab / 2 - 1`; values are distinct, from `vocab / 2` up. Of the positions at even
    distances after the pairs, the queries take `n` without replacement, position `j` (from 1) with probability
    proportional to `j^(power - 1)`: most come early, some late.

    Attributes:
      vocab: number of tokens.
      pairs: possible numbers of pairs, one of which is drawn for each example.
      power: of the power law of query positions; 1 is uniform.
      random_fillers: whether the positions between queries hold random tokens instead of 0.

    Source: Arora et al., "Zoology: Measuring and Improving Recall in Efficient Language Models", 2023,
    https://arxiv.org/abs/2312.04927.
    """

    vocab: int = 8192
    pairs: tuple[int, ...] = (4,)
    power: float = 0.01
    random_fillers: bool = False

    def check(self, length: int) -> None:
        require(self, 'vocab', self.vocab >= 4 and self.vocab % 2 == 0, 'an even number from 4')
        room = self.vocab // 2 - 1
        require(
            self, 'pairs', _counts(self.pairs, room), f'whole numbers of at least 1, at most vocab / 2 - 1 = {room}'
        )
        require(self, 'power', self.power > 0, 'a number above 0')
        wanted = f'an even number, at least 4 tokens for each of {max(self.pairs)} pairs: {4 * max(self.pairs)}'
        require_length(self, length, length % 2 == 0 and length >= 4 * max(self.pairs), wanted)

    def labels(self, length: int) -> int:
        return max(self.pairs)

    def generate(self, rng: np.random.Generator, length: int) -> Example:
        count = int(rng.choice(self.pairs))
        half = self.vocab // 2
        keys = 1 + rng.choice(half - 1, count, replace=False)
        values = half + rng.choice(half, count, replace=False)
        tokens = fillers(rng, length, self.vocab, self.random_fillers)
        tokens[: 2 * count] = np.stack([keys, values], axis=1).reshape(-1)
        at = later(rng, 2 * count, length, count, self.power)
        tokens[at] = keys
        return in_order(tokens, at, values)

    def variants(self, length: int) -> dict[str, Problem]:
        counts = sorted({*self.pairs, *(max(self.pairs) * factor for factor in (2, 4, 8))})
        return fitting(length, {f'pairs={n}': dataclasses.replace(self, pairs=(n,)) for n in counts})


def mixed_recall(
    vocab: int, sizes: tuple[tuple[int, int], ...], shares: tuple[float, ...] = (), *, random_fillers: bool = False
) -> Mixture:
    """Multi-query recall of several `sizes` in one stream: tokens of an example and its pairs, a slice `part=64-4`."""
    return Mixture(
        parts=tuple(MultiQueryRecall(vocab=vocab, pairs=(pairs,), random_fillers=random_fillers) for _, pairs in sizes),
        lengths=tuple(length for length, _ in sizes),
        names=tuple(f'{length}-{pairs}' for length, pairs in sizes),
        shares=shares,
    )


@dataclasses.dataclass(frozen=True)
class OverwrittenRecall(Problem):
    """Recall with forgetting: a key may be written again with another value, and its last value is predicted.

        a 1   b 2   a 3   |   b a      labels: 2 3

    Every key is written once, `rewrites` of the writes after that go to random keys, and the order of all writes is
    random. Queries follow as in multi-query associative recall. A memory that only adds returns a mixture of values.

    Attributes:
      vocab: number of tokens.
      pairs: number of keys.
      rewrites: further writes.
      power: of the power law of query positions; 1 is uniform.

    Source: the overwriting that the delta rule is for, Schlag, Irie and Schmidhuber, "Linear Transformers Are Secretly
    Fast Weight Programmers", 2021, https://arxiv.org/abs/2102.11174, in the layout of Arora et al., 2023.
    """

    vocab: int = 8192
    pairs: int = 4
    rewrites: int = 4
    power: float = 0.01

    def check(self, length: int) -> None:
        require(self, 'vocab', self.vocab >= 4 and self.vocab % 2 == 0, 'an even number from 4')
        room = self.vocab // 2 - 1
        require(self, 'pairs', 1 <= self.pairs <= room, f'a whole number from 1 to vocab / 2 - 1 = {room}')
        most = self.vocab // 2 - self.pairs
        require(self, 'rewrites', 0 <= self.rewrites <= most, f'a whole number from 0 to vocab / 2 - pairs = {most}')
        require(self, 'power', self.power > 0, 'a number above 0')
        least = 4 * self.pairs + 2 * self.rewrites
        require_length(self, length, length % 2 == 0 and length >= least, f'an even number of at least {least}')

    def labels(self, length: int) -> int:
        return self.pairs

    def generate(self, rng: np.random.Generator, length: int) -> Example:
        writes = self.pairs + self.rewrites
        half = self.vocab // 2
        keys = 1 + rng.choice(half - 1, self.pairs, replace=False)
        values = half + rng.choice(half, writes, replace=False)
        which = rng.permutation(np.concatenate([np.arange(self.pairs), rng.integers(self.pairs, size=self.rewrites)]))
        tokens = fillers(rng, length, self.vocab, False)
        tokens[: 2 * writes] = np.stack([keys[which], values], axis=1).reshape(-1)
        last = np.empty(self.pairs, np.int64)
        last[which] = values  # of equal indices, numpy keeps the last
        at = later(rng, 2 * writes, length, self.pairs, self.power)
        tokens[at] = keys
        return in_order(tokens, at, last)

    def variants(self, length: int) -> dict[str, Problem]:
        counts = sorted({0, self.rewrites, self.pairs, 2 * self.pairs, 4 * self.pairs})
        return fitting(length, {f'rewrites={n}': dataclasses.replace(self, rewrites=n) for n in counts})


@dataclasses.dataclass(frozen=True)
class CompositionalRecall(Problem):
    """Recall in several hops: links of chains in random order, then questions `h hops from here?`.

        b c   a b   |   2 a      label at a: c

    A chain is `links + 1` distinct symbols, each of its links a pair of neighbours. A question is a token for the
    number of hops, then the first symbol of a chain; every chain is asked about once. With numbers of hops that
    training leaves out, the slices distinguish composition from memorisation.

    Attributes:
      vocab: number of tokens: 0 is filler, 1 to `links` are numbers of hops, the rest are symbols.
      chains: number of chains.
      links: links per chain, and the most hops that can be asked.
      hops: the numbers of hops asked in training.
      power: of the power law of question positions; 1 is uniform.

    Source: variable tracking in Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language
    Models?", 2024, https://arxiv.org/abs/2404.06654, in the layout of Arora et al., 2023.
    """

    vocab: int = 8192
    chains: int = 4
    links: int = 3
    hops: tuple[int, ...] = (1, 2)
    power: float = 0.01

    def check(self, length: int) -> None:
        require(self, 'links', self.links >= 1, 'a whole number of at least 1')
        require(self, 'chains', self.chains >= 1, 'a whole number of at least 1')
        require(self, 'hops', _counts(self.hops, self.links), f'whole numbers from 1 to links = {self.links}')
        least = 1 + self.links + self.chains * (self.links + 1)
        require(
            self,
            'vocab',
            self.vocab >= least,
            f'a whole number of at least {least}, for symbols that are all different',
        )
        require(self, 'power', self.power > 0, 'a number above 0')
        least = 2 * self.chains * (self.links + 1)
        require_length(self, length, length % 2 == 0 and length >= least, f'an even number of at least {least}')

    def labels(self, length: int) -> int:
        return self.chains

    def generate(self, rng: np.random.Generator, length: int) -> Example:
        first = 1 + self.links
        count = self.chains * (self.links + 1)
        symbols = (first + rng.choice(self.vocab - first, count, replace=False)).reshape(self.chains, -1)
        pairs = np.stack([symbols[:, :-1], symbols[:, 1:]], axis=-1).reshape(-1, 2)
        tokens = fillers(rng, length, self.vocab, False)
        tokens[: pairs.size] = rng.permutation(pairs).reshape(-1)
        hops = rng.choice(self.hops, self.chains)
        at = later(rng, pairs.size, length, self.chains, self.power) + 1
        tokens[at - 1] = hops
        tokens[at] = symbols[:, 0]
        return in_order(tokens, at, symbols[np.arange(self.chains), hops])

    def variants(self, length: int) -> dict[str, Problem]:
        every = range(1, self.links + 1)
        return fitting(length, {f'hops={n}': dataclasses.replace(self, hops=(n,)) for n in every})


@dataclasses.dataclass(frozen=True)
class InductionHeads(Problem):
    """A special token occurs once among random ones, and again at the end, where what followed it is predicted.

        c a S b d a ... c S      label at the last S: b

    The special token is `vocab - 1`.

    Source: Gu and Dao, "Mamba: Linear-Time Sequence Modeling with Selective State Spaces", 2023,
    https://arxiv.org/abs/2312.00752, after Olsson et al., "In-context Learning and Induction Heads", 2022.
    """

    vocab: int = 16

    def check(self, length: int) -> None:
        require(self, 'vocab', self.vocab >= 3, 'a whole number of at least 3')
        require_length(self, length, length >= 3, 'at least 3 tokens')

    def labels(self, length: int) -> int:
        return 1

    def generate(self, rng: np.random.Generator, length: int) -> Example:
        tokens = rng.integers(self.vocab - 1, size=length)
        place = int(rng.integers(length - 2))
        tokens[[place, length - 1]] = self.vocab - 1
        return Example(tokens, np.array([length - 1]), tokens[[place + 1]])


def fillers(rng: np.random.Generator, length: int, vocab: int, random: bool) -> np.ndarray:
    """Filler tokens: 0, or random ones."""
    return rng.integers(vocab, size=length) if random else np.full(length, FILLER)


def later(rng: np.random.Generator, start: int, length: int, count: int, power: float) -> np.ndarray:
    """`count` different positions at even distances from `start`, by the power law of multi-query recall."""
    return start + 2 * rng.choice((length - start) // 2, count, replace=False, p=_law((length - start) // 2, power))


def in_order(tokens: np.ndarray, at: np.ndarray, targets: np.ndarray) -> Example:
    """The example with its labels sorted by position."""
    order = np.argsort(at)
    return Example(tokens, at[order], targets[order])


@lru_cache(maxsize=64)
def _law(places: int, power: float) -> np.ndarray:
    weights = np.arange(1, places + 1) ** (power - 1.0)
    return weights / weights.sum()


def _counts(counts: tuple[int, ...], most: int) -> bool:
    return bool(counts) and all(type(n) is int and 1 <= n <= most for n in counts)
