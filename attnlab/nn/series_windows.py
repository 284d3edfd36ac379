"""What is done to a window of a time series before it is mapped: normalisation by its own level, decomposition."""

import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float

from attnlab.errors import UserError
from attnlab.module import Module
from attnlab.nn.parameter import param
from attnlab.signature import checked_fields

Window = Float[Array, 'b t v']


@checked_fields
@dataclasses.dataclass(frozen=True)
class Covariates:
    """The columns of a window after those that are forecast.

    Attributes:
      observed: how many are known in the look-back alone; they are normalised as the forecast columns are.
      known: how many are there over the horizon too, of which windows then have the rows; they stay as they are.
      ahead: whether these are read over the horizon; else they are in the look-back alone.
    """

    observed: int = 0
    known: int = 0
    ahead: bool = True

    @property
    def count(self) -> int:
        """The number of all these columns."""
        return self.observed + self.known

    def rows(self, horizon: int) -> int:
        """How many rows of the horizon a window has."""
        return horizon if self.known else 0

    def read_ahead(self, horizon: int) -> int:
        """Numbers of the horizon that are read."""
        return horizon * self.known if self.ahead else 0


NO_COVARIATES = Covariates()
"""No covariates."""


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

    Kim et al. 2022, "Reversible instance normalization", https://openreview.net/forum?id=cGDAkQo1C0p; `WindowGain` is
    its learned gain and bias. Raises `UserError` for an `eps` that is not above 0: a window may stand still.
    """

    eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.eps <= 0:
            raise UserError(f'eps of InstanceNorm is {self.eps}; it must be above 0, for windows that stand still')

    def statistics(self, window: Any) -> tuple[Any, Any]:
        """Level and scale of every variate, `b 1 v`; arrays of jax or numpy."""
        level = window.mean(axis=1, keepdims=True)
        return level, (((window - level) ** 2).mean(axis=1, keepdims=True) + self.eps) ** 0.5


WindowNorm = LastValue | InstanceNorm
SMALLEST = 1e-10
"""Added to a gain before it is divided by, as in the released code."""


class WindowGain(Module):
    """A learned gain and bias of every variate of a normalised window, undone in the forecasts.

        z = g (x - level) / scale + b,   y = (head(z) - b) / g * scale + level

    At the start neither has an effect: `g = 1`, `b = 0`. Kim et al. 2022, https://openreview.net/forum?id=cGDAkQo1C0p.
    """

    def __init__(self, variates: int, *, rngs: nnx.Rngs):
        self.gain = param(nnx.initializers.ones, (variates,), axes=(None,), group='vector', rngs=rngs)
        self.bias = param(nnx.initializers.zeros, (variates,), axes=(None,), group='vector', rngs=rngs)

    def __call__(self, window: Window, level: Any, scale: Any) -> tuple[Window, Any, Any]:
        """The window with gain and bias, and the level and scale, `b 1 v`, that take them off a forecast."""
        gain, bias = (one[...].astype(window.dtype).reshape(1, 1, -1) for one in (self.gain, self.bias))
        scale = scale / jnp.broadcast_to(gain + SMALLEST, scale.shape)
        window = window * jnp.broadcast_to(gain, window.shape) + jnp.broadcast_to(bias, window.shape)
        return window, level - scale * jnp.broadcast_to(bias, scale.shape), scale


@runtime_checkable
class Basis(Protocol):
    """Orthogonal directions of windows."""

    def rows(self, steps: int) -> Float[np.ndarray, 'n n']:
        """The directions of windows of `steps` steps, a row each."""


def level_and_scale(norm: WindowNorm | None, window: Any) -> tuple[Any, Any]:
    """The statistics of a norm; `None`: level 0 and scale 1."""
    if norm is not None:
        return norm.statistics(window)
    level = window[:, -1:] * 0
    return level, level + 1


@checked_fields
@dataclasses.dataclass(frozen=True)
class Trend:
    """Divides a window into a trend, its mean over `width` steps, and the rest; beyond the ends the end is repeated.

    Zeng et al. 2023, https://arxiv.org/abs/2205.13504 (DLinear). Raises `UserError` for an even width.
    """

    width: int = 25

    def __post_init__(self) -> None:
        if self.width < 1 or self.width % 2 == 0:
            raise UserError(f'width of Trend is {self.width}; it must be odd and at least 1')

    def divide(self, window: Window) -> tuple[Window, Window]:
        """The rest, and the trend; they add up to the window."""
        side = self.width // 2
        padded = jnp.concatenate([window[:, :1]] * side + [window] + [window[:, -1:]] * side, axis=1)
        sums = jax.lax.reduce_window(padded, 0.0, jax.lax.add, (1, self.width, 1), (1, 1, 1), 'valid')
        trend = sums / self.width
        return window - trend, trend
