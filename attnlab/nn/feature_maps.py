"""Feature maps: what stands for the exponential in `exp(q . k) ~ f(q) . f(k)`, one head at a time."""

import dataclasses

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float


@dataclasses.dataclass(frozen=True)
class EluPlusOne:
    """The positive map `f(x) = elu(x) + 1`: `x + 1` above zero, `e^x` below.

    The exponential is taken as it is, not as `expm1(x) + 1`, so that `f` stays positive where the latter rounds off.
    Katharopoulos et al. 2020, https://arxiv.org/abs/2006.16236.
    """

    def __call__(self, x: Float[Array, 'b t h k']) -> Float[Array, 'b t h k']:
        return jnp.where(x > 0, x + 1, jnp.exp(jnp.minimum(x, 0)))
