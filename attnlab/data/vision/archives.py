"""Images as their publishers pack them: IDX files of MNIST and Fashion-MNIST, records of CIFAR, folders of Imagenette.

Each becomes examples of pixels, row by row, with one label. What is published for training is divided into `train` and
`validation`; `test` is what is published for it.
"""

import gzip
import io
import math
import pathlib
import re
import zlib
from collections.abc import Iterator

import numpy as np
from jaxtyping import UInt8

from attnlab.data.archives import tar_members
from attnlab.data.long_range.dataset import Example, Kind
from attnlab.data.vision.folders import read_image
from attnlab.errors import UserError

MNIST = Kind(classes=10, length=28**2, mean=33.3, deviation=78.6, highest=255.0)
"""28 x 28 grey pixels; LeCun et al. 1998."""

FASHION_MNIST = Kind(classes=10, length=28**2, mean=72.9, deviation=90.0, highest=255.0)
"""28 x 28 grey pixels; Xiao et al. 2017, https://arxiv.org/abs/1708.07747."""

CIFAR10_COLOURS = Kind(classes=10, length=32**2, channels=3, mean=120.7, deviation=64.2, highest=255.0)
"""32 x 32 pixels of three colours; Krizhevsky 2009."""

CIFAR100 = Kind(classes=100, length=32**2, channels=3, mean=121.9, deviation=68.4, highest=255.0)
"""32 x 32 pixels of three colours, and the fine labels; Krizhevsky 2009."""

IMAGENETTE_SIDE = 64
"""Pixels on a side of the squares that images of Imagenette, of many sizes, are made to."""

IMAGENETTE = Kind(classes=10, length=IMAGENETTE_SIDE**2, channels=3, mean=115.0, deviation=70.0, highest=255.0)
"""Ten classes of ImageNet that are told apart with ease; Howard 2019, https://github.com/fastai/imagenette."""

HELD_OUT = 5_000
"""Training images, the last of the archive, that are for validation."""

EVERY = 10
"""Of Imagenette, whose classes follow one another, every tenth image of the training folder is for validation."""

PIXELS = 3 * 32**2
IMAGES, LABELS = 2051, 2049
"""What IDX files begin with: unsigned bytes, of three axes and of one."""


def idx(folder: pathlib.Path, split: str) -> Iterator[Example]:
    """The images of a split, of the four files of MNIST, with the names that they were published under."""
    part = 't10k' if split == 'test' else 'train'
    images = _bytes(folder / f'{part}-images-idx3-ubyte.gz', IMAGES)
    labels = _bytes(folder / f'{part}-labels-idx1-ubyte.gz', LABELS)
    if len(images) != len(labels):
        raise UserError(f'{folder} has {len(images)} {part} images and {len(labels)} labels of them')
    for number in _kept(len(images), split):
        yield {'x': images[number].reshape(-1), 'label': np.int32(labels[number])}


def cifar(archive: pathlib.Path, split: str, *, members: re.Pattern[str], labels: int) -> Iterator[Example]:
    """The images of a split in colours, in the order of the files of the binary version.

    `members` are its files, whose names begin with `test` for testing. A record is `labels` bytes, the last of which is
    the label, and the pixels, colour by colour.
    """
    batches = {path.stem: content.read() for path, content in tar_members(archive, members)}
    names = sorted(name for name in batches if name.startswith('test') == (split == 'test'))
    content, size = b''.join(batches[name] for name in names), labels + PIXELS
    if not content or len(content) % size:
        raise UserError(f'{archive} holds no complete records of CIFAR for {split}')
    records = np.frombuffer(content, np.uint8).reshape(-1, size)
    for number in _kept(len(records), split):
        pixels = records[number, labels:].reshape(3, -1).T
        yield {'x': np.ascontiguousarray(pixels), 'label': np.int32(records[number, labels - 1])}


def imagenette(archive: pathlib.Path, split: str) -> Iterator[Example]:
    """The images of a split as squares, in the order of the archive; classes are numbered by their folders' names."""
    wanted = re.compile(rf'[^/]*/{"val" if split == "test" else "train"}/n\d+/[^/]*\.JPEG')
    seen: dict[str, int] = {}
    for path, content in tar_members(archive, wanted):
        name = path.parent.name
        if name not in SYNSETS:
            raise UserError(f'{archive} has images of the class {name}, which is none of Imagenette')
        seen[name] = seen.get(name, 0) + 1
        if split == 'test' or (seen[name] % EVERY == 0) == (split == 'validation'):
            pixels = read_image(archive / path, IMAGENETTE_SIDE, 3, io.BytesIO(content.read()))
            yield {'x': pixels.reshape(-1, 3), 'label': np.int32(SYNSETS.index(name))}


SYNSETS = (
    'n01440764',
    'n02102040',
    'n02979186',
    'n03000684',
    'n03028079',
    'n03394916',
    'n03417042',
    'n03425413',
    'n03445777',
    'n03888257',
)
"""Tench, English springer, cassette player, chain saw, church, French horn, garbage truck, gas pump, golf ball and
parachute."""


def _kept(count: int, split: str) -> range:
    """The places of a split among what was published together."""
    return {'train': range(count - HELD_OUT), 'validation': range(count - HELD_OUT, count)}.get(split, range(count))


def _bytes(path: pathlib.Path, magic: int) -> UInt8[np.ndarray, 'n ...']:
    """The numbers of an IDX file. Raises `UserError` for another file, and one that is cut off."""
    try:
        content = gzip.decompress(path.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f'{path} cannot be read: {error}; delete it and start again') from error
    axes = magic % 256
    start = 4 * (1 + axes)
    found, *sizes = np.frombuffer(content[:start].ljust(start, b'\0'), '>u4').tolist()
    if found != magic or len(content) != start + math.prod(sizes):
        raise UserError(f'{path} is no whole IDX file of bytes with {axes} axes; delete it and start again')
    return np.frombuffer(content, np.uint8, offset=start).reshape(sizes)
