"""Numbers written out as characters, inside a program."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

BYTES = 256
"""Characters, by the bytes of their encoding."""

LARGEST = 999
"""Hundredths that are written at most; what is larger is written so."""


def written(x: Float[Array, '*b']) -> Int[Array, '*b 5']:
    """Numbers to two places with their sign, as bytes: `+1.25`. Those beyond 9.99 are as that; NaN is `  nan`."""
    hundredths = jnp.clip(jnp.round(jnp.abs(x.astype(jnp.float32)) * 100), 0, LARGEST).astype(jnp.int32)
    signs = jnp.where((x < 0) & (hundredths > 0), ord('-'), ord('+'))
    digits = [ord('0') + hundredths // ten % 10 for ten in (100, 10, 1)]
    points = jnp.full_like(signs, ord('.'))
    found = jnp.stack([signs, digits[0], points, *digits[1:]], axis=-1)
    return jnp.where(jnp.isnan(x)[..., None], jnp.asarray(list(b'  nan'), found.dtype), found)


def written_statistics(segments: Float[Array, '*b s']) -> Int[Array, '*b c']:
    """`mean +0.12 deviation +0.98 change -0.31` of every segment, the last less the first, as bytes."""
    numbers = {
        'mean ': jnp.mean(segments, axis=-1),
        ' deviation ': jnp.std(segments, axis=-1),
        ' change ': segments[..., -1] - segments[..., 0],
    }
    parts = []
    for name, number in numbers.items():
        letters = jnp.asarray(list(name.encode()), jnp.int32)
        parts += [jnp.broadcast_to(letters, (*number.shape, len(name))), written(number)]
    return jnp.concatenate(parts, axis=-1)
