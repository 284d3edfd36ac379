"""Pairs of papers of the ACL Anthology Network as bytes: does one cite the other?"""

import pathlib
import re
from collections.abc import Iterator

import numpy as np

from attnlab.data.archives import tar_members
from attnlab.data.long_range.dataset import Example, Kind
from attnlab.errors import UserError

AAN = Kind(classes=2, length=8000, vocab=257, offset=1, documents=2)
"""Two documents of 4,000 bytes, the id of byte `b` being `b + 1`; Radev et al. 2013, Tay et al. 2021."""

KEPT = 10_000
"""Bytes of a paper that are kept, as in the Long Range Arena."""

FILES = {'train': 'train', 'validation': 'eval', 'test': 'test'}


def aan(archive: pathlib.Path, split: str) -> Iterator[Example]:
    """The pairs of `train`, `validation` or `test`: lines of label, two identifiers and two texts, tabs between."""
    members = re.compile(rf'(.*/)?new_aan_pairs\.{FILES[split]}\.tsv')
    for path, lines in tar_members(archive, members):
        for number, line in enumerate(lines, start=1):
            fields = line.rstrip(b'\r\n').split(b'\t')
            if len(fields) != 5 or fields[0] not in (b'0', b'1', b'0.0', b'1.0'):
                raise UserError(f'line {number} of {path} in {archive} is not a label, two names and two texts')
            first, second = (np.frombuffer(text[:KEPT], np.uint8) for text in fields[3:])
            yield {'x': first, 'second': second, 'label': np.int32(fields[0][:1])}
