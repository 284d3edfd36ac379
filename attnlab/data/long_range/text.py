"""Film reviews as bytes: positive or negative?"""

import pathlib
import re
from collections.abc import Iterator

import numpy as np

from attnlab.data.archives import tar_members
from attnlab.data.long_range.dataset import Example, Kind

IMDB = Kind(classes=2, length=4096, vocab=257, offset=1, difficulties={'length': (1, 1024, 2048, 4096)})
"""Bytes of the raw review, the id of byte `b` being `b + 1`; Maas et al. 2011."""

LABELS = {'neg': 0, 'pos': 1}


def imdb(archive: pathlib.Path, split: str) -> Iterator[Example]:
    """The labelled reviews of `train` or `test`, in the order of the archive."""
    for path, content in tar_members(archive, re.compile(rf'aclImdb/{split}/(neg|pos)/\d+_\d+\.txt')):
        yield {'x': np.frombuffer(content.read(), np.uint8), 'label': np.int32(LABELS[path.parts[2]])}
