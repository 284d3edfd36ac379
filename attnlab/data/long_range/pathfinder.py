"""Pathfinder and Path-X: whether two markers are on the same dashed path."""

import dataclasses
import functools
import math
import random
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import numpy as np
from jaxtyping import UInt8

from attnlab.data.long_range.dataset import Example, Kind
from attnlab.data.long_range.drawn import Distribution
from attnlab.errors import UserError

SEGMENT_TRIALS = 3
"""Attempts at drawing a dash before its path is abandoned."""

DISTRACTOR_TRIALS = 5
"""Attempts at drawing a distractor before it is omitted."""

TRIALS = 300_000
"""Attempts at drawing both long paths before settings are refused; those of papers take some hundreds."""

FULL = 255
"""The greatest level of a pixel: what is drawn and what is occupied is kept in bytes."""

COLLISION, SOFT = 1.8, 0.3
"""Coverage of a pixel by two dashes together at which they collide, and by one above which no path starts there."""

LEAST_CHANCE = 1e-4
"""The weight of all ends of a dash together below which its path cannot be extended."""

Levels = np.ndarray
"""Grey levels of pixels, `h w`, 16-bit integers."""


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

    A path starts with a dash. Every further dash starts a gap behind the last one; its end is drawn from the pixels
    around that point, with probability proportional to

        (1 - o) cos(min(continuity |turn|, pi / 2))^2,    o: how far the pixel is occupied, from 0 to 1

    Both long paths grow in turns, from starts `seed_distance` apart, and are redrawn until both have all of their
    dashes; then short ones are put where there is room. The label is drawn first and is 1 in half of the images. Dashes
    and discs are drawn `antialias` times as large, reduced with Lanczos's filter and kept in bytes; the brightest pixel
    of an image becomes 255.

    Follows the released generator where that matters to images, by what it does rather than what it says: the second
    long path alone starts in any direction, the others in those in which the first dash covers its own anchor (30 of
    360 directions of 32 x 32 images, so that short paths are seldom placed), and short paths may run over the last dash
    of the first long one. docs/pathfinder.md compares both. The defaults are the hard 32 x 32 images of the Long Range
    Arena; `PATH_X` is those of 128 x 128. `x` are grey levels, row by row.

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

    edition: ClassVar[int] = 3

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
        if self.dash < 1:
            raise UserError(f'dash of Pathfinder is {self.dash}; it must be at least 1 pixel')
        if self.contour < 2 or self.distractor_contour < 1 or not self.margins or min(self.margins) < 1:
            raise UserError(
                'Pathfinder needs a contour of at least 2, a distractor_contour of at least 1, and margins of '
                f'at least 1; got {self.contour}, {self.distractor_contour} and {self.margins}'
            )

    @property
    def kind(self) -> Kind:
        return Kind(classes=2, length=self.size**2, mean=127.5, deviation=127.5, highest=255.0)

    def draw(self, stream: np.random.SeedSequence) -> Example:
        scene = self.scene(stream)
        return {'x': self.render(scene).reshape(-1), 'label': np.int32(scene.label)}

    def scene(self, stream: np.random.SeedSequence) -> Scene:
        """Draws the contents of an image."""
        rand = random.Random(int.from_bytes(stream.generate_state(8).tobytes(), 'little')).random
        label = int(2 * rand())
        shapes = _shapes(self, self.margins[int(rand() * len(self.margins))])
        grown = next((found for _ in range(TRIALS) if (found := _two_paths(shapes, rand)) is not None), None)
        if grown is None:
            raise UserError(
                f'{TRIALS} trials found no room for both paths of {self}; make size larger or contour smaller'
            )
        paths, canvas = grown
        distractors = []
        for _ in range(self.distractors):
            trials = (_short_path(shapes, canvas, rand) for _ in range(DISTRACTOR_TRIALS))
            found = next((trial for trial in trials if trial is not None), None)
            if found is not None:
                (path,), canvas = found
                distractors.append(path)
        targets = paths[0], paths[1]
        origin = int(2 * rand())
        start, end = targets[origin][0], targets[origin if label else 1 - origin][-1]
        return Scene(targets, tuple(distractors), shapes.margin, ((start.y, start.x), (end.y, end.x)), label)

    def render(self, scene: Scene) -> UInt8[np.ndarray, 'h w']:
        """The image of a scene."""
        shapes = _shapes(self, scene.margin)
        disc = _disc(self.marker_radius, self.antialias)
        border = max(shapes.reach, len(disc) // 2)
        image = np.zeros((self.size + 2 * border, self.size + 2 * border))
        for paths, contrast in ((scene.targets, self.contrast), (scene.distractors, self.distractor_contrast)):
            for dash in (dash for path in paths for dash in path):
                _stamp(image, _drawing(self, scene.margin, dash.angle) * contrast, dash.y + border, dash.x + border)
        for y, x in scene.markers:
            _stamp(image, disc, y + border, x + border)
        inside = image[border : border + self.size, border : border + self.size]
        return np.floor(inside * (FULL / inside.max()) + 0.5).astype(np.uint8)


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
    """A dash that goes on a path or begins one, in grey levels around its anchor.

    Attributes:
      angle: from the anchor to the other end, radians.
      line: the dash as it is drawn.
      mask: the dash widened by the margin.
      near: that, widened by the margin again.
      out: rows and columns from the pivot of this dash to that of the next, before they are rounded up.
      weights: the chance of every end of the next dash in an empty image, but for a factor.
    """

    angle: float
    line: Levels
    mask: Levels
    near: Levels
    out: tuple[float, float]
    weights: np.ndarray


class Start(NamedTuple):
    """The first dash of a path in one of 360 directions, anchored at its near end.

    Attributes:
      stroke: the dash.
      cover: pixels relative to the anchor that have to be free where a path starts.
      centres: where it may start as the first long path.
    """

    stroke: Stroke
    cover: list[tuple[int, int]]
    centres: np.ndarray


class Seed(NamedTuple):
    """The first dash of a path, where it is: rows and columns of its anchor and of the point it is rotated around."""

    stroke: Stroke
    anchor: tuple[int, int]
    pivot: tuple[int, int]


class Canvas(NamedTuple):
    """The occupied pixels, in grey levels, with a border: `mask` and `near` of the dashes that are drawn."""

    mask: Levels
    near: Levels


class Shapes:
    """Every dash that images with one margin can have, and the canvas before any is drawn."""

    def __init__(self, of: Pathfinder, margin: int):
        self.of, self.margin = of, margin
        self.reach = of.dash + math.ceil(of.thickness) + margin
        step = of.dash + margin
        self.border = max(self.reach + margin, 2 * step) + 1
        self.stride = of.size + 2 * self.border
        around = np.arange(0, 2 * np.pi, 1 / step)
        ends = np.unique(np.floor(step * np.stack([np.sin(around), np.cos(around)], 1) + 1e-9).astype(int), axis=0)
        self.ends = [(int(y), int(x)) for y, x in ends]
        self.places = ends @ np.array([self.stride, 1])
        self.directions = np.arctan2(ends[:, 0], ends[:, 1])
        self.strokes = [self._stroke(_opposite(angle), angle) for angle in self.directions]
        self.starts = [self._start(degrees * math.pi / 180) for degrees in range(-180, 180)]
        ring = np.pad(self._ring(of.padding), self.border)
        near = np.pad(_dilated(self._ring(of.padding), margin), self.border, constant_values=FULL)
        self.blank = Canvas(ring, near)

    def free(self, cover: list[tuple[int, int]], occupied: np.ndarray) -> np.ndarray:
        """Rows and columns around which no pixel of `cover` is occupied.

        There are none unless the cover reaches over all four corners of an image from inside of it, as at a corner
        where it does not, the released generator finds a value below any other, and takes no place for free.
        """
        corners = ((y, x) for y in (-1, 1) for x in (-1, 1))
        if not all(any(y * dy >= 0 and x * dx >= 0 for dy, dx in cover) for y, x in corners):
            return np.empty((0, 2), int)
        size, wide = self.of.size, self.border
        padded = np.pad(occupied, wide)
        covered = np.zeros((size, size), bool)
        for dy, dx in cover:
            covered |= padded[wide + dy : wide + dy + size, wide + dx : wide + dx + size]
        return np.argwhere(~covered)

    def _ring(self, width: int) -> Levels:
        """An image that is occupied up to `width` pixels from its border."""
        ring = np.full((self.of.size, self.of.size), FULL, np.int16)
        ring[width : self.of.size - width, width : self.of.size - width] = 0
        return ring

    def _stroke(self, angle: float, heading: float) -> Stroke:
        """The dash in one direction from its anchor, of a path in direction `heading`."""
        of, side = self.of, 2 * self.reach + 1
        drawn = _line(of, self.reach, angle)
        mask = _reduced(_dilated(drawn, self.margin * of.antialias), side)
        turn = np.abs(self.directions - heading)
        turn = np.minimum(turn, 2 * np.pi - turn)
        weights = np.cos(np.minimum(turn * of.continuity, np.pi / 2)) ** 2
        near = _dilated(np.pad(mask, self.margin), self.margin)
        return Stroke(angle, _reduced(drawn, side), mask, near, _towards(heading, of.dash + 2 * self.margin), weights)

    def _start(self, angle: float) -> Start:
        stroke, of = self._stroke(angle, angle), self.of
        # What has to be free is counted from one pixel before the anchor, as in the released generator.
        around = of.dash + self.margin
        window = stroke.mask[self.reach - around - 1 : self.reach + around, self.reach - around - 1 :]
        cover = [(int(y) - around, int(x) - around) for y, x in np.argwhere(window[:, : 2 * around + 1] == FULL)]
        centres = self.free(cover, self._ring(2 * of.seed_distance) > 0)
        return Start(stroke, cover, centres)


@functools.lru_cache(maxsize=8)
def _shapes(of: Pathfinder, margin: int) -> Shapes:
    return Shapes(of, margin)


def _grown(
    shapes: Shapes, seeds: list[Seed], taken: Canvas, dashes: int, rand: Callable[[], float]
) -> tuple[list[tuple[Dash, ...]], Canvas] | None:
    """Grows paths alternately; returns them and the occupied pixels, or `None` where one cannot be extended.

    The pixels of a path's last dash count only after the next dash is drawn, which starts beside it. Of the paths' own
    last dashes that of the last path alone counts, as in the released generator.
    """
    mask, near = taken.mask.copy(), taken.near.copy()
    flat, border, stride, reach = near.reshape(-1), shapes.border, shapes.stride, shapes.reach
    strokes, ends, places = shapes.strokes, shapes.ends, shapes.places
    least, most = border - shapes.of.dash - shapes.margin, stride - border + shapes.of.dash + shapes.margin
    # Rows and columns are those of the canvas, but of pivots those of the image, as rounding depends on them.
    lasts = [(seed.stroke, seed.anchor[0] + border, seed.anchor[1] + border) for seed in seeds]
    paths = [[last] for last in lasts]
    pivots = [seed.pivot for seed in seeds]
    for _ in range(dashes - 1):
        for index, path in enumerate(paths):
            last = lasts[index][0]
            pivot = _added(pivots[index], last.out)
            y, x = pivot[0] + border, pivot[1] + border
            if not (least <= y < most and least <= x < most):
                return None
            chances = ((FULL - flat[places + (y * stride + x)]) * last.weights).cumsum()
            total = chances[-1]
            if total < LEAST_CHANCE * FULL:
                return None
            for _ in range(SEGMENT_TRIALS):
                chosen = int(chances.searchsorted(rand() * total, side='right'))
                stroke, row, column = strokes[chosen], y + ends[chosen][0], x + ends[chosen][1]
                under = mask[row - reach : row + reach + 1, column - reach : column + reach + 1]
                if (under + stroke.mask).max() < COLLISION * FULL:
                    break
            else:
                return None
            _occupy(mask, near, *lasts[index])
            lasts[index], pivots[index] = (stroke, row, column), pivot
            path.append(lasts[index])
    _occupy(mask, near, *lasts[-1])
    drawn = [tuple(Dash(y - border, x - border, stroke.angle) for stroke, y, x in path) for path in paths]
    return drawn, Canvas(mask, near)


def _occupy(mask: Levels, near: Levels, stroke: Stroke, y: int, x: int) -> None:
    _stamp(mask, stroke.mask, y, x)
    _stamp(near, stroke.near, y, x)


def _two_paths(shapes: Shapes, rand: Callable[[], float]) -> tuple[list[tuple[Dash, ...]], Canvas] | None:
    """Both long paths and the occupied pixels, or `None` where a path cannot be extended."""
    first = _seed(shapes, lambda start: start.centres, rand)
    second = None if first is None else _beside(shapes, first.anchor, rand)
    if first is None or second is None:
        return None
    return _grown(shapes, [first, second], shapes.blank, shapes.of.contour, rand)


def _short_path(
    shapes: Shapes, taken: Canvas, rand: Callable[[], float]
) -> tuple[list[tuple[Dash, ...]], Canvas] | None:
    """A short path and the occupied pixels, or `None` where there is no room."""
    inside = slice(shapes.border, shapes.border + shapes.of.size)

    def free(start: Start) -> np.ndarray:
        occupied = taken.mask[inside, inside] > SOFT * FULL
        occupied[[0, -1]] = occupied[:, [0, -1]] = True
        return shapes.free(start.cover, occupied)

    seed = _seed(shapes, free, rand)
    return None if seed is None else _grown(shapes, [seed], taken, shapes.of.distractor_contour, rand)


def _seed(shapes: Shapes, free: Callable[[Start], np.ndarray], rand: Callable[[], float]) -> Seed | None:
    """The start of a path where one of its direction may, or `None` where there is no such place."""
    for _ in range(SEGMENT_TRIALS):
        start = shapes.starts[int(360 * rand())]
        places = free(start)
        if not len(places):
            return None
        y, x = places[int(rand() * len(places))].tolist()
        found = _begun(shapes, start.stroke, (y, x))
        if found is not None:
            return found
    return None


def _beside(shapes: Shapes, other: tuple[int, int], rand: Callable[[], float]) -> Seed | None:
    """The start of the second path, at a distance from that of the first."""
    for _ in range(SEGMENT_TRIALS):
        start = shapes.starts[int(360 * rand())]
        y, x = _towards(int(360 * rand()) * math.pi / 180, shapes.of.seed_distance)
        found = _begun(shapes, start.stroke, (round(other[0] + y), round(other[1] + x)))
        if found is not None:
            return found
    return None


def _begun(shapes: Shapes, stroke: Stroke, anchor: tuple[int, int]) -> Seed | None:
    """A first dash there, or `None` where its other end or the point that it is rotated around is out of the image."""
    head = _added(anchor, _towards(stroke.angle, shapes.of.dash))
    pivot = _added(head, _towards(_opposite(stroke.angle), shapes.of.dash + shapes.margin))
    inside = all(0 <= place < shapes.of.size for place in (*head, *pivot))
    return Seed(stroke, anchor, pivot) if inside else None


def _towards(angle: float, distance: int) -> tuple[float, float]:
    """Rows and columns to a point in that direction."""
    return distance * math.sin(angle), distance * math.cos(angle)


def _added(place: tuple[int, int], way: tuple[float, float]) -> tuple[int, int]:
    """The pixel at the end of a way, rounded up after the sum as in the released generator.

    What is left of the sine of pi moves a path that runs to the left one row down, but in the first eight rows alone,
    where the sum has the digits for it; likewise one column in the first four. The images show it.
    """
    return math.ceil(place[0] + way[0]), math.ceil(place[1] + way[1])


def _opposite(angle: float) -> float:
    return angle - math.pi if angle >= 0 else angle + math.pi


@functools.lru_cache(maxsize=2048)
def _drawing(of: Pathfinder, margin: int, angle: float) -> Levels:
    """A dash around its anchor."""
    reach = _shapes(of, margin).reach
    return _reduced(_line(of, reach, angle), 2 * reach + 1)


def _line(of: Pathfinder, reach: int, angle: float) -> Levels:
    """A dash around its anchor, `antialias` times as large: by Bresenham's steps, or wider ones row by row."""
    centre = reach * of.antialias
    drawn = np.zeros((2 * centre + 1, 2 * centre + 1), np.int16)
    dy, dx = (end - centre for end in _added((centre, centre), _towards(angle, of.dash * of.antialias)))
    width = max(1, round(of.thickness * of.antialias))
    if width == 1:
        for y, x in _bresenham(dy, dx):
            drawn[centre + y, centre + x] = FULL
        return drawn
    half, length = (width - 1) / 2, math.hypot(dy, dx)
    y_off, x_off = _up(half * dx / length), _down(half * dy / length)
    corners = [(y_off, -x_off), (dy + y_off, dx - x_off), (dy - y_off, dx + x_off), (-y_off, x_off)]
    corners = [(centre + y, centre + x) for y, x in corners]
    for y in range(min(corners)[0], max(corners)[0] + 1):
        crossed: list[float] = []
        for (y0, x0), (y1, x1) in zip(corners, corners[1:] + corners[:1], strict=True):
            if min(y0, y1) <= y <= max(y0, y1):
                crossed += [float(x0), float(x1)] if y0 == y1 else [x0 + (x1 - x0) * (y - y0) / (y1 - y0)]
        drawn[y, _up(min(crossed)) : _down(max(crossed)) + 1] = FULL
    return drawn


def _bresenham(dy: int, dx: int) -> list[tuple[int, int]]:
    """The pixels from the origin to (dy, dx)."""
    long, short = max(abs(dy), abs(dx)), min(abs(dy), abs(dx))
    pixels, error, aside = [], 2 * short - long, 0
    for along in range(long + 1):
        y, x = (along, aside) if abs(dy) >= abs(dx) else (aside, along)
        pixels.append((y if dy >= 0 else -y, x if dx >= 0 else -x))
        if error >= 0 and short:
            aside, error = aside + 1, error - 2 * long
        error += 2 * short
    return pixels


def _up(x: float) -> int:
    """The nearest whole number, halves away from zero."""
    return int(math.copysign(math.floor(abs(x) + 0.5), x))


def _down(x: float) -> int:
    """The nearest whole number, halves towards zero."""
    return int(math.copysign(math.ceil(abs(x) - 0.5), x))


@functools.lru_cache(maxsize=8)
def _disc(radius: float, antialias: int) -> Levels:
    """A disc around its centre."""
    reach = math.ceil(radius) + 3
    places = np.arange((2 * reach + 1) * antialias) - reach * antialias
    inside = np.hypot(places[:, None], places[None]) <= radius * antialias
    return _reduced(np.where(inside, FULL, 0), 2 * reach + 1)


def _reduced(drawn: np.ndarray, side: int) -> Levels:
    """A drawing reduced to `side` rows and columns with Lanczos's filter of three lobes, columns before rows.

    Levels are rounded to bytes after each.
    """
    scale = len(drawn) / side
    centres = (np.arange(side) + 0.5) * scale
    x = (np.arange(len(drawn)) + 0.5 - centres[:, None]) / scale
    weights = np.where(np.abs(x) < 3, np.sinc(x) * np.sinc(x / 3), 0)
    weights /= weights.sum(1, keepdims=True)
    narrow = np.clip(np.floor(drawn @ weights.T + 0.5), 0, FULL)
    return np.clip(np.floor(weights @ narrow + 0.5), 0, FULL).astype(np.int16)


def _dilated(image: Levels, radius: int) -> Levels:
    """The greatest level within `radius` of every pixel."""
    grown = np.zeros_like(image)
    rows, columns = image.shape
    for dy in range(-radius, radius + 1):
        for dx in range(-radius, radius + 1):
            if dy * dy + dx * dx <= radius * radius:
                to = slice(max(dy, 0), rows + min(dy, 0)), slice(max(dx, 0), columns + min(dx, 0))
                of = slice(max(-dy, 0), rows + min(-dy, 0)), slice(max(-dx, 0), columns + min(-dx, 0))
                np.maximum(grown[to], image[of], out=grown[to])
    return grown


def _stamp(image: np.ndarray, drawing: np.ndarray, y: int, x: int) -> None:
    """Draws around the pixel (y, x), keeping the maximum of old and new brightness."""
    reach = len(drawing) // 2
    window = image[y - reach : y + reach + 1, x - reach : x + reach + 1]
    np.maximum(window, drawing, out=window)
