"""Images drawn anew each time that they are read in training: cut, mirrored and mixed, on the host, with numpy.

A drawn row is a pure function of the seed of a run and of the row's number in it (`attnlab.data.pipeline.Varied`), so
that it is the same for any number of workers, and in a run that was stopped and goes on.
"""

import abc
import dataclasses
from collections.abc import Callable

import numpy as np
from jaxtyping import Shaped

from attnlab.data.long_range.dataset import Example
from attnlab.data.pipeline import Row, Source
from attnlab.errors import UserError
from attnlab.signature import checked_fields

Picture = Shaped[np.ndarray, 'height width ...']


class Transform(abc.ABC):
    """A random change of an image that leaves its label as it is: a frozen dataclass."""

    @abc.abstractmethod
    def __call__(self, pictures: list[Picture], rng: np.random.Generator) -> list[Picture]:
        """The pictures, such as an image and the classes of its pixels, all changed in the same way."""


@checked_fields
@dataclasses.dataclass(frozen=True)
class Crop(Transform):
    """A part as large as the image, anywhere in it with `padding` zeros around it.

    Attributes:
      padding: pixels on every side, at least 1.
    """

    padding: int = 4

    def __post_init__(self) -> None:
        if self.padding < 1:
            raise UserError(f'padding of Crop is {self.padding}; it must be at least 1')

    def __call__(self, pictures: list[Picture], rng: np.random.Generator) -> list[Picture]:
        height, width = pictures[0].shape[:2]
        y, x = rng.integers(0, 2 * self.padding + 1, 2)
        around = [np.pad(each, [(self.padding,) * 2] * 2 + [(0, 0)] * (each.ndim - 2)) for each in pictures]
        return [each[y : y + height, x : x + width] for each in around]


@checked_fields
@dataclasses.dataclass(frozen=True)
class Flip(Transform):
    """The image mirrored left to right, one time in two."""

    def __call__(self, pictures: list[Picture], rng: np.random.Generator) -> list[Picture]:
        return [each[:, ::-1] for each in pictures] if rng.random() < 0.5 else pictures


class Mixing(abc.ABC):
    """A random mixture of two images, whose labels count by the share of each: a frozen dataclass."""

    alpha: float

    @abc.abstractmethod
    def __call__(self, first: Picture, second: Picture, rng: np.random.Generator) -> tuple[Picture, float]:
        """Returns the mixture, and the share of the first image in it."""


@checked_fields
@dataclasses.dataclass(frozen=True)
class Mixup(Mixing):
    """`s a + (1 - s) b` for images `a` and `b`, the share `s` drawn from `Beta(alpha, alpha)`.

    Zhang et al. 2018, https://arxiv.org/abs/1710.09412.
    """

    alpha: float = 0.8

    def __post_init__(self) -> None:
        _check_alpha(self)

    def __call__(self, first: Picture, second: Picture, rng: np.random.Generator) -> tuple[Picture, float]:
        share = rng.beta(self.alpha, self.alpha)
        return share * first + (1 - share) * second, share


@checked_fields
@dataclasses.dataclass(frozen=True)
class CutMix(Mixing):
    """Image `a` with a rectangle of image `b` in it, anywhere and cut at the borders; the share is what is left of `a`.

    The rectangle has the proportions of the image and, uncut, the area `1 - s`, with `s` drawn from
    `Beta(alpha, alpha)`. Yun et al. 2019, https://arxiv.org/abs/1905.04899.
    """

    alpha: float = 1.0

    def __post_init__(self) -> None:
        _check_alpha(self)

    def __call__(self, first: Picture, second: Picture, rng: np.random.Generator) -> tuple[Picture, float]:
        root = np.sqrt(1 - rng.beta(self.alpha, self.alpha))
        mixed, sides = first.copy(), []
        for size in first.shape[:2]:
            middle, half = int(rng.integers(size)), int(root * size) // 2
            sides.append(slice(max(0, middle - half), min(size, middle + half)))
        inside = tuple(sides)
        mixed[inside] = second[inside]
        area = (sides[0].stop - sides[0].start) * (sides[1].stop - sides[1].start)
        return mixed, 1 - area / (first.shape[0] * first.shape[1])


def _check_alpha(mixing: Mixup | CutMix) -> None:
    if not mixing.alpha > 0:
        raise UserError(f'alpha of {type(mixing).__name__} is {mixing.alpha}; it must be above 0')


@checked_fields
@dataclasses.dataclass(frozen=True)
class Augmentation:
    """What is done to every image that is read in training.

    Attributes:
      transforms: one after another.
      mixing: of these, one drawn with equal chances for every image, after the transforms; empty: images stay apart.
    """

    transforms: tuple[Transform, ...] = ()
    mixing: tuple[Mixing, ...] = ()


@dataclasses.dataclass(frozen=True)
class Augmented:
    """Rows of images: by index as they are, and changed at random where they are drawn (`Varied`).

    Where images are mixed a row has `other`, the label of the second image, and `share`, that of the first in the
    mixture. Where examples have `targets`, one a pixel, these are cut and mirrored as the image is.

    Attributes:
      examples: with `x`, the numbers of every pixel.
      row: makes the row of an example.
      size: height and width in pixels.
      augmentation: what is done; `None`: nothing is.
    """

    examples: Source
    row: Callable[[Example], Row]
    size: int
    augmentation: Augmentation | None

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Row:
        return self.row(self.examples[index])

    def varied(self, index: int, rng: np.random.Generator) -> Row:
        """The row of example `index`, changed as drawn from `rng`."""
        row = self.row(self.changed(index, rng))
        if self.augmentation is None or not self.augmentation.mixing:
            return row
        other = self.row(self.changed(int(rng.integers(len(self))), rng))
        mix = self.augmentation.mixing[int(rng.integers(len(self.augmentation.mixing)))]
        first, second = (self._picture(each['tokens']) for each in (row, other))
        mixed, share = mix(first, second, rng)
        tokens = mixed.reshape(row['tokens'].shape).astype(np.float32)
        return row | {'tokens': tokens, 'other': other['label'], 'share': np.float32(share)}

    def changed(self, index: int, rng: np.random.Generator) -> Example:
        """Example `index` with its image transformed, as drawn from `rng`."""
        example = self.examples[index]
        if self.augmentation is None:
            return example
        changed = {name: self._picture(example[name]) for name in ('x', 'targets') if name in example}
        for transform in self.augmentation.transforms:
            changed = dict(zip(changed, transform(list(changed.values()), rng), strict=True))
        return {**example, **{name: each.reshape(example[name].shape) for name, each in changed.items()}}

    def _picture(self, pixels: Shaped[np.ndarray, 'pixels *channels']) -> Picture:
        return pixels.reshape(self.size, self.size, *pixels.shape[1:])
