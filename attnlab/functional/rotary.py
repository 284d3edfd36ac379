"""Rotary position embedding: queries and keys rotated by an angle proportional to their position."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from attnlab.errors import UserError
from attnlab.functional.precision import wide_dtype
from attnlab.typing import Positions


def rotary_angles(
    positions: Positions, channels: int, base: float = 10000.0, dtype: DTypeLike = jnp.float32
) -> Float[Array, 'b t r']:
    """Returns `positions * base^(-2 r / channels)` in radians, for the `channels / 2` pairs `r`.

    They are computed in `dtype`, float32 or wider: bfloat16 cannot tell positions apart beyond 256. Raises `UserError`
    for a base that is not positive.
    """
    pairs = jnp.arange(0, channels, 2, dtype=dtype)
    return positions[..., None].astype(dtype) * frequencies(pairs, channels, base)[None, None]


def frequencies(pairs: Float[Array, ' r'], channels: int, base: float) -> Float[Array, ' r']:
    """Returns `base^(-pairs / channels)`. Raises `UserError` for a base that is not positive."""
    if base <= 0:
        raise UserError(f'base is {base}; positions are turned at powers of it, so it must be positive')
    return base ** (-pairs / channels)


def rotate(
    x: Float[Array, 'b t h k'],
    positions: Positions,
    *,
    base: float = 10000.0,
    fraction: float = 1.0,
    interleaved: bool = False,
) -> Float[Array, 'b t h k']:
    """Rotates pairs of channels by position: `(x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)`.

    The first `fraction` of the channels are rotated, the others are unchanged. A pair is `(c, c + n/2)` of the `n`
    rotated ones, or `(2c, 2c + 1)` when `interleaved`: the same up to the order of channels, but not interchangeable
    once trained. The rotation is in float32 or wider, the result in the type of `x`.
    Raises `UserError` when the rotated channels are not an even, positive whole number, and as `rotary_angles` does.
    Su et al. 2021, https://arxiv.org/abs/2104.09864.
    """
    rotated = rotated_channels(x.shape[-1], fraction)
    wide = wide_dtype(x.dtype)
    angles = rotary_angles(positions, rotated, base, wide)[:, :, None, :]
    head = rotate_by_angles(x[..., :rotated], angles, interleaved=interleaved)
    return jnp.concatenate([head, x[..., rotated:]], axis=-1)


def rotate_by_angles(
    x: Float[Array, 'b t h k'], angles: Float[Array, 'b t #h r'], *, interleaved: bool = False
) -> Float[Array, 'b t h k']:
    """Rotates all `k = 2 r` channels by angles in radians, per head or shared by all; pairs as in `rotate`."""
    # The barrier makes XLA compute them once for all heads and layers, instead of inside every product.
    cos, sin = jax.lax.optimization_barrier((jnp.cos(angles), jnp.sin(angles)))
    wide = x.astype(angles.dtype)
    if interleaved:
        first, second = wide[..., 0::2], wide[..., 1::2]
    else:
        first, second = jnp.split(wide, 2, axis=-1)
    pair = (first * cos - second * sin, second * cos + first * sin)
    rotated = jnp.stack(pair, axis=-1).reshape(x.shape) if interleaved else jnp.concatenate(pair, axis=-1)
    return rotated.astype(x.dtype)


def rotated_channels(channels: int, fraction: float) -> int:
    """Returns how many of `channels` are rotated. Raises `UserError` unless that is an even, positive whole number."""
    check_share(fraction)
    rotated = round(channels * fraction, 6)
    if rotated != round(rotated) or round(rotated) % 2 or rotated < 2:
        raise UserError(
            f'a head has {channels} channels, of which rotary positions turn {rotated:g} (fraction {fraction}); '
            f'that must be an even whole number: choose dim, heads or key_dim so'
        )
    return round(rotated)


def check_share(fraction: float) -> None:
    """Raises `UserError` for a share of the channels that is none, or above all."""
    if not 0 < fraction <= 1:
        raise UserError(f'fraction is {fraction}; rotary positions turn a share of the channels above 0, up to 1')
