"""Prepares a data set: draws or downloads it, writes it, and verifies it by reading it back."""

import contextlib
import dataclasses
import hashlib
import pathlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from attnlab.data.long_range.blocks import Progress
from attnlab.data.long_range.dataset import digest_of
from attnlab.data.long_range.drawn import example
from attnlab.data.long_range.preparable import preparable
from attnlab.data.long_range.prepared import hashes, library, opening
from attnlab.errors import UserError

TOGETHER = 256
"""Examples read at a time, which is much faster than reading them one by one."""

REDRAWN = 8
"""Examples of each split that are drawn again to verify that this version draws what is on disk."""


@dataclasses.dataclass(frozen=True)
class Split:
    """The statistics of a prepared split.

    Attributes:
      name: of the split, on the disk.
      examples: how many there are.
      content: SHA-256 over all of them.
      classes: how many examples each label has.
      repeated: how many occurred before, in this split or those before it.
    """

    name: str
    examples: int
    content: str
    classes: tuple[int, ...]
    repeated: int


@dataclasses.dataclass(frozen=True)
class Preparation:
    """The report of a prepared and verified data set.

    Attributes:
      folder: where it is.
      fresh: whether it was prepared just now.
      splits: the statistics of each split.
    """

    folder: pathlib.Path
    fresh: bool
    splits: tuple[Split, ...]


def prepare(name: str, data_dir: pathlib.Path, workers: int, progress: Progress) -> Preparation:
    """Prepares a data set unless it exists, and verifies it in either case.

    Drawn examples are stored in blocks beside the downloads until all are written, so that an interrupted preparation
    resumes.

    Raises `UserError` for an unknown name, an archive that is missing or wrong, a disk that is full, and a data set
    that differs from what was written.
    """
    preparable(name)
    tfds = library()
    from attnlab.data.long_range.builders import BUILDERS, DrawnBuilder

    builder = BUILDERS[name](data_dir=data_dir)
    builder.workers, builder.progress = workers, progress
    folder, downloads = pathlib.Path(builder.data_dir), data_dir / 'downloads'
    fresh = not (folder / 'dataset_info.json').is_file()
    if fresh:
        tfds.disable_progress_bar()
        settings = tfds.download.DownloadConfig(try_download_gcs=False)
        with _writing(folder):
            builder.download_and_prepare(download_dir=downloads, download_config=settings, file_format='array_record')
    with opening(folder):
        splits = verify(builder, progress)
    if isinstance(builder, DrawnBuilder):
        for blocks in builder.blocks(downloads / name).values():
            for path in blocks.files():
                path.unlink()
    return Preparation(folder, fresh, splits)


@contextlib.contextmanager
def _writing(folder: pathlib.Path) -> Iterator[None]:
    """What the library's writer raises where there is no room left, as a `UserError`."""
    try:
        yield
    except RuntimeError as error:
        raise UserError(f'cannot write to {folder}: {" ".join(str(error).split())}') from error


def verify(builder: Any, progress: Progress) -> tuple[Split, ...]:
    """Reads all of a prepared data set. Raises `UserError` where it differs from what was written or drawn."""
    from attnlab.data.long_range.builders import DrawnBuilder

    seen: set[bytes] = set()
    found = []
    recorded = hashes(builder)
    for split in recorded:
        records = builder.as_data_source(split)
        digest, labels, repeated = hashlib.sha256(), Counter[int](), 0
        for start in range(0, len(records), TOGETHER):
            progress(f'verifying {split}', start, len(records))
            for record in records.__getitems__(range(start, min(start + TOGETHER, len(records)))):
                part = digest_of(_typed(record, builder))
                digest.update(part)
                labels[int(record['label'])] += 1
                repeated += part in seen
                seen.add(part)
        if digest.hexdigest() != recorded[split]:
            raise UserError(
                f'{split} of {builder.data_dir} is not what was written: its content is {digest.hexdigest()}, not '
                f'{recorded[split]}; delete the folder and prepare it again'
            )
        classes = tuple(labels[label] for label in range(preparable(builder.name).kind.classes))
        found.append(Split(split, len(records), digest.hexdigest(), classes, repeated))
        if isinstance(builder, DrawnBuilder):
            _check_drawn(builder, split, records, repeated)
    return tuple(found)


def _check_drawn(builder: Any, split: str, records: Any, repeated: int) -> None:
    if repeated:
        raise UserError(f'{repeated} examples of {builder.name} up to {split} occur twice; report this')
    (name,) = (here for here, there in preparable(builder.name).splits.items() if there == split)
    for index in range(0, len(records), max(1, len(records) // REDRAWN)):
        drawn = example(builder.of, builder.seed, name, index)
        if digest_of(drawn) != digest_of(_typed(records[index], builder)):
            raise UserError(
                f'example {index} of {split} in {builder.data_dir} differs from what this attnlab and this numpy draw; '
                'delete the folder to prepare it anew'
            )


def _typed(record: dict[str, Any], builder: Any) -> dict[str, Any]:
    """A record with the types of its scalars restored, which storage loses."""
    features = builder.info.features
    return {
        name: value if isinstance(value, np.ndarray) else np.dtype(features[name].np_dtype).type(value)
        for name, value in record.items()
    }
