"""Pass-key retrieval: find a number in a long text of filler."""

import dataclasses

import numpy as np

from attnlab.data.synthetic.problem import Example, Problem, require, require_length

TASK = (
    b'There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. '
    b'I will quiz you about the important information there.\n'
)
FILLER = b'The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. '
QUESTION = b'\nWhat is the pass key? The pass key is '
LARGEST = 50_000


@dataclasses.dataclass(frozen=True)
class Passkey(Problem):
    """A pass key of 1 to 50000 stated once in a text of any length, and requested at its end; tokens are bytes.

        TASK filler The pass key is 4711. Remember it. 4711 is the pass key. filler What is ...? The pass key is 4711

    The labels are the digits, each predicted from those before it; the full stop after them, which is trivial,
    is not a label.

    Attributes:
      depth: where in the filler the key is stated, from 0, before all of it, to 1, after it; `None`: at random.

    Source: Mohtashami and Jaggi, "Landmark Attention: Random-Access Infinite Context Length for Transformers", 2023,
    https://arxiv.org/abs/2305.16300.
    """

    depth: float | None = None

    @property
    def vocab(self) -> int:
        return 256

    def check(self, length: int) -> None:
        require(self, 'depth', self.depth is None or 0 <= self.depth <= 1, 'a number from 0 to 1, or None')
        least = len(TASK) + len(_line(LARGEST)) + len(QUESTION) + len(str(LARGEST))
        require_length(self, length, length >= least, f'at least {least} bytes for its sentences')

    def labels(self, length: int) -> int:
        return len(str(LARGEST))

    def generate(self, rng: np.random.Generator, length: int) -> Example:
        key = int(rng.integers(1, LARGEST, endpoint=True))
        digits = str(key).encode()
        room = length - len(TASK) - len(_line(key)) - len(QUESTION) - len(digits)
        anywhere = int(rng.integers(room, endpoint=True))
        before = anywhere if self.depth is None else round(self.depth * room)
        text = TASK + _filler(before) + _line(key) + _filler(room - before) + QUESTION + digits
        at = np.arange(length - len(digits) - 1, length - 1)
        return Example(np.frombuffer(text, np.uint8), at, np.frombuffer(digits, np.uint8))

    def variants(self, length: int) -> dict[str, Problem]:
        return {f'depth={depth}': dataclasses.replace(self, depth=depth) for depth in (0.0, 0.5, 1.0)}


def _line(key: int) -> bytes:
    return b'The pass key is %d. Remember it. %d is the pass key. ' % (key, key)


def _filler(size: int) -> bytes:
    return (FILLER * (size // len(FILLER) + 1))[:size]
