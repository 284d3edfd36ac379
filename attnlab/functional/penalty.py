"""Terms of the loss that are computed inside a layer."""

import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Shaped

from attnlab.errors import UserError
from attnlab.functional.reach import Reach
from attnlab.typing import Keys, Queries, Segments
from pallas_kernels import WeightMap


def penalised(
    y: Float[Array, '*b'],
    penalty: Float[Array, ''],
    tokens: int | Shaped[Array, ''],
    labels: Float[Array, ''] | None = None,
) -> Float[Array, '*b']:
    """Returns `y`; differentiation adds the gradient of `penalty labels / tokens`, whatever is computed from `y`.

    Training thus minimises the loss plus the mean of the penalty, while the reported loss is that of the task alone.
    `penalty` is a sum over so many `tokens`, as many as the layer has. The loss is a sum over `labels`
    (`Context.labels`), by which the trainer divides both; `None`: as many as tokens.
    """
    if labels is not None:
        penalty = penalty * (labels / jnp.maximum(tokens, 1)).astype(penalty.dtype)
    return _added(y, penalty)


@jax.custom_vjp
def _added(y: Float[Array, '*b'], penalty: Float[Array, '']) -> Float[Array, '*b']:
    """`y`; differentiation adds the gradient of `penalty`."""
    return y


def _forward(y: Array, penalty: Array) -> tuple[Array, Array]:
    return y, jnp.ones_like(penalty)


def _backward(one: Any, dy: Array) -> tuple[Array, Any]:
    return dy, one


_added.defvjp(_forward, _backward)


@runtime_checkable
class RowsPenalty(Protocol):
    """A penalty on rows of weights, without parameters."""

    @property
    def penalises(self) -> WeightMap:
        """The weight map whose rows it penalises."""

    def __call__(
        self, q: Queries, k: Keys, counts: Float[Array, 'b t'], segments: Segments | None, reach: Reach
    ) -> Float[Array, '']:
        """Returns the sum over the queries that are no padding; they include temperatures.

        `counts` are their numbers of visible keys.
        """


@dataclasses.dataclass(frozen=True)
class Penalised:
    """A weight map with a penalty on its rows in training.

    Raises `UserError` where the penalty is for another map.
    """

    weights: WeightMap
    penalty: RowsPenalty

    def __post_init__(self) -> None:
        if self.weights != self.penalty.penalises:
            raise UserError(
                f'{type(self.penalty).__name__} is a penalty of the rows of {self.penalty.penalises}; '
                f'the weights are {self.weights}'
            )

    def check(self, **terms: Any) -> None:
        """Raises `UserError` for terms of the scores, by name, that the penalty would ignore."""
        given = [name for name, term in terms.items() if term is not None]
        if given:
            raise UserError(
                f'{type(self.penalty).__name__} is a penalty of products of queries and keys alone; '
                f'there is also {", ".join(given)}'
            )
