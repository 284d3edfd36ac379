"""What is done to a window of a time series before it is mapped: normalisation by its own level, decomposition."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from attnlab.errors import UserError
from attnlab.signature import checked_fields

Window = Float[Array, 'b t v']


@checked_fields
@dataclasses.dataclass(frozen=True)
class LastValue:
    """The level of a window is its last value, its scale is 1: a map of the rest follows every shift of the level.

    Zeng et al. 2023, https://arxiv.org/abs/2205.13504 (NLinear).
    """

    def statistics(self, window: Any) -> tuple[Any, Any]:
        """Level and scale of every variate, `b 1 v`; arrays of jax or numpy."""
        level = window[:, -1:]
        return level, level * 0 + 1


@checked_fields
@dataclasses.dataclass(frozen=True)
class InstanceNorm:
    """The level of a window is its mean, its scale `sqrt(var + eps)` with the variance of the population.

    Kim et al. 2022, "Reversible instance normalization", https://openreview.net/forum?id=cGDAkQo1C0p, without learned
    gain and bias.
    """

    eps: float = 1e-5

    def statistics(self, window: Any) -> tuple[Any, Any]:
        """Level and scale of every variate, `b 1 v`; arrays of jax or numpy."""
        level = window.mean(axis=1, keepdims=True)
        return level, (((window - level) ** 2).mean(axis=1, keepdims=True) + self.eps) ** 0.5


WindowNorm = LastValue | InstanceNorm


def level_and_scale(norm: WindowNorm | None, window: Any) -> tuple[Any, Any]:
    """The statistics of a norm; `None`: level 0 and scale 1."""
    if norm is not None:
        return norm.statistics(window)
    level = window[:, -1:] * 0
    return level, level + 1


@checked_fields
@dataclasses.dataclass(frozen=True)
class MovingAverage:
    """Divides a window into a trend, its mean over `width` steps, and the rest; beyond the ends the end is repeated.

    Zeng et al. 2023, https://arxiv.org/abs/2205.13504 (DLinear). Raises `UserError` for an even width.
    """

    width: int = 25

    def __post_init__(self) -> None:
        if self.width < 1 or self.width % 2 == 0:
            raise UserError(f'width of MovingAverage is {self.width}; it must be odd and at least 1')

    def divide(self, window: Window) -> tuple[Window, Window]:
        """The rest, and the trend; they add up to the window."""
        side = self.width // 2
        padded = jnp.concatenate([window[:, :1]] * side + [window] + [window[:, -1:]] * side, axis=1)
        sums = jax.lax.reduce_window(padded, 0.0, jax.lax.add, (1, self.width, 1), (1, 1, 1), 'valid')
        trend = sums / self.width
        return window - trend, trend
