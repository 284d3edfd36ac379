"""Denoising diffusion of images: noise is predicted from noisy images, and images are drawn from noise."""

import dataclasses
import math
import zlib
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float, Int

from attnlab.context import Context
from attnlab.data.long_range.dataset import Example
from attnlab.data.long_range.rows import padded
from attnlab.data.pipeline import Row, Source, spread
from attnlab.data.vision.augment import Augmented
from attnlab.errors import UserError
from attnlab.metrics import Average
from attnlab.models.predictor import Predictor
from attnlab.signature import checked_fields
from attnlab.tasks.images import ImageTask, side
from attnlab.tasks.task import Batch, Slice, context
from attnlab.tasks.trivial import sampled_rows
from attnlab.typing import DropoutKey, State

LAST = 0.995
"""The latest time: at 1 there would be nothing left of the image."""

MEASURED = 1_000
"""The most training images that tell the range of pixels where the data do not."""


@checked_fields
@dataclasses.dataclass(frozen=True)
class CosineSchedule:
    """How much of an image and of noise there is at time `t` from 0 to 1: `x_t = a x + b e`, `a^2 + b^2 = 1`.

        a = cos(pi/2 (t + s) / (1 + s)) / cos(pi/2 s / (1 + s))

    Nichol and Dhariwal 2021, https://arxiv.org/abs/2102.09672.

    Raises `UserError` for a negative offset.

    Attributes:
      offset: `s`.
    """

    offset: float = 0.008

    def __post_init__(self) -> None:
        if self.offset < 0:
            raise UserError(f'offset of CosineSchedule is {self.offset}; it must be at least 0')

    def levels(self, t: Any, xp: Any = jnp) -> tuple[Any, Any]:
        """Returns `a` and `b`, with the functions of `xp`, jax.numpy or numpy."""
        a = xp.cos(math.pi / 2 * (t + self.offset) / (1 + self.offset))
        a = a / math.cos(math.pi / 2 * self.offset / (1 + self.offset))
        return a, xp.sqrt(xp.maximum(1 - a * a, 0))


@dataclasses.dataclass(frozen=True)
class Noised:
    """Noisy rows of images: by index with the noise of the image, and drawn anew where training reads them (`Varied`).

    Attributes:
      images: the images, changed as the task augments them.
      task: makes the rows.
    """

    images: Augmented
    task: 'Diffusion'

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Row:
        return self.images[index]

    def varied(self, index: int, rng: np.random.Generator) -> Row:
        """The row of image `index` with time and noise drawn from `rng`."""
        return self.task.noisy(self.images.changed(index, rng), rng)


