"""Terms of the loss that only a layer can know."""

import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from attnlab.errors import UserError
from attnlab.functional.reach import Reach
from attnlab.typing import Keys, Queries, Segments
from pallas_kernels import WeightMap


@jax.custom_vjp
def penalised(y: Float[Array, '*b'], penalty: Float[Array, '']) -> Float[Array, '*b']:
    """Returns `y`; where it is differentiated, the gradient of `penalty` is added, whatever is done with `y`.

    So training minimises the loss plus the penalty, and the loss that is reported is that of the task alone. A penalty
    is a sum over the tokens of a batch, as is the loss until the trainer divides both by the number of tokens.
    """
    return y


def _forward(y: Array, penalty: Array) -> tuple[Array, Array]:
    return y, jnp.ones_like(penalty)


def _backward(one: Array, dy: Array) -> tuple[Array, Array]:
    return dy, one


penalised.defvjp(_forward, _backward)


@runtime_checkable
class RowsPenalty(Protocol):
    """A penalty of rows of weights, a part without parameters."""

    @property
    def penalises(self) -> WeightMap:
        """The map whose rows it is a penalty of."""

    def __call__(
        self, q: Queries, k: Keys, counts: Float[Array, 'b t'], segments: Segments | None, reach: Reach
    ) -> Float[Array, '']:
        """Returns the sum over the queries, which have their temperatures already; `counts` of the keys they see."""


@dataclasses.dataclass(frozen=True)
class Penalised:
    """A weight map whose rows pay a penalty in training.

    Raises `UserError` where the penalty is one of another map.
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
        """Raises `UserError` for terms of the scores, by name, which the penalty would not see."""
        given = [name for name, term in terms.items() if term is not None]
        if given:
            raise UserError(
                f'{type(self.penalty).__name__} is a penalty of products of queries and keys alone; '
                f'there is also {", ".join(given)}'
            )
