"""Parameters, with the two things the trainer wants to know of each: its logical axes and its optimiser group."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx

GROUPS = ('matrix', 'embedding', 'vector', 'dynamics')
"""`matrix`: hidden weights. `embedding`: tables indexed by token. `vector`: biases, gains. `dynamics`: what sets the
time scales of a recurrence (decays, step sizes, skips), which wants its own learning rate and no weight decay."""

AXES = ('embed', 'heads', 'mlp', 'vocab', 'state', None)
"""Logical axis names: model width, heads times channels, hidden width, vocabulary, state; `None` is never sharded."""

Initializer = Callable[..., jax.Array]


def param(
    initializer: Initializer, shape: Sequence[int], *, axes: Sequence[str | None], group: str = 'matrix', rngs: nnx.Rngs
) -> nnx.Param:
    """Returns a float32 parameter, annotated with one logical axis name per dimension and an optimiser group.

    Raises ValueError for an unknown axis or group, or when `axes` and `shape` differ in length.
    """
    if len(axes) != len(shape):
        raise ValueError(f'axes {tuple(axes)} name {len(axes)} dimensions; the shape {tuple(shape)} has {len(shape)}')
    if group not in GROUPS or not set(axes) <= set(AXES):
        raise ValueError(f'group {group!r} must be one of {GROUPS}, and axes {tuple(axes)} among {AXES}')
    return nnx.Param(initializer(rngs.params(), tuple(shape), jnp.float32), axes=tuple(axes), group=group)
