"""Work that is done again in the backward pass, as its intermediate values are dearer to keep: elementwise, or of rows.

Where layers are a loop, as on accelerators, all that a backward pass reads is written to memory as it was computed: of
a norm of bfloat16 four arrays in float32. Where they are none, the compiler sees the same work twice, merges it, and
decides by itself.
"""

import functools
from collections.abc import Callable
from typing import Concatenate

import jax
from jax import Array
from jaxtyping import Float


def recomputed[**Arrays, Result](function: Callable[Arrays, Result]) -> Callable[Arrays, Result]:
    """A function of arrays, which alone are kept for its backward pass."""
    return jax.checkpoint(function, prevent_cse=False)


def recomputed_beside_products[**Arrays, Result](function: Callable[Arrays, Result]) -> Callable[Arrays, Result]:
    """A function of arrays, which alone are kept for its backward pass, beside what its matrix products gave.

    What maps in it read is kept too, and best closed over: it then is the object that the maps beside it read, by which
    calibration finds out which maps are behind a norm.
    """
    return jax.checkpoint(function, prevent_cse=False, policy=jax.checkpoint_policies.dots_saveable)


def recomputed_method[Owner, **Arrays, Result](
    method: Callable[Concatenate[Owner, Arrays], Result],
) -> Callable[Concatenate[Owner, Arrays], Result]:
    """A method of arrays, which alone are kept for its backward pass, beside the parameters of their owner."""

    @functools.wraps(method)
    def again(owner: Owner, /, *arrays: Arrays.args, **named: Arrays.kwargs) -> Result:
        return recomputed(functools.partial(method, owner))(*arrays, **named)

    return again


def gated(
    y: Float[Array, '*b d'], logits: Float[Array, '*b d'], activation: Callable[[Array], Array] = jax.nn.silu
) -> Float[Array, '*b d']:
    """`y f(logits)`."""
    return recomputed(lambda y, logits: y * activation(logits))(y, logits)
