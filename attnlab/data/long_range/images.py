"""CIFAR-10 as sequences of grey pixels."""

import pathlib
import re
from collections.abc import Iterator

import numpy as np
from jaxtyping import UInt8

from attnlab.data.archives import tar_members
from attnlab.data.long_range.dataset import Example, Kind
from attnlab.errors import UserError

CIFAR10 = Kind(classes=10, length=1024, mean=122.6, deviation=61.0, highest=255.0)
"""32 x 32 pixels, row by row, standardised as in the code of S4; Krizhevsky 2009."""

TRAIN = 45_000
"""Training images; the last 5,000 of the archive's 50,000 are for validation, as in the Long Range Arena."""

RECORD = 1 + 3 * 1024
MEMBERS = re.compile(r'[^/]*/(data_batch_[1-5]|test_batch)\.bin')


def cifar10(archive: pathlib.Path, split: str) -> Iterator[Example]:
    """The images of `train`, `validation` or `test`, in the order of the files of the binary version."""
    batches = {path.stem: content.read() for path, content in tar_members(archive, MEMBERS)}
    names = sorted(name for name in batches if (name == 'test_batch') == (split == 'test'))
    content = b''.join(batches[name] for name in names)
    if not content or len(content) % RECORD:
        raise UserError(f'{archive} holds no complete records of CIFAR-10 for {split}')
    records = np.frombuffer(content, np.uint8).reshape(-1, RECORD)
    kept = {'train': slice(TRAIN), 'validation': slice(TRAIN, None), 'test': slice(None)}[split]
    for record in records[kept]:
        yield {'x': grey(record[1:].reshape(3, 1024).T), 'label': np.int32(record[0])}


def grey(pixels: UInt8[np.ndarray, 't 3']) -> UInt8[np.ndarray, 't']:
    """The luma 0.2989 R + 0.587 G + 0.114 B, computed in [0, 1] and scaled back as in TensorFlow."""
    luma = (pixels.astype(np.float32) / np.float32(255)) @ np.array([0.2989, 0.587, 0.114], np.float32)
    return (luma * np.float32(255.5)).astype(np.uint8)
