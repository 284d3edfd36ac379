"""Pictures of what a model of images finds, patch by patch, and of which pixels a token has seen."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float, Int, UInt8

from attnlab.errors import UserError
from attnlab.evals.png import as_bytes, write_png
from attnlab.models.predictor import Stacked
from attnlab.tables import Column, Table, digits
from attnlab.tasks.images import ImageTask, Segmentation, side
from attnlab.tasks.task import Batch, context
from attnlab.train.setup import Cadence, Setup

HIGH = 384
"""Pixels that a picture has at least on a side."""

COLOURS = np.array(
    [
        *[(40, 40, 40), (31, 119, 180), (255, 127, 14), (44, 160, 44), (214, 39, 40)],
        *[(148, 103, 189), (140, 86, 75), (227, 119, 194), (188, 189, 34), (23, 190, 207)],
    ],
    np.uint8,
)
"""Of classes, the background first; those beyond the last begin anew."""

GAP = 2
"""Pixels between pictures."""


@dataclasses.dataclass(frozen=True)
class Segments:
    """The results of `SegmentPictures`.

    Attributes:
      numbers: `accuracy`, of the patches that are shown.
      images: bytes, `n height width channels`.
      true: the class of every patch, `n y x`.
      found: that which the model gives it.
    """

    numbers: Mapping[str, float]
    images: UInt8[np.ndarray, 'n height width channels']
    true: Int[np.ndarray, 'n y x']
    found: Int[np.ndarray, 'n y x']

    def draw(self, folder: pathlib.Path) -> None:
        """Writes `segmented.png`: images above, their true classes below, and those found below these."""
        pixels = self.images.shape[1]
        images = np.broadcast_to(self.images, (*self.images.shape[:3], 3)) if self.images.shape[3] == 1 else self.images
        rows = [images]
        for classes in (self.true, self.found):
            times = pixels // classes.shape[1]
            rows.append(COLOURS[classes % len(COLOURS)].repeat(times, axis=1).repeat(times, axis=2))
        sheet = np.concatenate([_beside(row) for row in rows], axis=0)
        write_png(sheet, folder / 'segmented.png')

    def table(self, title: str) -> Table:
        """One row a number."""
        return _table(self.numbers, title)


@dataclasses.dataclass(frozen=True)
class SegmentPictures:
    """Pictures of images all over a split, with the classes of their patches and those that a model finds.

    Attributes:
      cadence: when to run during training.
      split: which split of the task.
      count: images shown.
      name: the prefix of its numbers.
    """

    cadence: Cadence
    split: str = 'test'
    count: int = 8
    name: str = 'segmented'

    def __post_init__(self) -> None:
        if self.count < 1:
            raise UserError(f'count of SegmentPictures is {self.count}; it must be at least 1')

    def load_data(self, setup: Setup) -> None:
        """Loads the split. Raises `UserError` for a task of another kind."""
        if not isinstance(setup.task, Segmentation):
            raise UserError(f'SegmentPictures shows classes of patches; the task is {type(setup.task).__name__}')
        setup.task.data.rows(self.split)

    def evaluate(self, setup: Setup, variables: nnx.State) -> Segments:
        """Returns the pictures."""
        task = setup.task
        assert isinstance(task, Segmentation)
        batch = _batch(task, setup.length, self.split, self.count)
        found = np.asarray(setup.program(_classes)(variables, batch))
        patches = side(task.data) // task.patch
        true, found = (x.reshape(-1, patches, patches) for x in (np.asarray(batch['targets']), found))
        return Segments({'accuracy': float(np.mean(true == found))}, _pictures(task, batch), true, found)


@dataclasses.dataclass(frozen=True)
class Field:
    """The results of `ReceptiveField`.

    Attributes:
      numbers: `side_half` and `side_most`, the pixels on a side of the least squares around the token in the middle
        that hold half and 95 % of what it has seen.
      seen: the influence of every pixel, `height width`, of which the largest is 1.
    """

    numbers: Mapping[str, float]
    seen: Float[np.ndarray, 'height width']

    def draw(self, folder: pathlib.Path) -> None:
        """Writes `receptive_field.png`, black where nothing is seen; brightness goes by the root of the influence."""
        bright = np.round(255 * np.sqrt(self.seen)).astype(np.uint8)
        times = max(1, -(-HIGH // len(bright)))
        write_png(
            np.stack([bright.repeat(times, axis=0).repeat(times, axis=1)] * 3, axis=-1), folder / 'receptive_field.png'
        )

    def table(self, title: str) -> Table:
        """One row a number."""
        return _table(self.numbers, title)


@dataclasses.dataclass(frozen=True)
class ReceptiveField:
    """Which pixels the token in the middle of an image has seen, the effective receptive field of a trained model.

    The influence of a pixel is `E |u^T dh / dx|`, `h` the hidden state of the token, `x` the pixel's channels, `u` of
    plus and minus one, drawn for every image; the mean is over images. Of an even number of tokens on an axis that
    after the middle is taken. Luo et al. 2016, https://arxiv.org/abs/1701.04128, with ones for `u`, which a norm would
    make zero.

    Attributes:
      cadence: when to run during training.
      split: which split of the task.
      count: images that are averaged over.
      name: the prefix of its numbers.
    """

    cadence: Cadence
    split: str = 'test'
    count: int = 64
    name: str = 'field'

    def __post_init__(self) -> None:
        if self.count < 1:
            raise UserError(f'count of ReceptiveField is {self.count}; it must be at least 1')

    def load_data(self, setup: Setup) -> None:
        """Loads the split. Raises `UserError` for a task of another kind, and tokens on no grid of two axes."""
        if not isinstance(setup.task, ImageTask):
            raise UserError(f'ReceptiveField is of models of images; the task is {type(setup.task).__name__}')
        _grid(setup.model, _batch(setup.task, setup.length, self.split, 1))

    def evaluate(self, setup: Setup, variables: nnx.State) -> Field:
        """Returns the field. Raises `UserError` for a model whose tokens lie on no grid of two axes."""
        task = setup.task
        assert isinstance(task, ImageTask)
        pixels = side(task.data)
        batch = _batch(task, setup.length, self.split, self.count)
        grid = _grid(setup.model, batch)
        influence = np.asarray(setup.program(_influence)(variables, batch, jax.random.key(setup.seed)), np.float64)
        seen = influence.reshape(pixels, pixels)
        seen = seen / max(seen.max(), np.finfo(float).tiny)
        # The pixel at the middle of the patch.
        middle = [int((size // 2 + 0.5) * pixels / size) for size in grid]
        return Field({name: side_of(seen, middle, share) for name, share in SHARES.items()}, seen)


SHARES = {'side_half': 0.5, 'side_most': 0.95}
"""What the squares hold whose sides are reported."""


def side_of(seen: Float[np.ndarray, 'height width'], middle: list[int], share: float) -> float:
    """Returns the pixels on a side of the least square around a pixel that holds this share of what is seen."""
    away = np.max([np.abs(np.arange(size) - at) for size, at in zip(seen.shape, middle, strict=True)])
    rows, columns = (np.abs(np.arange(size) - at) for size, at in zip(seen.shape, middle, strict=True))
    distance = np.maximum(rows[:, None], columns[None])
    held = np.array([seen[distance <= reach].sum() for reach in range(away + 1)])
    return float(2 * int(np.searchsorted(held, share * (1 - 1e-12) * held[-1])) + 1)


def _batch(task: ImageTask, length: int, split: str, count: int) -> Batch:
    """Images all over a split."""
    part = task.slices(split, length, (1,), count)['all']
    rows = [part.source[index] for index in range(len(part.source))]
    return {name: jnp.asarray(np.stack([row[name] for row in rows])) for name in rows[0]}


def _grid(model: Stacked, batch: Batch) -> tuple[int, ...]:
    """The grid of a model's hidden states."""
    grid = model.stack.context(model.layout(context(batch))).grid
    if grid is None or len(grid) != 2:
        raise UserError('ReceptiveField is of models whose tokens lie on a grid of two axes; use token=mean')
    return grid


