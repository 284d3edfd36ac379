"""Parts shared by the kernels of `linear_scan`: their inputs, and the calls they reject."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import precision
from pallas_kernels.cost import Cost, linear_scan
from pallas_kernels.linear_scan import vjp


def refusal(x: jax.Array, decay: jax.Array, state: jax.Array) -> str | None:
    """The reason why no kernel can serve a call, or `None`."""
    dtype = precision.accumulator(x, decay, state)
    if dtype not in (jnp.float32, jnp.complex64):
        return f'it would be computed in {dtype}; expected operands of at most float32 or complex64'
    if 0 in x.shape:
        return f'x has shape {x.shape}; expected no dimension of size zero'
    return None


def serving(
    scan: vjp.Scan, types: tuple[DTypeLike, ...]
) -> Callable[[jax.Array, jax.Array, jax.Array, bool], vjp.Outputs]:
    """Returns the differentiable form of a kernel that reads `types` and complex64 directly.

    The kernel is given a decay for every channel, `b|1 t|1 d`: one shared by channels is repeated in memory.
    Every h is returned, and kept for the backward pass, in the wider type of x and decay.
    """
    run = vjp.differentiable(scan)

    def served(x: jax.Array, decay: jax.Array, state: jax.Array, reverse: bool) -> vjp.Outputs:
        if jnp.iscomplexobj(state):
            x, decay = x.astype(state.dtype), decay.astype(state.dtype)
        else:
            x, decay = (array if array.dtype in types else array.astype(jnp.float32) for array in (x, decay))
        return run(x, jnp.broadcast_to(decay, (*decay.shape[:2], x.shape[2])), state, reverse)

    return served


def type_of_outputs(x: jax.Array, decay: jax.Array) -> jnp.dtype:
    """The type in which a kernel writes its outputs, the real one of complex numbers."""
    return jnp.finfo(jnp.result_type(x, decay)).dtype


def cost(b: int, t: int, d: int, dtype: DTypeLike) -> Cost:
    """The cost of a scan in either direction."""
    return linear_scan(b=b, t=t, d=d, is_complex=jnp.issubdtype(dtype, jnp.complexfloating)).model.forward
