"""The moving average of a run's parameters, which is part of its state and is evaluated, not trained."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int

SUFFIX = '_ema'
"""The suffix of the names of numbers evaluated of the average; those of the parameters have none."""


def averaged(average: nnx.State, params: nnx.State, count: Int[Array, ''], decay: float) -> nnx.State:
    """Returns the average of the parameters after `count` steps, from that after the step before.

        a_t = sum_i d^(t-i) p_i / sum_i d^(t-i),   i = 1 .. t
            = a_{t-1} + r_t (p_t - a_{t-1}),       r_t = (1 - d) / (1 - d^t)

    for parameters `p_i` after step `i`. As `r_1` is 1, neither the initial parameters nor what the average began as is
    in it, and what is kept needs no correction for the first steps: it is the temporal averaging of Kingma and Ba 2015,
    section 7.2, https://arxiv.org/abs/1412.6980, divided by its sum of weights at every step.

    Args:
      average: after the step before; of any finite values before the first.
      params: after this step.
      count: steps made, this one included.
      decay: `d`, above 0 and below 1.
    """
    log = jnp.float32(math.log(decay))
    rate = jnp.expm1(log) / jnp.expm1(count.astype(jnp.float32) * log)
    # optax.incremental_update forms 1 - rate: rounded, it scales an average of ten thousand steps by as much as 3e-4.
    return jax.tree.map(lambda old, new: old + rate * (new - old), average, params)
