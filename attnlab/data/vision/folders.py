"""Images of one's own: files in one folder a class."""

import dataclasses
import functools
import hashlib
import io
import pathlib
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import UInt8

from attnlab.data.long_range.dataset import PARTS, Dataset, Example, Kind, divided, known_split, named_splits
from attnlab.errors import UserError

SUFFIXES = ('.bmp', '.gif', '.jpeg', '.jpg', '.pgm', '.png', '.ppm', '.tif', '.tiff', '.webp')
FORMATS = ('BMP', 'GIF', 'JPEG', 'PNG', 'PPM', 'TIFF', 'WEBP')
"""What a file may be, whatever its name says: of others Pillow would have a program read some, as PostScript."""

UNREADABLE = (OSError, ValueError, SyntaxError, TypeError, LookupError, struct.error)
"""What Pillow raises for a damaged file, besides errors of its own; the last three for TIFF."""


@dataclasses.dataclass(frozen=True)
class ImageFolder(Dataset):
    """Image files in `path/CLASS/`, or, where there is a folder `path/train`, in `path/train/CLASS/` and so on.

    Without folders of splits the images of every class are put in a fixed random order, of which 80 % are for training
    and 10 % each for validation and testing; with them, where there is no `valid`, `val` or `validation`, the images of
    `test` are validated on. Images are scaled so that they just cover a square of `size`, and cut around their middle.
    They are read when they are asked for; a run records a digest of their paths, sizes in bytes and splits. Files and
    folders whose names begin with a dot are left out.

    Attributes:
      path: the folder.
      classes: their names; the label of an image is the place of its own. `image_folder` reads them.
      size: height and width in pixels.
      channels: 3, or 1 for grey.
    """

    path: str
    classes: tuple[str, ...]
    size: int = 32
    channels: int = 3

    def __post_init__(self) -> None:
        if self.size < 1 or self.channels not in (1, 3):
            raise UserError(
                f'ImageFolder has size {self.size} and channels {self.channels}; '
                'size must be at least 1, and channels 1 (grey) or 3'
            )
        if len(self.classes) < 2:
            raise UserError(f'{self.path} has images of {len(self.classes)} class(es); a classifier needs two or more')

    @property
    def kind(self) -> Kind:
        of_bytes = functools.partial(Kind, mean=127.5, deviation=63.75, highest=255.0)
        return of_bytes(classes=len(self.classes), length=self.size**2, channels=self.channels)

    @property
    def splits(self) -> Mapping[str, int | None]:
        return dict.fromkeys(PARTS)

    def rows(self, split: str) -> 'Files':
        known_split(self, split)
        return Files(_files(self)[split], self.size, self.channels)

    def describe(self) -> dict[str, Any]:
        counts = {name: len(of) for name, of in _files(self).items()}
        return {'source': 'images', 'path': self.path, 'counts': counts, 'content': _content(self)}

    def same_rows(self, split: str, other: str) -> bool:
        known_split(self, split, other)
        return _files(self)[split] == _files(self)[other]


@dataclasses.dataclass(frozen=True)
class Files:
    """Image files with their labels, read by index."""

    files: tuple[tuple[pathlib.Path, int], ...]
    size: int
    channels: int

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Example:
        path, label = self.files[index]
        pixels = read_image(path, self.size, self.channels)
        return {'x': pixels.reshape(-1, *pixels.shape[2:]), 'label': np.int32(label)}


def image_folder(path: str, *, size: int = 32, channels: int = 3) -> ImageFolder:
    """Returns the data set of a folder, its classes those of its training images, in the order of their names.

    Raises `UserError` for a folder that is not there or holds no images of two classes.
    """
    root = pathlib.Path(path)
    if not root.is_dir():
        there = f'{path} is a file' if root.is_file() else f'there is no folder {path}'
        raise UserError(f'{there}; images of a class are read from a folder of its name in it')
    return ImageFolder(path=path, classes=tuple(_classes(_training(root))), size=size, channels=channels)


