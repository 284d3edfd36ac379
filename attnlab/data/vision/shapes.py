"""Drawn images of a few shapes: counting, comparing, following and labelling them, at any size and without a download.

All are grey levels, row by row; `x` of an example is uint8. Means and deviations are those of 32 x 32 pixels.
"""

import dataclasses
import itertools
from typing import ClassVar

import numpy as np
from jaxtyping import Bool, UInt8

from attnlab.data.long_range.dataset import Example, Kind
from attnlab.data.long_range.drawn import Distribution
from attnlab.errors import UserError

Picture = UInt8[np.ndarray, 'height width']
SMALLEST, LARGEST = 2, 4
"""Half the side of a shape, or its radius, in pixels."""

KINDS = ('disc', 'square', 'triangle')
WALKS = 20_000
"""Pairs of walks before lengths are refused; most are right at once."""

TRIALS = 200
"""Attempts at placing a shape or growing a path before an image is begun anew."""


@dataclasses.dataclass(frozen=True)
class Count(Distribution):
    """How many shapes an image shows: from 1 to `most`, as many images of each; the label is one less.

    Shapes are discs, squares and triangles of several sizes and grey levels, at least a pixel apart. Of up to
    five in 32 x 32 pixels thresholds on the number of lit pixels tell 0.57 of the labels, and on the sum of grey levels
    0.52: what says that shapes are counted lies above that. The very number tells all, for every shape has one pixel
    more than a multiple of four.

    Attributes:
      size: height and width in pixels.
      most: the most shapes.
    """

    size: int = 32
    most: int = 5

    def __post_init__(self) -> None:
        _check(self, 'size', 16)
        if not 2 <= self.most <= (self.size // 12) ** 2 + 1:
            raise UserError(f'most of Count is {self.most}; images of {self.size} pixels hold from 2 to '
                            f'{(self.size // 12) ** 2 + 1} shapes')  # fmt: skip

    @property
    def kind(self) -> Kind:
        return Kind(classes=self.most, length=self.size**2, mean=20.6, deviation=59.7, highest=255.0)

    def draw(self, stream: np.random.SeedSequence) -> Example:
        """Draws an image; `label` is the number of shapes less one."""
        rng = np.random.default_rng(stream)
        count = int(rng.integers(1, self.most + 1))
        picture, _ = _shapes(rng, self.size, count)
        return {'x': picture.reshape(-1), 'label': np.int32(count - 1)}


@dataclasses.dataclass(frozen=True)
class SameDifferent(Distribution):
    """Whether two patterns are the same: squares of `cells` x `cells` random cells of two pixels, anywhere apart.

    Those that are not the same differ in a quarter of the cells, drawn anew, or in one more where that is odd, so that
    the number of bright cells is even in either case; the label is 1 where they are.

    Attributes:
      size: height and width in pixels.
      cells: of a pattern, on each side.
      step: corners lie on multiples of so many pixels; with the side of a patch, patches cut all patterns alike.
    """

    edition: ClassVar[int] = 2

    size: int = 32
    cells: int = 4
    step: int = 1

    def __post_init__(self) -> None:
        _check(self, 'size', 16)
        if not 2 <= self.cells <= self.size // 8:
            raise UserError(f'cells of SameDifferent is {self.cells}; it must be from 2 to {self.size // 8}')
        # Up to here the last multiple is more than half the room that corners have, and so more than a pattern away.
        room = self.size - 2 * self.cells
        if not 1 <= self.step <= room:
            raise UserError(f'step of SameDifferent is {self.step}; corners of {self.cells} x {self.cells} cells in '
                            f'{self.size} pixels take from 1 to {room}')  # fmt: skip

    @property
    def kind(self) -> Kind:
        return Kind(classes=2, length=self.size**2, mean=19.5, deviation=61.8, highest=255.0)

    def draw(self, stream: np.random.SeedSequence) -> Example:
        """Draws an image."""
        rng = np.random.default_rng(stream)
        label = int(rng.integers(2))
        first = rng.integers(0, 2, self.cells**2)
        second = first.copy()
        if not label:
            quarter = self.cells**2 // 4
            second[rng.choice(self.cells**2, quarter + quarter % 2, replace=False)] ^= 1
        side, picture = 2 * self.cells, np.zeros((self.size, self.size), np.uint8)
        places = (self.size - side) // self.step + 1
        corners = self.step * rng.integers(0, places, (2, 2))
        while np.abs(corners[0] - corners[1]).max() <= side:
            corners = self.step * rng.integers(0, places, (2, 2))
        for (y, x), cells in zip(corners, (first, second), strict=True):
            # A cell that is off is dark grey, so that the frame of a pattern is seen.
            drawn = np.where(cells.reshape(self.cells, self.cells), 255, 60).astype(np.uint8)
            picture[y : y + side, x : x + side] = np.kron(drawn, np.ones((2, 2), np.uint8))
        return {'x': picture.reshape(-1), 'label': np.int32(label)}


@dataclasses.dataclass(frozen=True)
class Connected(Distribution):
    """Whether two bright marks are the ends of one path, label 1, or ends of two: there are always two paths.

    Paths are random walks that never meet, on every other pixel; their pixels touch only where they are one path. The
    scalar `steps` is the length of the path at the first mark, in pairs of pixels.

    Ends of one path are nearer each other than ends of two: of 32 x 32 pixels the distance of the marks alone, |dy| +
    |dx|, tells 0.73 of the labels, and more of shorter paths. What says that paths are followed lies above that.

    Attributes:
      size: height and width in pixels, even.
      shortest: steps of the shortest path.
      longest: of the longest.
    """

    size: int = 32
    shortest: int = 6
    longest: int = 24

    def __post_init__(self) -> None:
        _check(self, 'size', 12)
        if self.size % 2 or not 2 <= self.shortest <= self.longest <= self.size**2 // 16:
            raise UserError(
                f'Connected has size {self.size}, shortest {self.shortest} and longest {self.longest}; size must be '
                f'even, and 2 <= shortest <= longest <= size^2 / 16'
            )

    @property
    def kind(self) -> Kind:
        middle = (self.shortest + self.longest) // 2
        bounds = (self.shortest, middle) if middle > self.shortest else (self.shortest,)
        return Kind(
            classes=2, length=self.size**2, mean=7.5, deviation=31.2, highest=255.0, difficulties={'steps': bounds}
        )

    def draw(self, stream: np.random.SeedSequence) -> Example:
        """Draws an image, of the paths that `paths` gives."""
        rng = np.random.default_rng(stream)
        first, second = self.paths(rng)
        label = int(rng.integers(2))
        picture = np.zeros((self.size, self.size), np.uint8)
        for path in (first, second):
            for before, after in itertools.pairwise(path):
                picture[2 * before[0], 2 * before[1]] = picture[before[0] + after[0], before[1] + after[1]] = 128
            picture[2 * path[-1][0], 2 * path[-1][1]] = 128
        for y, x in (first[0], first[-1] if label else second[0]):
            picture[2 * y, 2 * x] = 255
        return {'x': picture.reshape(-1), 'label': np.int32(label), 'steps': np.int32(len(first) - 1)}

    def paths(self, rng: np.random.Generator) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Returns two disjoint walks on a lattice of half the size, by their places."""
        for _ in range(WALKS):
            taken = np.zeros((self.size // 2,) * 2, bool)
            found = [self._walk(rng, taken) for _ in range(2)]
            if all(len(path) > self.shortest for path in found):
                return found[0], found[1]
        raise UserError(f'{WALKS} pairs of walks were too short for {self}; make shortest smaller, or size larger')

    def _walk(self, rng: np.random.Generator, taken: Bool[np.ndarray, 'y x']) -> list[tuple[int, int]]:
        """A walk of the most steps that a drawn length allows; its places are taken."""
        free = np.argwhere(~taken)
        y, x = (int(each) for each in free[rng.integers(len(free))])
        path, steps = [(y, x)], int(rng.integers(self.shortest, self.longest + 1))
        taken[y, x] = True
        while len(path) <= steps:
            around = [(y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)]
            inside = [(j, i) for j, i in around if min(j, i) >= 0 and max(j, i) < len(taken) and not taken[j, i]]
            if not inside:
                break
            y, x = inside[rng.integers(len(inside))]
            taken[y, x] = True
            path.append((y, x))
        return path


@dataclasses.dataclass(frozen=True)
class Segments(Distribution):
    """What every pixel belongs to: 0 the background, 1 a disc, 2 a square, 3 a triangle; under noise.

    `targets` of an example is uint8, one class a pixel; `label` is always 0.

    Attributes:
      size: height and width in pixels.
      most: the most shapes; there is at least one.
      noise: standard deviation of what is added, in grey levels.
    """

    size: int = 32
    most: int = 4
    noise: float = 25.0

    def __post_init__(self) -> None:
        _check(self, 'size', 16)
        if not 1 <= self.most <= (self.size // 12) ** 2 + 1:
            raise UserError(f'most of Segments is {self.most}; it must be from 1 to {(self.size // 12) ** 2 + 1}')

    @property
    def kind(self) -> Kind:
        return Kind(classes=1 + len(KINDS), length=self.size**2, mean=26.0, deviation=54.2, highest=255.0, dense=True)

    def draw(self, stream: np.random.SeedSequence) -> Example:
        """Draws an image and its classes."""
        rng = np.random.default_rng(stream)
        picture, classes = _shapes(rng, self.size, int(rng.integers(1, self.most + 1)))
        noisy = picture + self.noise * rng.standard_normal(picture.shape)
        pixels = np.clip(np.round(noisy), 0, 255).astype(np.uint8)
        return {'x': pixels.reshape(-1), 'targets': classes.reshape(-1), 'label': np.int32(0)}


def _shapes(rng: np.random.Generator, size: int, count: int) -> tuple[Picture, Picture]:
    """An image of `count` shapes that do not touch, and the class of every pixel."""
    rows, columns = np.mgrid[:size, :size]
    while True:
        picture, classes = np.zeros((2, size, size), np.uint8)
        left = count
        for _ in range(TRIALS):
            if not left:
                return picture, classes
            kind, radius = int(rng.integers(len(KINDS))), int(rng.integers(SMALLEST, LARGEST + 1))
            level, (y, x) = int(rng.integers(120, 256)), rng.integers(radius, size - radius, 2)
            around = classes[max(0, y - radius - 1) : y + radius + 2, max(0, x - radius - 1) : x + radius + 2]
            if not around.any():
                inside = _inside(KINDS[kind], rows - y, columns - x, radius)
                picture[inside], classes[inside] = level, kind + 1
                left -= 1


def _inside(kind: str, y: np.ndarray, x: np.ndarray, radius: int) -> Bool[np.ndarray, 'height width']:
    """Which pixels a shape covers, by their offsets from its centre."""
    if kind == 'disc':
        return y**2 + x**2 <= radius**2 + 1
    square = (np.abs(y) <= radius) & (np.abs(x) <= radius)
    # A triangle stands on its base, its tip above the centre.
    return square if kind == 'square' else square & (2 * np.abs(x) <= y + radius)


def _check(of: Count | SameDifferent | Connected | Segments, name: str, least: int) -> None:
    if getattr(of, name) < least:
        raise UserError(f'{name} of {type(of).__name__} is {getattr(of, name)}; it must be at least {least}')
