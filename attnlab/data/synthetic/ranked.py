"""A source of transitions whose log-probabilities have a known rank."""

import dataclasses
import functools

import numpy as np
from jaxtyping import Float

from attnlab.data.edition import Editioned
from attnlab.data.pipeline import Row
from attnlab.errors import UserError, nearest

SPLITS = ('train', 'test')


@dataclasses.dataclass(frozen=True)
class RankedTransitions(Editioned):
    """`p(w | c) = softmax_w((A B^T)_cw)`, with A and B of `rank - 1` columns, standard normal, scaled to `spread`.

    The logarithms of the probabilities are the logits less a number a row, and so have rank `rank`. A linear head that
    reads `rank - 1` channels can be exact, and a narrower one cannot: Yang et al. 2018,
    https://arxiv.org/abs/1711.03953.

    Attributes:
      tokens: how many there are, contexts and continuations alike.
      rank: of the logarithms of the probabilities.
      spread: the standard deviation of a logit.
      seed: of the draw.

    Raises `UserError` for a rank that is not from 2 to the tokens, a spread that is not positive, and a seed below 0.
    """

    tokens: int = 256
    rank: int = 40
    spread: float = 2.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 2 <= self.rank <= self.tokens:
            raise UserError(f'rank of RankedTransitions is {self.rank}; it must be from 2 to its tokens, {self.tokens}')
        if self.spread <= 0:
            raise UserError(f'spread of RankedTransitions is {self.spread}; it must be positive')
        if self.seed < 0:
            raise UserError(f'seed of RankedTransitions is {self.seed}; it must be a whole number of at least 0')

    def contexts(self, split: str) -> 'Contexts':
        """Every context; both splits are the same. Raises `UserError` where there is no such split."""
        if split not in SPLITS:
            raise UserError(f'RankedTransitions has no split {split!r}{nearest(split, SPLITS)}')
        return Contexts(self)

    def logits(self) -> Float[np.ndarray, 'c o']:
        """`A B^T`, in float64."""
        return _logits(self)


@dataclasses.dataclass(frozen=True)
class Contexts:
    """Context `i`: `tokens`, int32 `1`; `probabilities` of what follows, float32 `o`; `weights`, float32, 1."""

    table: RankedTransitions

    def __len__(self) -> int:
        return self.table.tokens

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(f'context {index} of {len(self)}')
        scores = self.table.logits()[index]
        chances = np.exp(scores - scores.max())
        return {
            'tokens': np.array([index], np.int32),
            'probabilities': (chances / chances.sum()).astype(np.float32),
            'weights': np.array(1, np.float32),
        }


@functools.lru_cache(maxsize=4)
def _logits(table: RankedTransitions) -> Float[np.ndarray, 'c o']:
    rng = np.random.default_rng(table.seed)
    left, right = (rng.standard_normal((table.tokens, table.rank - 1)) for _ in range(2))
    return table.spread / np.sqrt(table.rank - 1) * left @ right.T
