"""The Pallas form of `diagonal_low_rank` for Hopper GPUs: the kernels of `delta_rule`, for what chunks do here.

The computation within chunks of 64 steps, mainly the triangular inverse, is done outside, for all chunks at once, in
float32, whose products have the 10 bits of tf32 on a GPU; what depends on decays per key channel is computed by the
kernels of `matrix_state.mosaic_gpu`. The passes over chunks are those of `matrix_state.mosaic_gpu.solving`.

Only the arguments are kept for the backward pass. Decays multiply numbers before these are rounded for a product: in
float16 a number that decays below 6e-8 becomes zero, and a state above 65504 overflows.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels import tiling, tuning
from pallas_kernels.diagonal_low_rank import vjp
from pallas_kernels.diagonal_low_rank.mosaic_gpu.solve import Steps, solve
from pallas_kernels.matrix_state.differentiation import Outputs
from pallas_kernels.matrix_state.mosaic_gpu import reads, solving
from pallas_kernels.matrix_state.mosaic_gpu import refusal as shared
from pallas_kernels.matrix_state.mosaic_gpu.solving import cut, join
from pallas_kernels.matrix_state.mosaic_gpu.tiles import TILE, fill
from pallas_kernels.target import Target


def refusal(
    here: Target,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array | None,
    state: jax.Array,
    *others: jax.Array,
) -> str | None:
    """The reason why the call cannot be served, or `None`; `others` are a and b, if it is given."""
    if tiling.delta_rule_hopper(state.shape[2]) is None:
        return f'q and k have {state.shape[2]} channels; expected at most 256, as one program holds a whole column'
    return shared.refusal(here, q, k, v, log_decay, state, *others)


def tiled_by(
    here: Target,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array | None,
    state: jax.Array,
    *others: jax.Array,
) -> str:
    """Where the tile of a call is from, see `tuning.source`."""
    return tuning.source(here, tiling.delta_rule_hopper, -(-state.shape[2] // TILE) * TILE)


@functools.lru_cache
def form(here: Target) -> Callable[..., Outputs]:
    """The differentiable form for a device."""
    return vjp.differentiable(functools.partial(_forward, here), functools.partial(_backward, here))


def _forward(here: Target, arrays: vjp.Arrays, scale: float, keep: bool) -> tuple[Outputs, None]:
    steps, documents = _inputs(arrays)
    steps = steps._replace(q=solving.scaled(scale, steps.q))
    solved = solve(here, documents, steps)
    states, values, final = solving.forward(here, solved, fill(arrays.state))
    o = reads.read_weighed(here, reads.FORWARD, join(solved.among), values, join(solved.q), states, values.dtype)
    if solved.more is not None:
        within = jnp.einsum(
            'bhlts,bhlsv->bhltv', solved.more.among, solved.more.values, preferred_element_type=jnp.float32
        )
        o = (o.astype(jnp.float32) + join(within)).astype(o.dtype)
    t, (key_size, value_size) = arrays.q.shape[2], arrays.state.shape[2:]
    return (o[:, :, :t, :value_size], final[:, :, :key_size, :value_size]), None


def _backward(here: Target, arrays: vjp.Arrays, scale: float, kept: None, gradients: Outputs) -> vjp.Arrays:
    steps, documents = _inputs(arrays)
    do = cut(solving.scaled(scale, fill(gradients[0]).astype(jnp.float32)).astype(arrays.q.dtype))
    solved, pull = jax.vjp(functools.partial(solve, here, documents), steps)
    states, values, _ = solving.forward(here, solved, fill(arrays.state))
    dsolved, dstate = solving.backward(here, solved, states, values, do, fill(gradients[1]))
    (found,) = pull(dsolved)
    t, (key_size, value_size) = arrays.q.shape[2], arrays.state.shape[2:]
    return vjp.Arrays(
        q=found.q[:, :, :t, :key_size],
        k=found.k[:, :, :t, :key_size],
        v=found.v[:, :, :t, :value_size],
        a=found.a[:, :, :t, :key_size],
        b=None if found.b is None else found.b[:, :, :t, :key_size],
        log_decay=solving.decay_gradient(found.log_decay, t, key_size),
        state=dstate[:, :, :key_size, :value_size],
        starts=None,
    )


def _inputs(arrays: vjp.Arrays) -> tuple[Steps, solving.Documents]:
    b, h = arrays.state.shape[:2]
    sizes = b, h, arrays.q.shape[2]
    q, k, v, a = (fill(array) for array in (arrays.q, arrays.k, arrays.v, arrays.a))
    steps = Steps(q, k, v, a, None if arrays.b is None else fill(arrays.b), solving.decays_of(arrays.log_decay, sizes))
    return steps, solving.documents(arrays.log_decay, arrays.starts, sizes)
