"""Images drawn by a diffusion model, beside those that it was trained on, by the statistics of their pixels."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float

from attnlab.context import Context
from attnlab.data.long_range.rows import padded
from attnlab.data.pipeline import spread
from attnlab.errors import UserError
from attnlab.evals.png import as_bytes, write_png
from attnlab.mixers.softmax.reused import Reuse
from attnlab.models.reusing import begun, reusing
from attnlab.tables import Column, Table, digits
from attnlab.tasks.diffusion import Diffusion
from attnlab.tasks.images import side
from attnlab.train.setup import Cadence, Setup

MAGNIFIED = 4
"""Pixels of a figure for a pixel of an image."""


@dataclasses.dataclass(frozen=True)
class DrawnImages:
    """The results of `Drawings`.

    Attributes:
      numbers: `mean_error` and `deviation_error`, the root mean square over pixels of how far the mean and the standard
        deviation of drawn images are from those of the split, in standard deviations of pixels; `..._of_data` are the
        same of as many training images.
      pictures: bytes, `n height width channels`.
    """

    numbers: Mapping[str, float]
    pictures: np.ndarray

    def draw(self, folder: pathlib.Path) -> None:
        """Writes the pictures side by side, `drawn.png`."""
        columns = int(np.ceil(len(self.pictures) ** 0.5))
        rows = -(-len(self.pictures) // columns)
        height, width, channels = self.pictures.shape[1:]
        sheet = np.zeros((rows, height + 1, columns, width + 1, channels), np.uint8)
        for place, picture in enumerate(self.pictures):
            sheet[place // columns, :height, place % columns, :width] = picture
        flat = sheet.reshape(rows * (height + 1), columns * (width + 1), channels)
        large = flat.repeat(MAGNIFIED, axis=0).repeat(MAGNIFIED, axis=1)
        write_png(large[..., 0] if channels == 1 else large, folder / 'drawn.png')

    def table(self, title: str) -> Table:
        """One row a statistic."""
        names = [name for name in self.numbers if not name.endswith('_of_data')]
        columns = (Column('statistic'), Column('drawn', digits('.3f'), True), Column('data', digits('.3f'), True))
        rows = [(name.replace('_', ' '), self.numbers[name], self.numbers[f'{name}_of_data']) for name in names]
        return Table('drawn', columns, rows, f'{title}: pixels of drawn images and of data, beside the split')


@dataclasses.dataclass(frozen=True)
class Drawings:
    """Draws images from noise, the same noise every time, and compares their pixels with those of a split.

    Where the model is given labels images are of each in turn, and of all if `count` is at least their number.

    Attributes:
      cadence: when to run during training.
      split: which split of the task.
      count: images drawn.
      steps: from noise to image.
      eta: how much new noise a step adds, from 0 to 1.
      reuse: what attention keeps between steps, of which most then read few keys; `None`: every step reads all.
      name: the prefix of its numbers.
    """

    cadence: Cadence
    split: str = 'test'
    count: int = 64
    steps: int = 50
    eta: float = 0.0
    reuse: Reuse | None = None
    name: str = 'drawn'

    def __post_init__(self) -> None:
        """Raises `UserError` for no images or steps, and an `eta` out of range."""
        if min(self.count, self.steps) < 1 or not 0 <= self.eta <= 1:
            raise UserError(
                f'Drawings has count {self.count}, steps {self.steps} and eta {self.eta}; it needs at least one image '
                'and step, and eta from 0 to 1'
            )

    def load_data(self, setup: Setup) -> None:
        """Loads the split. Raises `UserError` for a task of another kind."""
        if not isinstance(setup.task, Diffusion):
            raise UserError(f'Drawings draws images of Diffusion; the task is {type(setup.task).__name__}')
        setup.task.data.rows(self.split)

    def evaluate(self, setup: Setup, variables: nnx.State) -> DrawnImages:
        """Returns the images and their statistics."""
        return self.compared(setup, self.drawn(setup, variables))

    def drawn(self, setup: Setup, variables: nnx.State) -> Float[np.ndarray, 'n t c']:
        """Returns the images, pixels in standard deviations from their mean."""
        program = setup.program(_program, self.count, self.steps, self.eta, self.reuse)
        return np.asarray(program(variables, jax.random.key(setup.seed)))

    def compared(self, setup: Setup, found: Float[np.ndarray, 'n t c']) -> DrawnImages:
        """Returns images as pictures, with their statistics."""
        task = setup.task
        assert isinstance(task, Diffusion)
        held_out, trained = (_images(task, split, self.count) for split in (self.split, 'train'))
        kind, size = task.data.kind, side(task.data)
        pixels = (found * kind.deviation + kind.mean).reshape(-1, size, size, kind.channels)
        pictures = as_bytes(pixels, float((held_out * kind.deviation + kind.mean).max()))
        of_data = {f'{name}_of_data': value for name, value in statistics(trained, held_out).items()}
        return DrawnImages(statistics(found, held_out) | of_data, pictures)


def statistics(images: Float[np.ndarray, 'n t c'], others: Float[np.ndarray, 'm t c']) -> dict[str, float]:
    """Returns how far means and standard deviations of every pixel are apart, as roots of mean squares over pixels."""
    apart = {
        'mean_error': images.mean(axis=0) - others.mean(axis=0),
        'deviation_error': images.std(axis=0) - others.std(axis=0),
    }
    return {name: float(np.sqrt(np.mean(difference**2))) for name, difference in apart.items()}


def _images(task: Diffusion, split: str, count: int) -> Float[np.ndarray, 'n t c']:
    """Images all over a split as the model sees them: of training as many as are drawn, of others all to a thousand."""
    rows = task.data.rows(split)
    places = spread(len(rows), min(len(rows), count if split == 'train' else 1_000))
    return np.stack([padded(rows[place], task.data.kind, task.data.kind.length)['tokens'] for place in places])


def _program(
    setup: Setup, count: int, steps: int, eta: float, reuse: Reuse | None
) -> Callable[[nnx.State, Array], Array]:
    """Draws images."""

    def drawn(variables: nnx.State, key: Array) -> Array:
        model = nnx.merge(setup.graphdef, variables)
        assert isinstance(setup.task, Diffusion)
        state = None if reuse is None else begun(reusing(model, reuse), Context.full(count, setup.length))
        return setup.task.drawn(model, key, count=count, steps=steps, eta=eta, state=state).astype(jnp.float32)

    return setup.jit(drawn, out_shardings=setup.whole)
