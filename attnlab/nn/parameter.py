"""Variables of a model: parameters, which are trained, and buffers, which are not."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike
from jaxtyping import Float

from attnlab.errors import UserError
from attnlab.signature import checked_fields

GROUPS = ('matrix', 'embedding', 'vector', 'dynamics')
"""`matrix`: hidden weights. `embedding`: tables indexed by token. `vector`: biases, gains. `dynamics`: what sets the
time scales of a recurrence (decays, step sizes, skips), which needs its own learning rate and no weight decay."""

AXES = ('embed', 'heads', 'mlp', 'vocab', 'state', 'experts', None)
"""Logical axis names: model width, heads times channels, hidden width, vocabulary, state, experts.

`None` is never sharded."""

Initializer = Callable[..., jax.Array]


def starting_at(value: ArrayLike) -> Initializer:
    """Every parameter of the shape of `value` starts as `value`."""
    return lambda key, shape, dtype: jnp.asarray(value, dtype)


def uniform_within(bound: float) -> Initializer:
    """Uniform between minus and plus `bound`."""
    return lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, -bound, bound)


def inverse_softplus(y: Float[jax.Array, '*b']) -> Float[jax.Array, '*b']:
    """The `x` with `log(1 + e^x) = y > 0`, in the form that does not overflow: `x = y + log(1 - e^-y)`."""
    return y + jnp.log(-jnp.expm1(-y))


def check_steps(low: float, high: float) -> None:
    """Raises `UserError` for step sizes, drawn by their logarithm, that do not go from above 0 up."""
    if not 0 < low <= high:
        raise UserError(f'steps from {low} to {high}; they must be above 0, and in order')


def log_uniform(key: jax.Array, shape: Sequence[int], low: float, high: float) -> Float[jax.Array, '...']:
    """Draws from `low` to `high` with the logarithm uniform."""
    return jnp.exp(jax.random.uniform(key, shape, minval=jnp.log(low), maxval=jnp.log(high)))


def param(
    initializer: Initializer, shape: Sequence[int], *, axes: Sequence[str | None], group: str = 'matrix', rngs: nnx.Rngs
) -> nnx.Param:
    """Returns a float32 parameter, annotated with one logical axis name per dimension and an optimiser group.

    Raises ValueError for an unknown axis or group, or when `axes` and `shape` differ in length.
    """
    _check_axes(axes, shape)
    if group not in GROUPS:
        raise ValueError(f'group {group!r} must be one of {GROUPS}')
    return nnx.Param(initializer(rngs.params(), tuple(shape), jnp.float32), axes=tuple(axes), group=group)


class Buffer(nnx.Variable):
    """A variable that is not trained: random features, moving averages, codebooks, calibration results.

    It is part of the train state, saved, restored and placed on devices with the rest, but has no gradient, and
    the optimiser ignores it. What is `drawn` is drawn anew while the model is trained (`attnlab.train.redraw`), what
    is `moving` follows what steps measure (`attnlab.train.moving`).
    """


@checked_fields
@dataclasses.dataclass(frozen=True)
class Drawn:
    """How a buffer is drawn anew: after every `every` steps of training, `draw(key, shape)`.

    Raises `UserError` for fewer than one step.
    """

    every: int
    draw: Callable[[jax.Array, tuple[int, ...]], jax.Array]


@checked_fields
@dataclasses.dataclass(frozen=True)
class Moving:
    """How a buffer, a vector of float32, follows what steps of training measure.

        a_t = decay a_{t-1} + (1 - decay) m_t,   m_t the mean of the measurements of step t

    Its last number counts measurements: it stays one, since every measurement ends in a one
    (`attnlab.functional.measured.measured`).

    Raises `UserError` for a decay outside of [0, 1).
    """

    decay: float

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise UserError(f'decay of Moving is {self.decay}; it must be at least 0 and below 1')


def buffer(
    value: ArrayLike, *, axes: Sequence[str | None], drawn: Drawn | None = None, moving: Moving | None = None
) -> Buffer:
    """Returns a variable that is not trained, of any type, annotated with one logical axis name per dimension.

    Raises ValueError for an unknown axis, or when `axes` and the shape of `value` differ in length.
    """
    value = jnp.asarray(value)
    _check_axes(axes, value.shape)
    changes: dict[str, Any] = {'drawn': drawn, 'moving': moving}
    given = {name: change for name, change in changes.items() if change is not None}
    return Buffer(value, axes=tuple(axes), **given)


def _check_axes(axes: Sequence[str | None], shape: Sequence[int]) -> None:
    if len(axes) != len(shape):
        raise ValueError(f'axes {tuple(axes)} name {len(axes)} dimensions; the shape {tuple(shape)} has {len(shape)}')
    if not set(axes) <= set(AXES):
        raise ValueError(f'axes {tuple(axes)} must be among {AXES}')
