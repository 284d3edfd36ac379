"""Windows of equal length over a text, by index."""

import dataclasses

import numpy as np

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
    document than its token; `bytes` is how many bytes the target stands for, so that with losses in nats

        bits per byte = sum(weights * losses) / (ln 2 * sum(weights * bytes)).

    With `stride < length` windows overlap, and what an earlier window predicted has weight 0: every target counts once,
    and after the first window has at least `length - stride` tokens before it. With `pad` the tokens left at the end
    make one more window, filled up with segment 0 and weight 0: whatever the length, the same targets are predicted.

    Attributes:
      text: what the windows lie over.
      length: tokens a window.
      stride: tokens from the start of one window to that of the next, at most `length`; `None` is `length`.
      pad: whether the tokens left at the end make a padded window (to evaluate) or are left out (to train).

    Raises:
      UserError: for a text of fewer than `length + 1` tokens, or 2 with `pad`, and a stride out of bounds.
    """

    text: Text
    length: int
    stride: int | None = None
    pad: bool = False

    def __post_init__(self) -> None:
        if self.length < 1:
            raise UserError(f'length of a window is {self.length}; it is at least 1')
        if not 1 <= self._step <= self.length:
            raise UserError(f'stride is {self.stride}; it lies between 1 and the length of a window, {self.length}')
        needed = 2 if self.pad else self.length + 1
        if len(self.text) < needed:
            raise UserError(
                f'the text has {len(self.text)} tokens and a window of length {self.length} needs {needed}; '
                'choose a shorter length or a longer text'
            )

    def __len__(self) -> int:
        beyond_first = len(self.text) - 1 - self.length
        windows = 1 + max(beyond_first, 0) // self._step
        left = max(beyond_first, 0) % self._step
        return windows + (self.pad and left > 0)

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(f'window {index} of {len(self)}')
        start = int(index) * self._step
        ids = np.asarray(self.text.tokens[start : start + self.length + 1], np.int32)
        tokens, targets = ids[:-1], ids[1:]
        begins, ends = self._documents(start, len(tokens))
        row = {
            'tokens': tokens,
            'targets': targets,
            'segments': begins.cumsum(dtype=np.int32) + np.int32(1),
            'positions': _since(begins),
            'weights': np.where(ends, np.float32(0), np.float32(1)),
            'bytes': self.text.tokenizer.token_bytes[targets],
        }
        if index:
            row['weights'][: self.length - self._step] = 0
        missing = self.length - len(tokens)
        return {name: np.pad(values, (0, missing)) for name, values in row.items()} if missing else row

    @property
    def _step(self) -> int:
        return self.length if self.stride is None else self.stride

    def _documents(self, start: int, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Where in `length` tokens from `start` a further document begins, and where one ends: two masks, `t`."""
        first, last = np.searchsorted(self.text.ends, (start, start + length), side='right')
        bounds = self.text.ends[first:last] - start
        begins, ends = np.zeros(length, bool), np.zeros(length, bool)
        begins[bounds[bounds < length]] = True
        ends[bounds - 1] = True
        return begins, ends


def _since(begins: np.ndarray) -> np.ndarray:
    """How far every place is from the last `True` at or before it, or from place 0."""
    places = np.arange(len(begins), dtype=np.int32)
    return places - np.maximum.accumulate(np.where(begins, places, np.int32(0)))
