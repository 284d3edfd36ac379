"""Terms of the loss that only a layer can know."""

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float


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
