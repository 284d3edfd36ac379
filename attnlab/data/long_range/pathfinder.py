"""Pathfinder and Path-X: whether two markers are on the same dashed path."""

import dataclasses
import functools
import math
import random
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64, UInt8

from attnlab.data.long_range.dataset import Example, Kind
from attnlab.data.long_range.drawn import Distribution
from attnlab.errors import UserError

SEGMENT_TRIALS = 3
"""Attempts at drawing a dash before its path is abandoned."""

DISTRACTOR_TRIALS = 5
"""Attempts at drawing a distractor before it is omitted."""

SOLID, SOFT = 0.9, 0.3
"""Coverage of a pixel above which two dashes collide, and above which no path starts there."""


class Dash(NamedTuple):
    """One dash of a path, in pixels.

    Attributes:
      y: row of the anchor, which is the far end, or the near one of a path's first dash.
      x: column of the anchor.
      angle: of the direction from the anchor to the other end, radians, of (x, y).
    """

    y: int
    x: int
    angle: float


@dataclasses.dataclass(frozen=True)
class Scene:
    """The contents of an image.

    Attributes:
      targets: the two long paths, each from its first dash to its last.
      distractors: the short paths.
      margin: half the gap between dashes, in pixels.
      markers: where the discs are: row and column of each.
      label: 1 where both are on one path.
    """

    targets: tuple[tuple[Dash, ...], tuple[Dash, ...]]
    distractors: tuple[tuple[Dash, ...], ...]
    margin: int
    markers: tuple[tuple[int, int], tuple[int, int]]
    label: int


