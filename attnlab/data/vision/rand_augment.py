"""RandAugment: a few changes of an image, drawn out of fourteen, all of one strength; numpy, to the bit as pillow."""

import abc
import dataclasses
import math
from collections.abc import Callable

import numpy as np
from jaxtyping import Int, UInt8

from attnlab.data.vision.augment import Picture, Transform
from attnlab.errors import UserError
from attnlab.signature import checked_fields

Bytes = UInt8[np.ndarray, 'height width *channels']
Affine = tuple[float, float, float, float, float, float]
"""`(a, b, c, d, e, f)`: the pixel at `(x, y)` is that at `(a x + b y + c, d x + e y + f)` of the image before."""

FIXED = 1 << 16
"""Places are whole multiples of one over this."""


def warped(picture: Picture, matrix: Affine) -> Picture:
    """Moves pixels to where `matrix` has them, the nearest one each; zeros where the image before has none."""
    height, width = picture.shape[:2]
    a, b, c, d, e, f = matrix
    found = []
    for along, across, shift in ((a, b, c), (d, e, f)):
        steps = [math.floor(number * FIXED + 0.5) for number in (along, across, shift + (along + across) / 2)]
        found.append((steps[0] * np.arange(width)[None] + steps[1] * np.arange(height)[:, None] + steps[2]) // FIXED)
    x, y = found
    inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)
    moved = picture[np.where(inside, y, 0), np.where(inside, x, 0)]
    return np.where(inside.reshape(*inside.shape, *(1,) * (picture.ndim - 2)), moved, np.zeros_like(moved))


def sheared_x(level: float, height: int, width: int) -> Affine:
    """Rows are moved to the left by `level` times their number."""
    return 1.0, level, 0.0, 0.0, 1.0, 0.0


def sheared_y(level: float, height: int, width: int) -> Affine:
    """Columns are moved up by `level` times their number."""
    return 1.0, 0.0, 0.0, level, 1.0, 0.0


def translated_x(level: float, height: int, width: int) -> Affine:
    """Moves the image to the right by whole pixels, `level` rounded towards zero."""
    return 1.0, 0.0, -float(int(level)), 0.0, 1.0, 0.0


def translated_y(level: float, height: int, width: int) -> Affine:
    """Moves the image down by whole pixels, `level` rounded towards zero."""
    return 1.0, 0.0, 0.0, 0.0, 1.0, -float(int(level))


def rotated(level: float, height: int, width: int) -> Affine:
    """Turns the image by `level` degrees against the clock around its middle."""
    angle = -math.radians(level % 360)
    cosine, sine = round(math.cos(angle), 15), round(math.sin(angle), 15)
    x, y = width / 2, height / 2
    return cosine, sine, x - cosine * x - sine * y, -sine, cosine, y + sine * x - cosine * y


def blended(plain: Bytes, image: Bytes, factor: float) -> Bytes:
    """`plain + factor (image - plain)`, cut to bytes."""
    whole, other = plain.astype(np.int32), image.astype(np.int32)
    mixed = whole.astype(np.float32) + np.float32(factor) * (other - whole).astype(np.float32)
    return np.clip(mixed, 0, 255).astype(np.uint8)


