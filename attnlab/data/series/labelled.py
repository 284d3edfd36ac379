"""Windows of one's own with a label each, in a file of numpy."""

import dataclasses
import functools
import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from attnlab.data.archives import UNREADABLE
from attnlab.data.long_range.dataset import PARTS, VALID, Dataset, Example, Kind, divided, known_split, named_splits
from attnlab.data.series.files import digest
from attnlab.data.series.series import scale
from attnlab.errors import UserError

Split = tuple[Float[np.ndarray, 'n t v'], Int[np.ndarray, 'n']]


@dataclasses.dataclass(frozen=True)
class LabelledWindows(Dataset):
    """The arrays `x`, `n t` or `n t v`, and `label`, `n` whole numbers from 0 without a gap, of an `.npz` file.

    Windows are put in a fixed random order, of which 80 % are for training and 10 % each for validation and testing.
    Where there are `x_train`, `label_train`, `x_test` and `label_test` these are the splits, and without those of
    `valid`, `val` or `validation` the windows of `test` are validated on. Every variate is less its mean over the
    training windows and divided by its standard deviation there, 1 where it is constant; no other window reaches
    either.

    Attributes:
      path: the file.
      classes: how many labels there are; `labelled_windows` reads it and the two below.
      steps: of a window.
      variates: of a window.
    """

    path: str
    classes: int
    steps: int
    variates: int

    @property
    def kind(self) -> Kind:
        return Kind(classes=self.classes, length=self.steps, channels=self.variates)

    @property
    def splits(self) -> Mapping[str, int | None]:
        return dict.fromkeys(PARTS)

    def rows(self, split: str) -> list[Example]:
        known_split(self, split)
        every = splits(self.path)
        mean, deviation = scale(every['train'][0])
        windows, labels = every[split]
        scaled = ((windows - mean) / deviation).astype(np.float32)
        return [
            {'x': window[:, 0] if self.variates == 1 else window, 'label': np.int32(label)}
            for window, label in zip(scaled, labels, strict=True)
        ]

    def describe(self) -> dict[str, Any]:
        return {'source': 'labelled windows', 'path': self.path, 'content': digest(pathlib.Path(self.path))}

    def same_rows(self, split: str, other: str) -> bool:
        known_split(self, split, other)
        every = splits(self.path)
        return every[split] is every[other]


def labelled_windows(path: str) -> LabelledWindows:
    """The data set of a file. Raises `UserError` where it is none, and for labels that leave out a number."""
    windows, labels = splits(path)['train']
    return LabelledWindows(path, int(labels.max()) + 1, *windows.shape[1:])


@functools.lru_cache(maxsize=2)
def splits(path: str) -> dict[str, Split]:
    """The windows and labels of every split, as they are. Raises `UserError` for a file without them."""
    try:
        # numpy leaves open what it opens itself where it cannot be read.
        with pathlib.Path(path).open('rb') as file:
            return _splits(np.load(file, allow_pickle=False), path)
    except UNREADABLE as error:
        raise UserError(f'{path} cannot be read as a file of numpy: {error}') from error


def _splits(loaded: Any, path: str) -> dict[str, Split]:
    """The windows and labels of every split in what was loaded."""
    names = getattr(loaded, 'files', ())
    if 'x_train' in names:
        of = {name.removeprefix('x_') for name in names if name.startswith('x_')}
        held = {name for name in of if f'label_{name}' in names or name in VALID}
        known = named_splits(held, f'splits of {path}')
        ends = {'train': 'train', 'test': 'test', **known}
        found = {split: _pair(loaded, path, f'_{name}') for split, name in ends.items()}
        found.setdefault('valid', found['test'])
    else:
        windows, labels = _pair(loaded, path, '')
        found = {split: (windows[places], labels[places]) for split, places in divided(len(labels)).items()}
    shapes, trained = {pair[0].shape[1:] for pair in found.values()}, np.unique(found['train'][1])
    if len(shapes) > 1 or any(not len(labels) or not np.isin(labels, trained).all() for _, labels in found.values()):
        raise UserError(
            f'{path} has windows of shapes {sorted(shapes)} and {len(trained)} classes in training; every split needs '
            'windows, all of one shape, and no class that training has not'
        )
    if len(trained) < 2:
        raise UserError(f'{path} has windows of one class; a classifier needs two or more')
    if trained[-1] >= len(trained):
        absent = int(np.argmax(trained != np.arange(len(trained))))
        raise UserError(
            f'{path} has labels up to {trained[-1]} and no training windows of {absent}; number the classes that there '
            'are from 0, without a gap'
        )
    return found


def _pair(loaded: Any, path: str, end: str) -> Split:
    """The windows `n t v` and the labels of a split."""
    names = getattr(loaded, 'files', ())
    missing = [name for name in (f'x{end}', f'label{end}') if name not in names]
    if missing:
        raise UserError(f'{path} has no array {missing[0]!r}; it needs x and label, or x_train, label_train and so on')
    try:
        windows, labels = loaded[f'x{end}'], loaded[f'label{end}']
    except UNREADABLE as error:
        raise UserError(f'{path} has an x{end} or label{end} that cannot be read as numbers: {error}') from error
    fits = (
        windows.ndim in (2, 3)
        and all(windows.shape[1:])
        and labels.shape == windows.shape[:1]
        and labels.dtype.kind in 'iu'
    )
    if not fits or windows.dtype.kind not in 'fiu' or not np.isfinite(windows).all() or labels.min(initial=0) < 0:
        raise UserError(
            f'{path} has x{end} of {windows.dtype} {windows.shape} and label{end} of {labels.dtype} {labels.shape}; x '
            'must be finite numbers, n t or n t v, and label as many whole numbers from 0'
        )
    variates = windows.shape[2] if windows.ndim == 3 else 1
    return windows.reshape(*windows.shape[:2], variates).astype(np.float64), labels.astype(np.int64)
