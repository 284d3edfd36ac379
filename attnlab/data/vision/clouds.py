"""Drawn clouds of points on surfaces, with a label for every point: which surface, or which part of an object.

Points are places `(z, y, x)` in the unit cube, `z` upwards, in no order; `x` of an example is float32, `n 3`.
"""

import abc
import dataclasses
from typing import ClassVar

import numpy as np
from jaxtyping import Float

from attnlab.data.long_range.dataset import Example, Kind
from attnlab.data.long_range.drawn import Distribution
from attnlab.errors import UserError

Points = Float[np.ndarray, 'n 3']
FEWEST = 16
"""The fewest points of a cloud."""

TRIALS = 200
"""Attempts at placing a body before a scene is begun anew."""


class Surface(abc.ABC):
    """A surface that points are drawn on."""

    @property
    @abc.abstractmethod
    def area(self) -> float:
        """How large it is."""

    @abc.abstractmethod
    def points(self, rng: np.random.Generator, count: int) -> Points:
        """Draws points on it, each place as likely."""


@dataclasses.dataclass(frozen=True)
class Box(Surface):
    """The sides of a box.

    Attributes:
      centre: of the box, `(z, y, x)`.
      size: its edges on these axes.
    """

    centre: tuple[float, float, float]
    size: tuple[float, float, float]

    @property
    def _faces(self) -> Float[np.ndarray, '3']:
        """Areas of the faces across each axis, both sides together."""
        z, y, x = self.size
        return 2 * np.array([y * x, z * x, z * y])

    @property
    def area(self) -> float:
        return float(self._faces.sum())

    def points(self, rng: np.random.Generator, count: int) -> Points:
        axes = rng.choice(3, count, p=self._faces / self.area)
        places = rng.uniform(-0.5, 0.5, (count, 3))
        places[np.arange(count), axes] = rng.choice([-0.5, 0.5], count)
        return np.array(self.centre) + places * np.array(self.size)


@dataclasses.dataclass(frozen=True)
class Ball(Surface):
    """A sphere.

    Attributes:
      centre: `(z, y, x)`.
      radius: of the sphere.
    """

    centre: tuple[float, float, float]
    radius: float

    @property
    def area(self) -> float:
        return 4 * np.pi * self.radius**2

    def points(self, rng: np.random.Generator, count: int) -> Points:
        ways = rng.standard_normal((count, 3))
        return np.array(self.centre) + self.radius * ways / np.linalg.norm(ways, axis=1, keepdims=True)


@dataclasses.dataclass(frozen=True)
class Tapered(Surface):
    """The side and both ends of an upright cylinder, or of a cone that may be cut off.

    Attributes:
      foot: the middle of its lower end, `(z, y, x)`.
      height: from the lower to the upper end.
      lower: radius of the lower end.
      upper: of the upper; 0 is a tip.
    """

    foot: tuple[float, float, float]
    height: float
    lower: float
    upper: float

    @property
    def _areas(self) -> Float[np.ndarray, '3']:
        """The areas of the side, the lower and the upper end."""
        slant = np.hypot(self.height, self.lower - self.upper)
        return np.pi * np.array([(self.lower + self.upper) * slant, self.lower**2, self.upper**2])

    @property
    def area(self) -> float:
        return float(self._areas.sum())

    def points(self, rng: np.random.Generator, count: int) -> Points:
        where = rng.choice(3, count, p=self._areas / self.area)
        angles, u = rng.uniform(0, 2 * np.pi, count), rng.random(count)
        # The radius of a place on the side has a density that grows with the radius itself.
        side = np.sqrt(self.lower**2 + u * (self.upper**2 - self.lower**2))
        narrows = self.lower - self.upper
        along = (self.lower - side) / narrows if narrows else u
        radii = np.select([where == 0, where == 1], [side, self.lower * np.sqrt(u)], self.upper * np.sqrt(u))
        heights = self.height * np.select([where == 0, where == 1], [along, 0.0], 1.0)
        places = np.stack([heights, radii * np.sin(angles), radii * np.cos(angles)], axis=1)
        return np.array(self.foot) + places


@dataclasses.dataclass(frozen=True)
class Cloud(Distribution):
    """Base class of clouds: surfaces with labels, of which points are drawn.

    How many points a surface has goes by the square root of its area, so that what is thin is there too. `targets` of
    an example is uint8, one label a point.

    Attributes:
      points: of a cloud.
      noise: standard deviation of the distance of a point from its place, on every axis.
    """

    labels: ClassVar[tuple[str, ...]]

    points: int = 512
    noise: float = 0.004

    def __post_init__(self) -> None:
        if self.points < FEWEST or self.noise < 0:
            raise UserError(
                f'{type(self).__name__} has points {self.points} and noise {self.noise}; it needs at least {FEWEST} '
                'points, and noise of at least 0'
            )

    @property
    def kind(self) -> Kind:
        return Kind(classes=len(self.labels), length=self.points, channels=3, dense=True)

    @abc.abstractmethod
    def surfaces(self, rng: np.random.Generator) -> list[tuple[Surface, str]]:
        """Draws the surfaces of a scene, each with its label, within the unit cube."""

    def placed(self, points: Points, rng: np.random.Generator) -> Points:
        """The points of a scene where its cloud has them."""
        del rng
        return points

    def draw(self, stream: np.random.SeedSequence) -> Example:
        """Draws a cloud; `label` is always 0."""
        rng = np.random.default_rng(stream)
        surfaces = self.surfaces(rng)
        shares = np.sqrt([surface.area for surface, _ in surfaces])
        counts = rng.multinomial(self.points, shares / shares.sum()).tolist()
        places = [surface.points(rng, count) for (surface, _), count in zip(surfaces, counts, strict=True)]
        targets = np.repeat([self.labels.index(label) for _, label in surfaces], counts)
        noisy = self.placed(np.concatenate(places), rng) + self.noise * rng.standard_normal((self.points, 3))
        order = rng.permutation(self.points)
        inside = np.clip(noisy, 0.0, np.nextafter(np.float32(1), np.float32(0)))
        return {'x': inside[order].astype(np.float32), 'targets': targets[order].astype(np.uint8), 'label': np.int32(0)}


