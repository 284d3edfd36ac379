"""The portable form of `long_conv`.

A kernel of few taps takes a sum of shifted rows, tokens of other documents set to zero before the product. With others
a row of one document is one product with a Toeplitz matrix, or, beyond `tiling.TOEPLITZ` tokens, one of Fourier
transforms over twice its length, so that its end does not wrap around to its beginning. Rounding there spreads over the
row: an output is exact to a fraction of the largest one, and carries noise of that size from later tokens.

A row of several documents is halved again and again. What the left half of a block gives to its right half concerns one
document alone, the one that both hold where they meet: tokens of others are set to zero before and after the product,
exactly. Every output is thus the sum of products with earlier tokens of its document, and of nothing else.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import precision, tiling
from pallas_kernels.long_conv.vjp import recomputed


def _forward(x: jax.Array, kernel: jax.Array, runs: jax.Array | None) -> jax.Array:
    t = x.shape[1]
    if x.size == 0:
        return x
    if kernel.shape[0] <= tiling.SHIFTS and t > tiling.TOEPLITZ:
        return _shifted(x, kernel, runs)
    kernel = _taps(kernel, t)
    if runs is not None:
        return _halved(x, kernel, runs)
    if t <= tiling.TOEPLITZ:
        return jnp.einsum('bsd,tsd->btd', x, _toeplitz(kernel, 0, t), precision='highest')
    return _product_of_transforms(x, kernel, 1 << (2 * t - 1).bit_length())[:, :t]


_differentiable = recomputed(_forward)


def long_conv(x: jax.Array, kernel: jax.Array, runs: jax.Array | None) -> jax.Array:
    """See `reference.long_conv`."""
    x, kernel = (array.astype(precision.accumulator(x, kernel)) for array in (x, kernel))
    return _differentiable(x, kernel, runs)


def _shifted(x: jax.Array, kernel: jax.Array, runs: jax.Array | None) -> jax.Array:
    """The convolution with few taps, fewer than tokens: a product with the whole row for each."""
    y = kernel[:1][None] * x
    for lag in range(1, kernel.shape[0]):
        then = jnp.pad(x[:, :-lag], ((0, 0), (lag, 0), (0, 0)))
        if runs is not None:
            # Runs are numbered from 0, and padding belongs to none.
            met = jnp.pad(runs[:, :-lag], ((0, 0), (lag, 0)), constant_values=-1) == runs
            then = jnp.where(met[..., None], then, 0)
        y += kernel[lag : lag + 1][None] * then
    return y


def _halved(x: jax.Array, kernel: jax.Array, runs: jax.Array) -> jax.Array:
    """The convolution within runs, by blocks of 2, 4, 8 ... tokens."""
    batch, t, channels = x.shape
    y = kernel[:1][None] * x
    half = 1
    while half < t:
        size = 2 * half
        behind = (0, 0), (0, -t % size)
        # Runs are numbered from 0, and padding belongs to none.
        blocks = jnp.pad(runs, behind, constant_values=-1).reshape(batch, -1, size)
        met = blocks[:, :, half - 1 : half]
        inside = (blocks == met)[..., None]
        padded = jnp.pad(x, (*behind, (0, 0))).reshape(batch, -1, size, channels)
        left = jnp.where(inside, padded, 0)[:, :, :half]
        right = jnp.where(inside[:, :, half:], _across(left, _taps(kernel, size)), 0)
        given = jnp.pad(right, ((0, 0), (0, 0), (half, 0), (0, 0))).reshape(batch, -1, channels)
        y, half = y + given[:, :t], size
    return y


def _across(left: jax.Array, kernel: jax.Array) -> jax.Array:
    """What the left halves of blocks, `b l c d`, give to the right ones, with as many taps as a block has tokens."""
    half = left.shape[2]
    if half <= tiling.TOEPLITZ:
        return jnp.einsum('blsd,tsd->bltd', left, _toeplitz(kernel, half, half), precision='highest')
    batch, count, _, channels = left.shape
    blocks = left.reshape(batch * count, half, channels)
    # Over the length of a block: what wraps around falls on the left half.
    product = _product_of_transforms(blocks, kernel, 2 * half)
    return product[:, half:].reshape(batch, count, half, channels)


def _product_of_transforms(x: jax.Array, kernel: jax.Array, length: int) -> jax.Array:
    """The cyclic convolution over `length` steps, `b length d`."""
    spectrum = jnp.fft.rfft(x, length, axis=1) * jnp.fft.rfft(kernel, length, axis=0)[None]
    return jnp.fft.irfft(spectrum, length, axis=1)


def _toeplitz(kernel: jax.Array, ahead: int, size: int) -> jax.Array:
    """What token s gives to token `t + ahead`, `t s d`: the tap of their distance, zero for later tokens."""
    # The taps of distance `ahead` down to `ahead + 1 - size`, and from there up to `ahead + size`, again and again: a
    # line that is one shorter begins a token earlier each time. Nothing is gathered, whose gradient would be scattered.
    nearer = jnp.pad(kernel[max(0, ahead + 1 - size) : ahead + 1][::-1], ((0, max(0, size - ahead - 1)), (0, 0)))
    line = jnp.concatenate([nearer, _taps(kernel[ahead + 1 :], size)[::-1]])
    lines = jnp.broadcast_to(line[None], (size, *line.shape)).reshape(-1, kernel.shape[1])
    return lines[: size * (2 * size - 1)].reshape(size, 2 * size - 1, -1)[:, :size]


def _taps(kernel: jax.Array, count: int) -> jax.Array:
    """The first `count` taps, zero beyond the last."""
    return jnp.pad(kernel[:count], ((0, max(0, count - kernel.shape[0])), (0, 0)))
