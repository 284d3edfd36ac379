"""Position encodings, inside attention or added to the inputs; `None` in their place means none.

Without one a causal mask alone still tells positions apart: Kazemnejad et al. 2023, https://arxiv.org/abs/2305.19466.
"""

import dataclasses
import math
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jaxtyping import Float

from attnlab.errors import UserError
from attnlab.functional.grids import Grid, axial_angles, resampled
from attnlab.functional.precision import wide_dtype
from attnlab.functional.rotary import frequencies, rotary_angles, rotate, rotate_by_angles
from attnlab.module import Module
from attnlab.nn.parameter import param
from attnlab.signature import checked_fields
from attnlab.typing import Positions


@checked_fields
@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary embedding of the first `fraction` of the channels; see `attnlab.functional.rotary.rotate`."""

    base: float = 10000.0
    fraction: float = 1.0
    interleaved: bool = False

    def rotate(self, x: Float[Array, 'b t h k'], positions: Positions) -> Float[Array, 'b t h k']:
        """Rotates queries or keys by their position inside the document."""
        return rotate(x, positions, base=self.base, fraction=self.fraction, interleaved=self.interleaved)


@checked_fields
@dataclasses.dataclass(frozen=True)
class NeighbourRope:
    """Rotary embedding of neighbours, `n` pairs at frequencies `base^(-r / (n - 1))`, from 1 to 1 over the base.

    With several `parts` each has `n` pairs of its own, so that channels that are positive and negative parts of others
    turn alike. So RetNet has it in its released code (Sun et al. 2023, https://arxiv.org/abs/2307.08621), and on two
    axes NaLaFormer, with two parts (Meng et al. 2025, https://arxiv.org/abs/2506.21137).
    """

    base: float = 10000.0
    parts: int = 1

    def rotate(self, x: Float[Array, 'b t h m'], positions: Positions) -> Float[Array, 'b t h m']:
        """Rotates by the position inside the document.

        Raises `UserError` unless parts have an even number and the base is positive.
        """
        if x.shape[-1] % (2 * self.parts):
            raise UserError(
                f'NeighbourRope rotates pairs in each of {self.parts} parts of {x.shape[-1]} channels; '
                f'{2 * self.parts} must divide them'
            )
        wide = wide_dtype(x.dtype)
        speeds = frequencies(jnp.linspace(0, 1, x.shape[-1] // (2 * self.parts), dtype=wide), 1, self.base)
        angles = positions[..., None, None].astype(wide) * jnp.tile(speeds, self.parts)[None, None, None]
        return rotate_by_angles(x, angles, interleaved=True)


@checked_fields
@dataclasses.dataclass(frozen=True)
class Alibi:
    """A score penalty linear in distance, `s_ij - m_h |i - j|`, the slope `m_h` fixed for every head.

    Press, Smith and Lewis 2022, https://arxiv.org/abs/2108.12409.
    """

    def slopes(self, heads: int) -> Float[np.ndarray, 'h']:
        """Returns the slopes: `2^(-8 h / heads)`, `h` from 1, when `heads` is a power of two.

        Otherwise the slopes of the next lower power of two, then every other one of those of the power above.
        """
        lower = 1 << (heads.bit_length() - 1)
        between = _geometric(2 * lower)[::2][: heads - lower]
        return np.concatenate([_geometric(lower), between])


@checked_fields
@dataclasses.dataclass(frozen=True)
class Sinusoidal:
    """Sinusoids added to the inputs, `p_t = [sin(t w), cos(t w)]`, `w_r = base^(-2 r / dim)`, for position `t`.

    For mixers that cannot distinguish directions by themselves. The paper interleaves sines and cosines.
    Vaswani et al. 2017, https://arxiv.org/abs/1706.03762.
    """

    base: float = 10000.0

    def encode(self, positions: Positions, dim: int) -> Float[Array, 'b t d']:
        """Returns the sinusoids, in float32. Raises `UserError` for an odd `dim`."""
        if dim % 2:
            raise UserError(f'sinusoidal positions need an even width; got {dim}')
        angles = rotary_angles(positions, dim, self.base)
        return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


@checked_fields
@dataclasses.dataclass(frozen=True)
class GridRope:
    """Rotary embedding by the place on a grid: an equal part of the channels is rotated by the place on every axis.

    The base is that of the paper for images. With a `span` places of every grid are scaled to those of `span` places an
    axis (position interpolation: Chen et al. 2023, https://arxiv.org/abs/2306.15595). Heo et al. 2024,
    https://arxiv.org/abs/2403.13298.
    """

    base: float = 100.0
    span: int | None = None

    def rotate(self, x: Float[Array, 'b t h k'], grid: Grid) -> Float[Array, 'b t h k']:
        """Rotates queries or keys. Raises `UserError` unless `k` is a multiple of twice the axes."""
        wide = wide_dtype(x.dtype)
        angles = axial_angles(grid, x.shape[-1], self.base, wide, span=self.span)[None, :, None]
        return rotate_by_angles(x, jnp.broadcast_to(angles, (x.shape[0], *angles.shape[1:])))


@checked_fields
@dataclasses.dataclass(frozen=True)
class GridSinusoids:
    """Sinusoids of the place on every axis, `[sin(p w), cos(p w)]`, `w_i = base^(-2 i / n)`, `n` channels an axis.

    The channels are divided among the axes; all sines stand before all cosines. For images as in the released code of
    He et al. 2022, https://arxiv.org/abs/2111.06377, up to the order of channels. `span` is that of `GridRope`.
    """

    base: float = 10000.0
    span: int | None = None

    def encode(self, grid: Grid, dim: int) -> Float[Array, 't d']:
        """Returns the sinusoids, in float32. Raises `UserError` unless `dim` is a multiple of twice the axes."""
        angles = axial_angles(grid, dim, self.base, jnp.float32, span=self.span)
        return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)

    def resample(self, grid: Grid, to: Grid) -> None:
        """Does nothing: every grid has its sinusoids."""
        del grid, to


@runtime_checkable
class OnGrid(Protocol):
    """Positions that are added to what lies on a grid."""

    def encode(self, grid: Grid, dim: int) -> Float[Array, 't d']:
        """Returns a vector for every place."""

    def resample(self, grid: Grid, to: Grid) -> None:
        """Takes the places of `to` from now on where it took those of `grid`."""


class LearnedPlaces(Module):
    """A learned vector for every place of a grid, initial standard deviation 0.02.

    Dosovitskiy et al. 2021, https://arxiv.org/abs/2010.11929.
    """

    def __init__(self, dim: int, *, grid: Grid, rngs: nnx.Rngs):
        normal = nnx.initializers.normal(0.02)
        self.weight: Any = param(normal, (math.prod(grid), dim), axes=(None, 'embed'), group='embedding', rngs=rngs)

    def __call__(self) -> Float[Array, 't d']:
        """The vectors of all places."""
        return self.weight[...]

    def encode(self, grid: Grid, dim: int) -> Float[Array, 't d']:
        """Returns the vectors of all places that it has; whether these are those of `grid` is not asked."""
        del grid, dim
        return self()

    def resample(self, grid: Grid, to: Grid) -> None:
        """Has vectors for the places of another grid, interpolated between those of `grid`; see `resampling`.

        Raises `UserError` where there are not as many vectors as `grid` has places.
        """
        if self.weight.shape[0] != math.prod(grid):
            raise UserError(f'LearnedPlaces has {self.weight.shape[0]} vectors; a grid of {tuple(grid)} has others')
        # A product with constant weights, so that the shapes of a model can be asked without its numbers.
        rows = jnp.asarray(resampled(np.eye(math.prod(grid)), grid, to), self.weight.dtype)
        self.weight = self.weight.replace(jnp.matmul(rows, self.weight[...], precision='highest'))


def _geometric(heads: int) -> Float[np.ndarray, 'h']:
    return 2.0 ** (-8.0 * np.arange(1, heads + 1) / heads)