def read_image(
    path: pathlib.PurePath, size: int, channels: int, content: io.BytesIO | None = None
) -> UInt8[np.ndarray, 'height width *channels']:
    """Reads an image as a square of `size` pixels; grey where there is one channel.

    It just covers the square, and is cut around its middle. With `content` that is read, and `path` names it in errors.
    Raises `UserError` for a file that is no image, and for one whose levels are not bytes.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        with Image.open(pathlib.Path(path) if content is None else content, formats=FORMATS) as image:
            if image.mode.startswith(('I', 'F')):
                raise UserError(
                    f'{path} has pixels of mode {image.mode}, whose levels are not bytes and would be cut off; '
                    'save it with 8 bits a channel, its levels scaled to 0 to 255'
                )
            pixels = _upright(image).convert('L' if channels == 1 else 'RGB')
            return np.asarray(ImageOps.fit(pixels, (size, size), Image.Resampling.BILINEAR))
    except (*UNREADABLE, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise UserError(f'{path} is not an image that can be read: {error}') from error


def _upright(image: Any) -> Any:
    """An image turned as its EXIF data say. Others of these are left out: Pillow fails at some of a wrong type."""
    from PIL import ExifTags, Image, ImageOps

    orientation = image.getexif().get(ExifTags.Base.Orientation)
    if orientation not in range(2, 9):
        return image
    alone = Image.Exif()
    alone[ExifTags.Base.Orientation] = orientation
    image.info['exif'] = alone.tobytes()
    return ImageOps.exif_transpose(image)


def _training(root: pathlib.Path) -> pathlib.Path:
    return root / 'train' if (root / 'train').is_dir() else root


def _classes(folder: pathlib.Path) -> dict[str, list[pathlib.Path]]:
    """The image files of every class in a folder of classes; folders without images are none."""
    found = {}
    for each in _shown(folder):
        files = [file for file in _shown(each) if file.suffix.lower() in SUFFIXES]
        if files:
            found[each.name] = files
    return found


def _shown(folder: pathlib.Path) -> list[pathlib.Path]:
    """What is in a folder and not hidden, in order; nothing in what is none."""
    return sorted(each for each in folder.iterdir() if not each.name.startswith('.')) if folder.is_dir() else []


@functools.cache
def _files(data: ImageFolder) -> dict[str, tuple[tuple[pathlib.Path, int], ...]]:
    """The files of every split, each with its label."""
    root = pathlib.Path(data.path)
    if _training(root) == root:
        folders = _parts(_classes(root))
    else:
        holding = {each.name: classes for each in _shown(root) if (classes := _classes(each))}
        names = named_splits(holding, f'folders of classes in {root}')
        folders = {split: holding[name] for split, name in names.items()}
        test = folders.setdefault('test', {})
        folders.setdefault('valid', test)
    found = {}
    for split in PARTS:
        unknown = sorted(folders[split].keys() - set(data.classes))
        if unknown:
            raise UserError(f'{split} images of {data.path} have the class {unknown[0]!r}, which is not among classes')
        found[split] = tuple((file, data.classes.index(name)) for name, of in folders[split].items() for file in of)
        if not found[split]:
            raise UserError(f'{data.path} has no {split} images; a class needs at least ten, or a folder {split}/CLASS')
    return found


@functools.cache
def _content(data: ImageFolder) -> str:
    """SHA-256 over path, size in bytes and splits of every image, in the order of the paths; no image is read."""
    root = pathlib.Path(data.path)
    splits: dict[pathlib.Path, list[str]] = {}
    for split, files in _files(data).items():
        for path, _ in files:
            splits.setdefault(path, []).append(split)
    lines = [
        f'{path.relative_to(root).as_posix()}\0{path.stat().st_size}\0{",".join(of)}\n' for path, of in splits.items()
    ]
    return hashlib.sha256(''.join(sorted(lines)).encode(errors='surrogateescape')).hexdigest()


def _parts(classes: dict[str, list[pathlib.Path]]) -> dict[str, dict[str, list[pathlib.Path]]]:
    """The files of every class divided into splits, in an order drawn from their number alone."""
    found: dict[str, dict[str, list[pathlib.Path]]] = {split: {} for split in PARTS}
    for name, files in classes.items():
        for split, places in divided(len(files)).items():
            found[split][name] = [files[i] for i in sorted(places)]
    return found