@dataclasses.dataclass(frozen=True)
class Diffusion(ImageTask):
    """Predict the noise of noisy images, or a mixture of noise and image, for every patch.

    A row has one time `t`, uniform from 0 to `LAST`, and noise `e` of standard normal numbers; its tokens are the
    pixels of `a x + b e` and `cos(pi k t)`, `k` from 1 to `features`, which tell the time. Targets are `e`, or for `v`
    `a e - b x` (Salimans and Ho 2022, https://arxiv.org/abs/2202.00512). Given the label, tokens end with it as one-hot
    numbers, and images are drawn of a label that is asked for. The loss is the mean squared error. Rows that
    are evaluated have the time and noise that belong to their image. Ho et al. 2020, https://arxiv.org/abs/2006.11239.

    Attributes:
      predicts: 'epsilon', the noise, or 'v'.
      patch: height and width of a patch, that of the inputs.
      features: numbers that tell the time.
      schedule: of noise.
      given: 'nothing', or 'label', that of the image.
    """

    labels: ClassVar[str] = 'targets'

    predicts: Literal['epsilon', 'v'] = 'epsilon'
    patch: int = 1
    features: int = 8
    schedule: CosineSchedule = CosineSchedule()
    given: Literal['nothing', 'label'] = 'nothing'

    def __post_init__(self) -> None:
        if self.given not in ('nothing', 'label'):
            raise UserError(f'given of Diffusion is {self.given!r}; it must be nothing or label')
        if self.given == 'label' and self.data.kind.dense:
            raise UserError(
                'given of Diffusion is label; the data have a class for every pixel and no label of an image: it must '
                'be nothing'
            )
        if self.predicts not in ('epsilon', 'v'):
            raise UserError(f'predicts of Diffusion is {self.predicts!r}; it must be epsilon or v')
        if self.patch < 1 or side(self.data) % self.patch:
            raise UserError(f'patch of Diffusion is {self.patch}; it must divide {side(self.data)} pixels')
        if self.features < 1:
            raise UserError(f'features of Diffusion is {self.features}; without any the time is not told')
        if self.augmentation is not None and self.augmentation.mixing:
            raise UserError('augmentation of Diffusion mixes images, which would be drawn as mixtures; crop and flip')

    @property
    def vocab(self) -> int:
        """Numbers that are predicted for a patch."""
        return self.patch**2 * self.data.kind.channels

    @property
    def told(self) -> int:
        """Numbers that a token has besides those of its pixel."""
        return self.features + (self.data.kind.classes if self.given == 'label' else 0)

    @property
    def bounds(self) -> tuple[float, float]:
        """The lowest and the highest number of a pixel, as the model sees them: of the data, or of training images."""
        kind = self.data.kind
        if kind.highest is not None:
            return (0 - kind.mean) / kind.deviation, (kind.highest - kind.mean) / kind.deviation
        rows = self.data.rows('train')
        places = spread(len(rows), min(len(rows), MEASURED))
        seen = [padded(rows[place], kind, kind.length)['tokens'] for place in places]
        return float(np.min(seen)), float(np.max(seen))

    def asked(self, count: int) -> Int[np.ndarray, 'b'] | None:
        """The labels of `count` drawn images, one after the other in turn; `None` where no label is given."""
        return None if self.given == 'nothing' else np.arange(count, dtype=np.int32) % self.data.kind.classes

    def source(self, split: str, length: int, tokens: int | None = None) -> Source:
        """The examples of a split, those for training with time and noise drawn anew."""
        if split != 'train' or tokens is not None:
            return super().source(split, length, tokens)
        self._document_length(length)
        return Noised(Augmented(self.data.rows(split), self.row, side(self.data), self.augmentation), self)

    def row(self, example: Example) -> Row:
        """The row of an image with time and noise of its own, the same every time."""
        own = zlib.crc32(np.ascontiguousarray(example['x']).tobytes())
        return self.noisy(example, np.random.default_rng(own))

    def noisy(self, example: Example, rng: np.random.Generator) -> Row:
        """The row of an image with time and noise drawn from `rng`."""
        row = padded(example, self.data.kind, self.data.kind.length)
        image, t = row['tokens'], rng.uniform(0, LAST)
        noise = rng.standard_normal(image.shape, np.float32)
        a, b = (np.float32(level) for level in self.schedule.levels(t, np))
        told = np.cos(math.pi * t * np.arange(1, self.features + 1)).astype(np.float32)
        if self.given == 'label':
            told = np.concatenate([told, np.eye(self.data.kind.classes, dtype=np.float32)[int(row['label'])]])
        tokens = np.concatenate([a * image + b * noise, np.tile(told, (len(image), 1))], axis=1)
        targets = _patched(noise if self.predicts == 'epsilon' else a * noise - b * image, side(self.data), self.patch)
        kept = {name: value for name, value in row.items() if name != 'label'}
        return kept | {'tokens': tokens, 'targets': targets, 'weights': np.ones(len(targets), np.float32)}

    def measure(self, model: Predictor, batch: Batch, dropout_key: DropoutKey | None) -> dict[str, Average]:
        """The mean squared error."""
        hidden, _ = model.hidden(batch['tokens'], context(batch, dropout_key))
        if hidden.shape[1] != batch['targets'].shape[1]:
            raise UserError(
                f'patch of Diffusion is {self.patch}, {batch["targets"].shape[1]} patches an image; the model has '
                f'{hidden.shape[1]} hidden states: the inputs need the same patch and no class token'
            )
        return {'loss': Average.of(model.losses(hidden, batch['targets'], dropout_key), batch['weights'])}

    def trivial(self, part: Slice) -> dict[str, dict[str, float]]:
        """What the prediction of zeros reaches."""
        return {'loss': {'zero': float(np.mean([np.mean(row['targets'] ** 2) for row in sampled_rows(part.source)]))}}

    def drawn(
        self, model: Predictor, key: Array, *, count: int, steps: int, eta: float = 0.0, state: State | None = None
    ) -> Float[Array, 'b t c']:
        """Draws images from noise, pixels in standard deviations from their mean, in `steps` steps.

        From the prediction at time `t` come estimates `x` of the image, within `bounds`, and `e` of the noise; for the
        time `s` before, `x_s = a_s x + sqrt(b_s^2 - d^2) e + d z`, `d = eta (b_s / b_t) sqrt(1 - a_t^2 / a_s^2)`, `z`
        standard normal: without new noise for `eta` 0, as ancestral sampling for 1. Song et al. 2021,
        https://arxiv.org/abs/2010.02502. Given labels, images are of those that `asked` names. A state of the model's
        layers goes from every step to the next (`attnlab.models.reusing`).
        """
        labels, bounds = self.asked(count), self.bounds
        size, channels = side(self.data), self.data.kind.channels
        ctx = Context.full(count, size**2)
        first, *keys = jax.random.split(key, steps + 1)
        times = jnp.linspace(LAST, 0.0, steps + 1)

        def step(carry: tuple[Array, State | None], at: tuple[Array, Array, Array]) -> tuple[Any, None]:
            (x, state), (t, s, key) = carry, at
            told = jnp.cos(math.pi * t * jnp.arange(1, self.features + 1, dtype=x.dtype))
            tokens = [x, jnp.broadcast_to(told, (*x.shape[:2], self.features))]
            if labels is not None:
                of_label = jax.nn.one_hot(labels, self.data.kind.classes, dtype=x.dtype)
                tokens.append(jnp.broadcast_to(of_label[:, None], (*x.shape[:2], of_label.shape[1])))
            hidden, state = model.hidden(jnp.concatenate(tokens, axis=-1), ctx, state)
            found = _joined(model.logits(hidden), size, self.patch, channels)
            (a, b), (a_s, b_s) = self.schedule.levels(t), self.schedule.levels(s)
            image = (x - b * found) / a if self.predicts == 'epsilon' else a * x - b * found
            image = jnp.clip(image, *bounds)
            noise = (x - a * image) / b
            fresh = eta * b_s / b * jnp.sqrt(jnp.maximum(1 - (a / a_s) ** 2, 0))
            x = a_s * image + jnp.sqrt(jnp.maximum(b_s**2 - fresh**2, 0)) * noise
            return (x + fresh * jax.random.normal(key, x.shape, x.dtype), state), None

        start = jax.random.normal(first, (count, size**2, channels))
        (drawn, _), _ = jax.lax.scan(step, (start, state), (times[:-1], times[1:], jnp.stack(keys)))
        return drawn


def _patched(x: Any, size: int, patch: int) -> Any:
    """Numbers of pixels, `t c`, as numbers of patches, `n (patch patch c)`."""
    places = x.reshape(size // patch, patch, size // patch, patch, -1).swapaxes(1, 2)
    return places.reshape((size // patch) ** 2, -1)


def _joined(x: Float[Array, 'b n f'], size: int, patch: int, channels: int) -> Float[Array, 'b t c']:
    """The inverse of `_patched`, for every row."""
    places = x.reshape(x.shape[0], size // patch, size // patch, patch, patch, channels)
    return places.swapaxes(2, 3).reshape(x.shape[0], size**2, channels)