@dataclasses.dataclass(frozen=True)
class Surfaces(Cloud):
    """What kind of surface a point is on: the ground, or a ball, cylinder, box or cone that hovers over it, apart.

    Attributes:
      most: the most bodies; there is at least one.
    """

    labels: ClassVar[tuple[str, ...]] = ('ground', 'ball', 'cylinder', 'box', 'cone')

    most: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.most <= 5:
            raise UserError(f'most of Surfaces is {self.most}; the ground has room for 1 to 5 bodies')

    def surfaces(self, rng: np.random.Generator) -> list[tuple[Surface, str]]:
        """The ground, and from 1 to `most` bodies."""
        count = int(rng.integers(1, self.most + 1))
        ground = Box((0.02, 0.5, 0.5), (0.0, 0.98, 0.98))
        while True:
            found: list[tuple[Surface, str]] = [(ground, 'ground')]
            taken: list[tuple[float, float, float]] = []
            for _ in range(TRIALS):
                if len(taken) == count:
                    return found
                r = float(rng.uniform(0.08, 0.16))
                y, x = (float(place) for place in rng.uniform(r + 0.02, 0.98 - r, 2))
                # Boxes reach beyond the circle of radius r by their corners.
                if all(np.hypot(y - v, x - u) > 1.45 * (r + other) for v, u, other in taken):
                    taken.append((y, x, r))
                    found.append(_body(rng, (float(rng.uniform(0.15, 0.35)), y, x), r))


def _body(rng: np.random.Generator, foot: tuple[float, float, float], r: float) -> tuple[Surface, str]:
    """A body of a drawn kind whose lowest place is over `foot`, of radius `r`, or half an edge."""
    kind, height = str(rng.choice(Surfaces.labels[1:])), float(rng.uniform(1.5, 3.0)) * r
    z, y, x = foot
    if kind == 'ball':
        return Ball((z + r, y, x), r), kind
    if kind == 'box':
        return Box((z + height / 2, y, x), (height, 2 * r, 2 * r)), kind
    return Tapered(foot, height, r, 0.0 if kind == 'cone' else r), kind


@dataclasses.dataclass(frozen=True)
class Parts(Cloud):
    """What part of an object a point is on: a table, a chair or a lamp, of any size, anywhere and turned in any way.

    Legs of a table and of a chair are one label; its top and a seat are two, which the back of a chair tells apart, and
    a pole is thin as legs are.
    """

    labels: ClassVar[tuple[str, ...]] = ('leg', 'top', 'seat', 'back', 'base', 'pole', 'shade')

    def surfaces(self, rng: np.random.Generator) -> list[tuple[Surface, str]]:
        """The parts of an object around the middle of the ground."""
        kind, size = int(rng.integers(3)), float(rng.uniform(0.5, 0.8))
        if kind == 2:
            return _lamp(rng, size)
        height = size * (float(rng.uniform(0.5, 0.9)) if kind == 0 else float(rng.uniform(0.4, 0.55)))
        depth, width = (float(share) * size for share in rng.uniform(0.5, 0.8, 2))
        plate = Box((height, 0.5, 0.5), (0.04, depth, width))
        edge = 0.03
        legs = [
            Box((height / 2, 0.5 + one * (depth - edge) / 2, 0.5 + other * (width - edge) / 2), (height, edge, edge))
            for one in (-1, 1)
            for other in (-1, 1)
        ]
        found: list[tuple[Surface, str]] = [(leg, 'leg') for leg in legs]
        if kind == 0:
            return [*found, (plate, 'top')]
        tall = float(rng.uniform(0.4, 0.55)) * size
        back = Box((height + tall / 2, 0.5 - (depth - 0.04) / 2, 0.5), (tall, 0.04, width))
        return [*found, (plate, 'seat'), (back, 'back')]

    def placed(self, points: Points, rng: np.random.Generator) -> Points:
        """The points turned about the vertical, and moved to anywhere on the ground."""
        angle = rng.uniform(0, 2 * np.pi)
        turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
        plan = (points[:, 1:] - 0.5) @ turn.T
        plan = plan + rng.uniform(-plan.min(axis=0), 1 - plan.max(axis=0))
        return np.concatenate([points[:, :1], plan], axis=1)


def _lamp(rng: np.random.Generator, size: float) -> list[tuple[Surface, str]]:
    """A foot, a pole and a shade."""
    height = size * float(rng.uniform(0.9, 1.1))
    wide, shade = (float(share) * size for share in rng.uniform((0.2, 0.25), (0.3, 0.4)))
    tall = float(rng.uniform(0.25, 0.35)) * height
    return [
        (Tapered((0.0, 0.5, 0.5), 0.04, wide, wide), 'base'),
        (Tapered((0.04, 0.5, 0.5), height - tall - 0.04, 0.02, 0.02), 'pole'),
        (Tapered((height - tall, 0.5, 0.5), tall, shade, shade * float(rng.uniform(0.4, 0.8))), 'shade'),
    ]
