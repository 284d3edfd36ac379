"""Volumes as tokens: a linear map of every voxel of a grid of three axes, or of some, with positions added."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from attnlab.errors import UserError
from attnlab.models.inputs.inputs import Inputs
from attnlab.nn.positions import GridSinusoids, LearnedPlaces
from attnlab.nn.projections import Linear
from attnlab.typing import Sequence


class Voxels(Inputs):
    """`y_t = x_t W + b + p_t` for the numbers `x_t` of a voxel and the position `p_t` of its place.

    Inputs are voxels, `b t features`, the last axis fastest, `t` the cube of `side`. Blocks see the grid `side side
    side`.

    Raises `UserError` for inputs of other sizes.

    Args:
      vocab: ignored; inputs share one signature.
      dim: model width.
      side: voxels on every axis.
      features: numbers a voxel.
      positions: added to the voxels: `GridSinusoids`, or made as `positions(dim, grid=, rngs=)`; `None`: none are.
      rngs: draws the parameters.
    """

    def __init__(
        self,
        vocab: int,
        dim: int,
        *,
        side: int,
        features: int,
        positions: GridSinusoids | Callable[..., nnx.Module] | None = LearnedPlaces,
        rngs: nnx.Rngs,
    ):
        del vocab
        self.grid = grid = (side, side, side)
        self.side, self.features = side, features
        self.linear = Linear(features, dim, bias=True, axes=(None, 'embed'), rngs=rngs)
        if positions is not None and not isinstance(positions, GridSinusoids):
            positions = positions(dim, grid=grid, rngs=rngs)
        self.positions: Any = positions

    def __call__(self, tokens: Float[Array, 'b t features'], dtype: DTypeLike | None = None) -> Sequence:
        """Maps voxels, giving activations of type `dtype` (`None`: the inputs' own)."""
        if tokens.shape[1:] != (self.side**3, self.features):
            raise UserError(
                f'model.inputs.side is {self.side} and features {self.features}, {self.side**3} voxels; the inputs '
                f'of the task are {tokens.shape[1]} of {tokens.shape[2]} numbers'
            )
        x = self.linear(tokens if dtype is None else tokens.astype(dtype))
        if self.positions is None:
            return x
        here = _table(self.positions, self.side, x.shape[-1])
        return x + jnp.broadcast_to(here.astype(x.dtype), x.shape)


class SomeVoxels(Inputs):
    """`y_t = x_t W + b + p(z_t)` for the numbers `x_t` of some voxels of a volume and their places `z_t`.

    Inputs are voxels, `b t (features + 3)`, which end with their place on every axis, whole numbers from 0 and less
    than `side`. Blocks see no grid, and the segments of the rows, which tell padding apart.

    Raises `UserError` for inputs of other numbers a voxel.

    Args:
      vocab: ignored; inputs share one signature.
      dim: model width.
      side: voxels of the volume on every axis.
      features: numbers a voxel, besides its place.
      positions: added to the voxels: `GridSinusoids`, or made as `positions(dim, grid=, rngs=)`; `None`: none are.
      rngs: draws the parameters.
    """

    def __init__(
        self,
        vocab: int,
        dim: int,
        *,
        side: int,
        features: int,
        positions: GridSinusoids | Callable[..., nnx.Module] | None = LearnedPlaces,
        rngs: nnx.Rngs,
    ):
        del vocab
        self.side, self.features = side, features
        self.linear = Linear(features, dim, bias=True, axes=(None, 'embed'), rngs=rngs)
        if positions is not None and not isinstance(positions, GridSinusoids):
            positions = positions(dim, grid=(side, side, side), rngs=rngs)
        self.positions: Any = positions

    def __call__(self, tokens: Float[Array, 'b t numbers'], dtype: DTypeLike | None = None) -> Sequence:
        """Maps voxels, giving activations of type `dtype` (`None`: the inputs' own)."""
        if tokens.shape[2] != self.features + 3:
            raise UserError(
                f'model.inputs.features is {self.features}, and 3 numbers say where a voxel is; the inputs of the task '
                f'have {tokens.shape[2]} numbers'
            )
        x, places = tokens[..., : self.features], jnp.round(tokens[..., self.features :]).astype(jnp.int32)
        x = self.linear(x if dtype is None else x.astype(dtype))
        if self.positions is None:
            return x
        numbers = (places[..., 0] * self.side + places[..., 1]) * self.side + places[..., 2]
        return x + _table(self.positions, self.side, x.shape[-1])[numbers].astype(x.dtype)


def _table(positions: Any, side: int, dim: int) -> Float[Array, 'n d']:
    """The positions of all voxels."""
    return positions.encode((side,) * 3, dim) if isinstance(positions, GridSinusoids) else positions()