@dataclasses.dataclass(frozen=True)
class Pathfinder(Distribution):
    """Two long dashed paths and some short ones; one disc at the start of a long path, one at the end of a long path.

    A path starts with a dash in any direction. Every further dash starts a gap behind the last one; its end is drawn
    from the pixels around that point in which nothing is near, with probability proportional to

        cos(min(continuity |turn|, pi / 2))^2.

    Both long paths grow in turns, from starts `seed_distance` apart, and are redrawn until both have all of their
    dashes; then short ones are put where there is room. The label is drawn first and is 1 in half of the images. Dashes
    and discs are drawn `antialias` times as large and reduced with Lanczos's filter.

    Follows the published generator, in numpy and without its unseeded randomness: coverage is compared with thresholds
    where it adds up fractions, and short paths keep away from both long ones entirely. The defaults are the hard 32 x
    32 images of the Long Range Arena; `PATH_X` is those of 128 x 128. `x` are grey levels, row by row.

    Linsley et al. 2018, https://arxiv.org/abs/1805.08315; Tay et al. 2021, https://arxiv.org/abs/2011.04006.

    Attributes:
      size: height and width in pixels.
      padding: width of the border that is left free.
      antialias: how many times larger things are drawn.
      contour: dashes of a long path.
      dash: length of a dash in pixels.
      thickness: of a dash in pixels.
      margins: possible values of half the gap between dashes, in pixels; one is drawn per image.
      marker_radius: of the discs, in pixels.
      seed_distance: between the starts of the long paths, in pixels.
      continuity: how strongly a path goes straight on.
      distractors: how many short paths there are, where there is room.
      distractor_contour: dashes of a short path.
      contrast: brightness of long paths; a disc has 1. The brightest pixel of an image becomes 255.
      distractor_contrast: brightness of short paths.
    """

    size: int = 32
    padding: int = 1
    antialias: int = 2
    contour: int = 14
    dash: int = 2
    thickness: float = 0.5
    margins: tuple[int, ...] = (1,)
    marker_radius: float = 1.5
    seed_distance: int = 7
    continuity: float = 1.0
    distractors: int = 5
    distractor_contour: int = 4
    contrast: float = 1.5
    distractor_contrast: float = 2.0

    def __post_init__(self) -> None:
        if not 1 <= self.seed_distance < self.size / 4:
            raise UserError(
                f'seed_distance of Pathfinder is {self.seed_distance}; it must be at least 1 and below '
                f'a quarter of size, {self.size}'
            )
        if self.contour < 2 or self.distractor_contour < 1 or not self.margins or min(self.margins) < 1:
            raise UserError(
                'Pathfinder needs a contour of at least 2, a distractor_contour of at least 1, and margins of '
                f'at least 1; got {self.contour}, {self.distractor_contour} and {self.margins}'
            )

    @property
    def kind(self) -> Kind:
        return Kind(classes=2, length=self.size**2, mean=127.5, deviation=127.5)

    def draw(self, stream: np.random.SeedSequence) -> Example:
        scene = self.scene(stream)
        return {'x': self.render(scene).reshape(-1), 'label': np.int32(scene.label)}

    def scene(self, stream: np.random.SeedSequence) -> Scene:
        """Draws the contents of an image."""
        rand = random.Random(int.from_bytes(stream.generate_state(8).tobytes(), 'little')).random
        label = int(2 * rand())
        shapes = _shapes(self, self.margins[int(rand() * len(self.margins))])
        grown = None
        while grown is None:
            grown = _two_paths(shapes, rand)
        paths, canvas = grown
        distractors = []
        for _ in range(self.distractors):
            trials = (_short_path(shapes, canvas, rand) for _ in range(DISTRACTOR_TRIALS))
            found = next((trial for trial in trials if trial is not None), None)
            if found is not None:
                (path,), canvas = found
                distractors.append(shapes.dashes(path))
        targets = shapes.dashes(paths[0]), shapes.dashes(paths[1])
        origin = int(2 * rand())
        start, end = targets[origin][0], targets[origin if label else 1 - origin][-1]
        return Scene(targets, tuple(distractors), shapes.margin, ((start.y, start.x), (end.y, end.x)), label)

    def render(self, scene: Scene) -> UInt8[np.ndarray, 'h w']:
        """The image of a scene."""
        shapes = _shapes(self, scene.margin)
        disc = _disc(self.marker_radius, self.antialias)
        border = max(shapes.reach, len(disc) // 2)
        image = np.zeros((self.size + 2 * border, self.size + 2 * border))
        for dashes, contrast in [(dashes, self.contrast) for dashes in scene.targets] + [
            (dashes, self.distractor_contrast) for dashes in scene.distractors
        ]:
            for dash in dashes:
                _stamp(image, shapes.line(dash.angle) * contrast, dash.y + border, dash.x + border)
        for y, x in scene.markers:
            _stamp(image, disc, y + border, x + border)
        inside = image[border : border + self.size, border : border + self.size]
        return np.round(inside * (255 / inside.max())).astype(np.uint8)


PATH_X = Pathfinder(
    size=128,
    dash=5,
    thickness=1.5,
    margins=(2, 3),
    marker_radius=3.0,
    seed_distance=20,
    continuity=1.8,
    distractors=8,
    contrast=0.9,
    distractor_contrast=0.9,
)
"""The 128 x 128 images of the Long Range Arena."""


class Stroke(NamedTuple):
    """A dash in one direction, as sets of pixels around its anchor: bit `y * stride + x` is row y, column x.

    Attributes:
      angle: from the anchor to the other end, radians.
      solid: pixels that no other path may have.
      near: pixels in which no dash may end.
      soft: pixels in which no path may start.
      out: from the pivot of this dash to the pivot of the next, as a difference of bits.
      turns: for each possible next dash: the bit of its end in a window around that point, its weight and its index.
    """

    angle: float
    solid: int
    near: int
    soft: int
    out: int
    turns: list[tuple[int, float, int]]


class Start(NamedTuple):
    """The first dash of a path in one of 360 directions, anchored at its near end.

    Attributes:
      stroke: the dash.
      pivot: the point that it is rotated around, relative to its anchor, as a difference of bits.
      ends: that point and its other end, relative to its anchor, rows and columns.
      cover: the pixels that are wholly its own, relative to its anchor, as differences of bits.
      centres: where it may start as the first long path, as bits.
    """

    stroke: Stroke
    pivot: int
    ends: tuple[tuple[int, int], tuple[int, int]]
    cover: list[int]
    centres: list[int]


class Canvas(NamedTuple):
    """The occupied pixels, in the three senses of `Stroke`."""

    solid: int
    near: int
    soft: int


class Shapes:
    """Every dash that images with one margin can have, as sets of pixels: a path is then grown by table look-up."""

    def __init__(self, of: Pathfinder, margin: int):
        self.of, self.margin = of, margin
        self.reach = of.dash + math.ceil(of.thickness) + margin
        self.stride = of.size + 2 * self.reach
        self.centre = self.reach * (self.stride + 1)
        self.window = (1 << 2 * self.centre + 1) - 1
        step = of.dash + margin
        around = np.arange(0, 2 * np.pi, 1 / step)
        self.ends = np.unique(np.floor(step * np.stack([np.sin(around), np.cos(around)], 1) + 1e-9).astype(int), axis=0)
        self.directions = np.arctan2(self.ends[:, 0], self.ends[:, 1])
        self.strokes = [self._stroke(_opposite(angle), angle) for angle in self.directions]
        self.blank = self._blank()
        inside = np.zeros((self.stride, self.stride), bool)
        inside[self.reach : -self.reach, self.reach : -self.reach] = True
        self.image = self._pixels(inside)
        self.starts = [self._start(math.radians(degrees)) for degrees in range(-180, 180)]

    def bit(self, y: int, x: int) -> int:
        """The bit of a pixel."""
        return (y + self.reach) * self.stride + x + self.reach

    def pixel(self, bit: int) -> tuple[int, int]:
        """The row and column of a bit."""
        y, x = divmod(bit, self.stride)
        return y - self.reach, x - self.reach

    def dashes(self, path: 'list[Placed]') -> tuple[Dash, ...]:
        """A path as it is drawn."""
        return tuple(Dash(*self.pixel(bit), stroke.angle) for stroke, bit in path)

    def line(self, angle: float) -> Float64[np.ndarray, 'h w']:
        """The brightness of a dash around its anchor."""
        return _line(self.of, self.reach, angle)

    def _stroke(self, angle: float, heading: float) -> Stroke:
        coverage = _line(self.of, self.reach, angle, self.margin)
        soft = coverage > SOFT
        dy, dx = _moved(heading, self.of.dash + 2 * self.margin)
        return Stroke(
            angle,
            self._pixels(coverage > SOLID),
            self._pixels(_dilated(soft, self.margin)),
            self._pixels(soft),
            dy * self.stride + dx,
            self._turns(heading),
        )

    def _start(self, angle: float) -> Start:
        stroke = self._stroke(angle, angle)
        head = _moved(angle, self.of.dash)
        back = _moved(_opposite(angle), self.of.dash + self.margin)
        whole = np.argwhere(_line(self.of, self.reach, angle, self.margin) > SOLID) - self.reach
        border = 2 * self.of.seed_distance
        (top, left), (bottom, right) = border - whole.min(0), self.of.size - border - whole.max(0)
        free = [self.bit(y, x) for y in range(top, bottom) for x in range(left, right)]
        cover = [int(a) * self.stride + int(b) for a, b in whole]
        pivot = head[0] + back[0], head[1] + back[1]
        return Start(stroke, pivot[0] * self.stride + pivot[1], (pivot, head), cover, free)

    def _turns(self, heading: float) -> list[tuple[int, float, int]]:
        turn = np.abs(self.directions - heading)
        turn = np.minimum(turn, 2 * np.pi - turn)
        weights = np.cos(np.minimum(turn * self.of.continuity, np.pi / 2)) ** 2
        return [
            (self.centre + int(y) * self.stride + int(x), float(weight), index)
            for index, ((y, x), weight) in enumerate(zip(self.ends, weights, strict=True))
            if weight > 1e-6
        ]

    def _blank(self) -> Canvas:
        """The canvas with only the border occupied, and for `near` everything outside."""
        image = np.ones((self.stride, self.stride), bool)
        image[self.reach : -self.reach, self.reach : -self.reach] = False
        free = np.zeros_like(image)
        kept = self.reach + self.of.padding
        free[kept : self.stride - kept, kept : self.stride - kept] = True
        border = ~free & ~image
        return Canvas(self._pixels(border), self._pixels(_dilated(border, self.margin) | image), self._pixels(border))

    def _pixels(self, mask: np.ndarray) -> int:
        wide = np.zeros((len(mask), self.stride), bool)
        wide[:, : mask.shape[1]] = mask
        return int.from_bytes(np.packbits(wide, bitorder='little').tobytes(), 'little')


@functools.lru_cache(maxsize=8)
def _shapes(of: Pathfinder, margin: int) -> Shapes:
    return Shapes(of, margin)


Placed = tuple[Stroke, int]
"""A dash and the bit of its anchor."""


def _grown(
    shapes: Shapes, starts: list[tuple[Start, int]], taken: Canvas, dashes: int, rand: Callable[[], float]
) -> tuple[list[list[Placed]], Canvas] | None:
    """Grows paths alternately; returns them and the occupied pixels, or `None` where one cannot be extended.

    The pixels of a path's last dash count only after the next dash is drawn, which starts beside it.
    """
    solid, near, soft = taken
    centre, window, strokes = shapes.centre, shapes.window, shapes.strokes
    paths = [[(start.stroke, bit)] for start, bit in starts]
    pivots = [bit + start.pivot for start, bit in starts]
    for _ in range(dashes - 1):
        for index, path in enumerate(paths):
            last, bit = path[-1]
            corner = pivots[index] + last.out - centre
            around = near >> corner & window
            turns = [turn for turn in last.turns if not around >> turn[0] & 1]
            total = sum([turn[1] for turn in turns])
            for _ in range(SEGMENT_TRIALS if turns else 0):
                left = rand() * total
                for turn in turns:
                    left -= turn[1]
                    if left < 0:
                        break
                stroke, place = strokes[turn[2]], corner + turn[0]
                if not stroke.solid << place - centre & solid:
                    break
            else:
                return None
            solid |= last.solid << bit - centre
            near |= last.near << bit - centre
            soft |= last.soft << bit - centre
            path.append((stroke, place))
            pivots[index] = corner + centre
    for path in paths:
        last, bit = path[-1]
        solid |= last.solid << bit - centre
        near |= last.near << bit - centre
        soft |= last.soft << bit - centre
    return paths, Canvas(solid, near, soft)


def _two_paths(shapes: Shapes, rand: Callable[[], float]) -> tuple[list[list[Placed]], Canvas] | None:
    """Both long paths and the occupied pixels, or `None` where a path cannot be extended."""
    first = _central(shapes, rand)
    second = None if first is None else _beside(shapes, shapes.pixel(first[1]), rand)
    if first is None or second is None:
        return None
    return _grown(shapes, [first, second], shapes.blank, shapes.of.contour, rand)


def _short_path(shapes: Shapes, taken: Canvas, rand: Callable[[], float]) -> tuple[list[list[Placed]], Canvas] | None:
    """A short path and the occupied pixels, or `None` where there is no room."""
    start = _anywhere(shapes, taken.soft, rand)
    return None if start is None else _grown(shapes, [start], taken, shapes.of.distractor_contour, rand)


def _central(shapes: Shapes, rand: Callable[[], float]) -> tuple[Start, int] | None:
    """The start of the first path, at twice the distance between starts from every border."""
    for _ in range(SEGMENT_TRIALS):
        start = shapes.starts[int(360 * rand())]
        if not start.centres:
            return None
        bit = start.centres[int(rand() * len(start.centres))]
        if _fits(shapes, start, *shapes.pixel(bit)):
            return start, bit
    return None


def _beside(shapes: Shapes, other: tuple[int, int], rand: Callable[[], float]) -> tuple[Start, int] | None:
    """The start of the second path, at a distance from that of the first."""
    for _ in range(SEGMENT_TRIALS):
        start = shapes.starts[int(360 * rand())]
        angle = math.radians(int(360 * rand()))
        y = other[0] + round(shapes.of.seed_distance * math.sin(angle))
        x = other[1] + round(shapes.of.seed_distance * math.cos(angle))
        if _fits(shapes, start, y, x):
            return start, shapes.bit(y, x)
    return None


def _anywhere(shapes: Shapes, soft: int, rand: Callable[[], float]) -> tuple[Start, int] | None:
    """The start of a path, on any pixel from which its first dash is free."""
    for _ in range(SEGMENT_TRIALS):
        start = shapes.starts[int(360 * rand())]
        covered = 0
        for offset in start.cover:
            covered |= soft >> offset if offset >= 0 else soft << -offset
        bits = _bits(shapes.image & ~covered)
        if not len(bits):
            return None
        bit = int(bits[int(rand() * len(bits))])
        if _fits(shapes, start, *shapes.pixel(bit)):
            return start, bit
    return None


def _fits(shapes: Shapes, start: Start, y: int, x: int) -> bool:
    places = ((y, x), *((y + dy, x + dx) for dy, dx in start.ends))
    return all(0 <= row < shapes.of.size and 0 <= column < shapes.of.size for row, column in places)


def _bits(pixels: int) -> np.ndarray:
    """The indices of the bits that are set, ascending."""
    content = np.frombuffer(pixels.to_bytes(-(-pixels.bit_length() // 8), 'little'), np.uint8)
    return np.flatnonzero(np.unpackbits(content, bitorder='little'))


def _moved(angle: float, distance: int) -> tuple[int, int]:
    """Rows and columns to a pixel in that direction, rounded up as in the published generator."""
    return math.ceil(distance * math.sin(angle) - 1e-9), math.ceil(distance * math.cos(angle) - 1e-9)


def _opposite(angle: float) -> float:
    return angle - math.pi if angle >= 0 else angle + math.pi


@functools.lru_cache(maxsize=2048)
def _line(of: Pathfinder, reach: int, angle: float, grown: int = 0) -> Float64[np.ndarray, 'h w']:
    """The coverage of each pixel around its anchor by a dash widened by `grown` pixels on all sides."""
    side = 2 * reach * of.antialias + 1
    y, x = np.mgrid[:side, :side] - reach * of.antialias
    dy, dx = _moved(angle, of.dash * of.antialias)
    along = np.clip((y * dy + x * dx) / (dy * dy + dx * dx), 0, 1)
    distance = np.hypot(y - along * dy, x - along * dx)
    drawn = distance <= max(of.thickness * of.antialias, 1) / 2 + grown * of.antialias + 1e-6
    return _reduced(drawn, 2 * reach + 1)


@functools.lru_cache(maxsize=8)
def _disc(radius: float, antialias: int) -> Float64[np.ndarray, 'h w']:
    """The coverage of each pixel around its centre by a disc."""
    reach = math.ceil(radius) + 2
    places = np.arange((2 * reach + 1) * antialias) - reach * antialias
    return _reduced(np.hypot(places[:, None], places[None]) <= radius * antialias, 2 * reach + 1)


def _reduced(drawn: np.ndarray, side: int) -> Float64[np.ndarray, 'h w']:
    """A drawing reduced to `side` rows and columns with Lanczos's filter of three lobes."""
    scale = len(drawn) / side
    centres = (np.arange(side) + 0.5) * scale
    x = (np.arange(len(drawn)) + 0.5 - centres[:, None]) / scale
    weights = np.where(np.abs(x) < 3, np.sinc(x) * np.sinc(x / 3), 0)
    weights /= weights.sum(1, keepdims=True)
    return np.clip(weights @ drawn @ weights.T, 0, 1)


def _dilated(mask: np.ndarray, radius: int) -> np.ndarray:
    """The pixels within `radius` of any in the mask."""
    grown = np.zeros_like(mask)
    rows, columns = mask.shape
    for dy in range(-radius, radius + 1):
        for dx in range(-radius, radius + 1):
            if dy * dy + dx * dx <= radius * radius:
                to = slice(max(dy, 0), rows + min(dy, 0)), slice(max(dx, 0), columns + min(dx, 0))
                of = slice(max(-dy, 0), rows + min(-dy, 0)), slice(max(-dx, 0), columns + min(-dx, 0))
                grown[to] |= mask[of]
    return grown


def _stamp(image: np.ndarray, drawing: np.ndarray, y: int, x: int) -> None:
    """Draws around the pixel (y, x), keeping the maximum of old and new brightness."""
    reach = len(drawing) // 2
    window = image[y - reach : y + reach + 1, x - reach : x + reach + 1]
    np.maximum(window, drawing, out=window)
