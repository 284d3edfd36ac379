"""From continuous time scales to the coefficients of a recurrence."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float


def inverse_softplus(y: Float[Array, '*b']) -> Float[Array, '*b']:
    """The `x` with `log(1 + e^x) = y > 0`, in the form that does not overflow: `x = y + log(1 - e^-y)`."""
    return y + jnp.log(-jnp.expm1(-y))


def log_uniform(key: jax.Array, shape: Sequence[int], low: float, high: float) -> Float[Array, '...']:
    """Draws from `low` to `high` with the logarithm uniform."""
    return jnp.exp(jax.random.uniform(key, shape, minval=jnp.log(low), maxval=jnp.log(high)))