def _classes(setup: Setup) -> Callable[[nnx.State, Batch], Any]:
    """The class of every patch."""

    def found(variables: nnx.State, batch: Batch) -> jax.Array:
        model = nnx.merge(setup.graphdef, variables)
        hidden, _ = model.hidden(batch['tokens'], context(batch))
        return jnp.argmax(model.logits(hidden), axis=-1)

    return setup.jit(found, out_shardings=setup.whole)


def _influence(setup: Setup) -> Callable[[nnx.State, Batch, jax.Array], Any]:
    """The influence of every pixel on the token in the middle."""

    def influence(variables: nnx.State, batch: Batch, key: jax.Array) -> jax.Array:
        model = nnx.merge(setup.graphdef, variables)
        rows, columns = _grid(model, batch)
        middle = (rows // 2) * columns + columns // 2
        assert isinstance(setup.task, ImageTask)
        _, pull = jax.vjp(lambda tokens: model.hidden(tokens, context(batch))[0][:, middle], batch['tokens'])
        signs = jax.random.rademacher(key, (len(batch['tokens']), model.stack.dim), model.dtype)
        (back,) = pull(signs)
        channels = setup.task.data.kind.channels
        return jnp.mean(jnp.sqrt(jnp.sum(jnp.square(back[..., :channels].astype(jnp.float32)), axis=-1)), axis=0)

    return setup.jit(influence, out_shardings=setup.whole)


def _pictures(task: ImageTask, batch: Batch) -> UInt8[np.ndarray, 'n height width channels']:
    """Images as bytes, the brightest number of all of them white."""
    kind, size = task.data.kind, side(task.data)
    pixels = np.asarray(batch['tokens'])[..., : kind.channels] * kind.deviation + kind.mean
    return as_bytes(pixels, float(pixels.max())).reshape(-1, size, size, kind.channels)


def _beside(pictures: UInt8[np.ndarray, 'n height width 3']) -> UInt8[np.ndarray, 'y x 3']:
    """Pictures in a row, white between them, at least `HIGH` high for four."""
    times = max(1, -(-HIGH // (4 * pictures.shape[1])))
    large = pictures.repeat(times, axis=1).repeat(times, axis=2)
    framed = np.pad(large, ((0, 0), (0, GAP), (0, GAP), (0, 0)), constant_values=255)
    return framed.transpose(1, 0, 2, 3).reshape(framed.shape[1], -1, 3)


def _table(numbers: Mapping[str, float], title: str) -> Table:
    columns = (Column('statistic'), Column('value', digits('.3f'), True))
    return Table('pictures', columns, [(name.replace('_', ' '), value) for name, value in numbers.items()], title)