def grey(image: Bytes) -> UInt8[np.ndarray, 'height width']:
    """The brightness of every pixel (ITU-R 601-2)."""
    if image.ndim == 2 or image.shape[-1] == 1:
        return image.reshape(image.shape[:2])
    red, green, blue = np.moveaxis(image.astype(np.int64), -1, 0)
    return ((19595 * red + 38470 * green + 7471 * blue + FIXED // 2) // FIXED).astype(np.uint8)


def brightness(image: Bytes, level: float) -> Bytes:
    """Mixes with black."""
    return blended(np.zeros_like(image), image, 1 + level)


def color(image: Bytes, level: float) -> Bytes:
    """Mixes with the same image in grey; grey images stay as they are."""
    plain = grey(image).reshape(*image.shape[:2], *(1,) * (image.ndim - 2))
    return blended(np.broadcast_to(plain, image.shape), image, 1 + level)


def contrast(image: Bytes, level: float) -> Bytes:
    """Mixes with the mean brightness."""
    return blended(np.full_like(image, int(grey(image).mean() + 0.5)), image, 1 + level)


def sharpness(image: Bytes, level: float) -> Bytes:
    """Mixes with the image smoothed by weights of 1 around 5, over 13; pixels at the border are not smoothed."""
    height, width = image.shape[:2]
    smooth = image.copy()
    if min(height, width) > 2:
        wide = image.astype(np.int32)
        total = 4 * wide[1:-1, 1:-1]
        for y in range(3):
            for x in range(3):
                total = total + wide[y : height - 2 + y, x : width - 2 + x]
        smooth[1:-1, 1:-1] = (2 * total + 13) // 26
    return blended(smooth, image, 1 + level)


def posterized(image: Bytes, level: float) -> Bytes:
    """Keeps the `level` highest bits."""
    return image & np.uint8(256 - 2 ** (8 - int(level)))


def solarized(image: Bytes, level: float) -> Bytes:
    """Inverts what is not below `level`."""
    return np.where(image < level, image, 255 - image)


def autocontrasted(image: Bytes, level: float) -> Bytes:
    """Every channel stretched from its least and its greatest value to 0 and 255."""

    def table(counts: Int[np.ndarray, '256']) -> Int[np.ndarray, '256']:
        there = np.flatnonzero(counts)
        low, high = int(there[0]), int(there[-1])
        if high <= low:
            return np.arange(256)
        scale = 255.0 / (high - low)
        return (np.arange(256) * scale - low * scale).astype(np.int64)

    return _by_channel(image, table)


def equalized(image: Bytes, level: float) -> Bytes:
    """Histogram equalisation of each channel: maps values so that they are spread about evenly over 0 to 255."""

    def table(counts: Int[np.ndarray, '256']) -> Int[np.ndarray, '256']:
        there = counts[counts > 0]
        step = int(counts.sum() - there[-1]) // 255
        if len(there) <= 1 or not step:
            return np.arange(256)
        return (step // 2 + np.cumsum(counts) - counts) // step

    return _by_channel(image, table)


def _by_channel(image: Bytes, table: Callable[[Int[np.ndarray, '256']], Int[np.ndarray, '256']]) -> Bytes:
    channels = image.reshape(*image.shape[:2], -1)
    mapped = [
        np.clip(table(np.bincount(channels[..., c].reshape(-1), minlength=256)), 0, 255).astype(np.uint8)[
            channels[..., c]
        ]
        for c in range(channels.shape[-1])
    ]
    return np.stack(mapped, axis=-1).reshape(image.shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operation(abc.ABC):
    """One of the changes, which has a level.

    Attributes:
      low: the level at strength 0.
      high: that at the greatest; `None`: there are no levels.
      of_side: which side of the image, height or width, levels are multiples of; `None`: neither.
      signed: whether the level is negative one time in two.
      whole: whether levels are rounded to whole numbers.
    """

    low: float = 0.0
    high: float | None = None
    of_side: int | None = None
    signed: bool = True
    whole: bool = False

    def level(self, share: float, height: int, width: int) -> float:
        """The level at a share of the greatest strength, for an image of this size."""
        if self.high is None:
            return 0.0
        level = self.low + share * (self.high - self.low)
        if self.whole:
            level = self.low - float(np.round(self.low - level))
        return level if self.of_side is None else level * (height, width)[self.of_side]

    @abc.abstractmethod
    def changed(self, pictures: list[Picture], level: float) -> list[Picture]:
        """An image and what goes with it, changed at a level."""


@dataclasses.dataclass(frozen=True)
class Warp(Operation):
    """Moves pixels, and the classes of pixels too, as a matrix says that is of the level, the height and the width."""

    matrix: Callable[[float, int, int], Affine]

    def changed(self, pictures: list[Picture], level: float) -> list[Picture]:
        """An image and what goes with it, all moved alike."""
        matrix = self.matrix(level, *pictures[0].shape[:2])
        return [warped(each, matrix) for each in pictures]


@dataclasses.dataclass(frozen=True)
class Recolour(Operation):
    """Gives pixels other values, those of the image that `change` makes of one and the level."""

    change: Callable[[Bytes, float], Bytes]

    def changed(self, pictures: list[Picture], level: float) -> list[Picture]:
        """The image changed, and what goes with it as it is."""
        return [self.change(pictures[0], level), *pictures[1:]]


OPERATIONS: dict[str, Operation] = {
    'identity': Recolour(lambda image, level: image, signed=False),
    'shear_x': Warp(sheared_x, high=0.3),
    'shear_y': Warp(sheared_y, high=0.3),
    'translate_x': Warp(translated_x, high=150 / 331, of_side=1),
    'translate_y': Warp(translated_y, high=150 / 331, of_side=0),
    'rotate': Warp(rotated, high=30.0),
    'brightness': Recolour(brightness, high=0.9),
    'color': Recolour(color, high=0.9),
    'contrast': Recolour(contrast, high=0.9),
    'sharpness': Recolour(sharpness, high=0.9),
    'posterize': Recolour(posterized, low=8.0, high=4.0, signed=False, whole=True),
    'solarize': Recolour(solarized, low=255.0, high=0.0, signed=False),
    'autocontrast': Recolour(autocontrasted, signed=False),
    'equalize': Recolour(equalized, signed=False),
}
"""The changes and their levels as torchvision has them (`RandAugment`)."""


@checked_fields
@dataclasses.dataclass(frozen=True)
class RandAugment(Transform):
    """`count` of `OPERATIONS` one after another, each drawn with equal chances, at `magnitude` of `bins` levels from 0.

    Pixels are bytes from 0 to 255, grey or red, green and blue. What moves pixels moves the classes of pixels alike;
    where there is nothing to move, pixels and classes are zero. Cubuk et al. 2020, https://arxiv.org/abs/1909.13719.

    Raises `UserError` for a magnitude that is none of the levels, and for images that are not of bytes.

    Attributes:
      count: changes an image.
      magnitude: the level, from 0 to below `bins`.
      bins: how many levels there are, at least 2.
    """

    count: int = 2
    magnitude: int = 9
    bins: int = 31

    def __post_init__(self) -> None:
        if self.bins < 2 or not 0 <= self.magnitude < self.bins:
            raise UserError(
                f'magnitude of RandAugment is {self.magnitude} of {self.bins} bins; bins must be at least 2, and '
                'magnitude from 0 to below bins'
            )

    def __call__(self, pictures: list[Picture], rng: np.random.Generator) -> list[Picture]:
        if pictures[0].dtype != np.uint8:
            raise UserError(f'RandAugment changes images of bytes; these are of {pictures[0].dtype}: use others')
        drawn = list(OPERATIONS.values())
        for _ in range(self.count):
            operation = drawn[int(rng.integers(len(drawn)))]
            level = operation.level(self.magnitude / (self.bins - 1), *pictures[0].shape[:2])
            if rng.random() < 0.5 and operation.signed:
                level = -level
            pictures = operation.changed(pictures, level)
        return pictures
