"""Every random number of a run is a pure function of (seed, step, purpose)."""

import zlib

import jax

from attnlab.typing import DropoutKey

SEEDS = 2**32
"""How many seeds there are, from 0."""


def key_for(seed: int | jax.Array, step: int | jax.Array, purpose: str) -> DropoutKey:
    """Returns the key of `purpose` (such as 'init' or 'dropout') at `step` of the run seeded with `seed`.

    Purposes are told apart by the CRC-32 of their name, which is the same on every machine and Python version.
    """
    key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(purpose.encode()))
    return jax.random.fold_in(key, step)
