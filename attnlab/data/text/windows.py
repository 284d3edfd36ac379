"""Windows of equal length over a text, by index."""

import dataclasses
import functools

import numpy as np
from jaxtyping import Int64

from attnlab.data.pipeline import Row
from attnlab.data.text.corpus import Text
from attnlab.errors import UserError


@dataclasses.dataclass(frozen=True)
class Windows:
    """Window `i` reads `length` tokens from position `a = i * stride` and predicts each one's successor.

        tokens_j = text[a + j],   targets_j = text[a + j + 1],   j = 0 .. length - 1

    A row holds `tokens`, `targets`, `segments`, `positions` and `bytes` (int32) and `weights` (float32), all `t`.
    Segments number the documents of the row from 1; positions count from the start of the document, or of the window
    where the document began before it. `weights` is 1 where the target counts, and 0 where it belongs to another
    document than its token; `bytes` is the number of bytes of the target, so that with losses in nats

        bits per byte = sum(weights * losses) / (ln 2 * sum(weights * bytes)).

    With `stride < length` windows overlap, and targets that an earlier window predicted have weight 0: every target
    counts once, and after the first window has at least `length - stride` tokens before it. With `pad` the tokens left
    at the end make one more window, filled up with segment 0 and weight 0: whatever the length, the same targets are
    predicted.

    Attributes:
      text: the text that the windows cover.
      length: tokens a window.
      stride: tokens from the start of one window to that of the next, at most `length`; `None` is `length`.
      pad: whether the tokens left at the end make a padded window (to evaluate) or are left out (to train).

    Raises:
      UserError: for a text of fewer than `length + 1` tokens, or 2 with `pad`, a stride out of range, and for a
        window with tokens that its tokenizer does not know.
    """

    text: Text
    length: int
    stride: int | None = None
    pad: bool = False

    def __post_init__(self) -> None:
        if self.length < 1:
            raise UserError(f'length of a window is {self.length}; it must be at least 1')
        if not 1 <= self.step <= self.length:
            raise UserError(f'stride is {self.stride}; it must be from 1 to the length of a window, {self.length}')
        needed = 2 if self.pad else self.length + 1
        if len(self.text) < needed:
            raise UserError(
                f'the text has {len(self.text)} tokens and a window of length {self.length} needs {needed}; '
                'choose a shorter length or a longer text'
            )

    def __len__(self) -> int:
        beyond_first = len(self.text) - 1 - self.length
        windows = 1 + max(beyond_first, 0) // self.step
        left = max(beyond_first, 0) % self.step
        return windows + (self.pad and left > 0)

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(f'window {index} of {len(self)}')
        start = int(index) * self.step
        ids = np.asarray(self.text.tokens[start : start + self.length + 1], np.int32)
        token_bytes = self.text.tokenizer.token_bytes
        if ids.max() >= len(token_bytes):
            raise UserError(
                f'window {index} of the text has a token {ids.max()}, and its tokenizer knows {len(token_bytes)}; '
                'if it is of a cache, the entry is damaged: delete it'
            )
        tokens, targets = ids[:-1], ids[1:]
        begins, ends = self._documents(start, len(tokens))
        row = {
            'tokens': tokens,
            'targets': targets,
            'segments': begins.cumsum(dtype=np.int32) + np.int32(1),
            'positions': _since(begins),
            'weights': np.where(ends, np.float32(0), np.float32(1)),
            'bytes': token_bytes[targets],
        }
        if index:
            row['weights'][: self.length - self.step] = 0
        missing = self.length - len(tokens)
        return {name: np.pad(values, (0, missing)) for name, values in row.items()} if missing else row

    @property
    def step(self) -> int:
        """Tokens from the start of one window to that of the next."""
        return self.length if self.stride is None else self.stride

    def _documents(self, start: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Where in `length` tokens from `start` a further document begins, and where one ends: two masks, `t`."""
        first, last = np.searchsorted(self.text.ends, (start, start + length), side='right')
        bounds = self.text.ends[first:last] - start
        begins, ends = np.zeros(length, bool), np.zeros(length, bool)
        begins[bounds[bounds < length]] = True
        ends[bounds - 1] = True
        return begins, ends


UNITS = 1024
"""Documents that the rows of a sample distinguish; of more, those with equal numbers modulo this are one unit."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """Padded windows over blocks spread over a whole text: the sample of a held-out split that is evaluated.

    Of `p = len(text) - 1` targets, `n = tokens // block` blocks of `block` targets are taken, at equal distances: block
    `k` is about the place `(2k + 1) p / 2n`. They do not overlap, and a long document has more of them. Windows of
    other lengths over the same blocks predict the same targets. A row is that of `Windows`, and `documents` (int32,
    `t`), the number of each token's document in the text, modulo `UNITS`.

    Attributes:
      text: the text that is sampled.
      length: tokens a window.
      tokens: how many targets, rounded down to whole blocks; `None`, or as many as there are, for all, in one block.
      block: targets that follow one another; `None` is `length`.
      stride: of the windows of a block, as in `Windows`.

    Raises:
      UserError: for an empty sample, and as `Windows` does.
    """

    text: Text
    length: int
    tokens: int | None = None
    block: int | None = None
    stride: int | None = None

    def __post_init__(self) -> None:
        if self.tokens is not None and self.tokens < 1:
            raise UserError(f'tokens of a sample is {self.tokens}; it must be at least 1')
        self._windows(0)

    def __len__(self) -> int:
        return len(self._starts) * self._windows_per_block

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(f'window {index} of {len(self)}')
        block, window = divmod(int(index), self._windows_per_block)
        windows = self._windows(block)
        row = windows[window]
        first = int(self._starts[block]) + window * windows.step
        documents = np.searchsorted(self.text.ends, first + np.arange(self.length), side='right') % UNITS
        return row | {'documents': np.where(row['segments'] > 0, documents, 0).astype(np.int32)}

    @property
    def whole(self) -> bool:
        """Whether the whole text is evaluated."""
        return self.tokens is None or self.tokens >= len(self.text) - 1

    @functools.cached_property
    def documents(self) -> int:
        """How many documents the blocks come from."""
        ends = self._starts + self._block
        found = [np.searchsorted(self.text.ends, places, side='right') for places in (self._starts, ends - 1)]
        return len(np.unique(np.concatenate([np.arange(first, last + 1) for first, last in zip(*found, strict=True)])))

    @functools.cached_property
    def _block(self) -> int:
        most = len(self.text) - 1
        if self.tokens is None or self.tokens >= most:
            return most
        return min(self.length if self.block is None else self.block, self.tokens)

    @functools.cached_property
    def _starts(self) -> Int64[np.ndarray, '_']:
        """Where blocks begin."""
        if self.tokens is None or self.whole:
            return np.zeros(1, np.int64)
        count = self.tokens // self._block
        return (2 * np.arange(count) + 1) * (len(self.text) - 1) // (2 * count) - self._block // 2

    @functools.cached_property
    def _windows_per_block(self) -> int:
        return len(self._windows(0))

    def _windows(self, block: int) -> Windows:
        start = int(self._starts[block])
        text = self.text if self.whole else self.text.part(start, start + self._block + 1)
        return Windows(text, self.length, self.stride, pad=True)


def _since(begins: np.ndarray) -> np.ndarray:
    """The distance of every position from the last `True` at or before it, or from position 0."""
    places = np.arange(len(begins), dtype=np.int32)
    return places - np.maximum.accumulate(np.where(begins, places, np.int32(0)))
