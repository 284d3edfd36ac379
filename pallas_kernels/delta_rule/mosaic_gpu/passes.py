"""The Pallas form of `delta_rule` for Hopper GPUs: one kernel for what depends on the state, in both directions.

The computation within chunks of 64 steps, mainly the triangular inverse, is done outside, for all chunks at once, in
float32, whose products have the 10 bits of tf32 on a GPU. What depends on decays per key channel is computed by the
kernels of `matrix_state.mosaic_gpu`. `sweep` then runs over the chunks of a sequence in order and writes the state at
each and the values that its steps write; these are read as in `linear_attention`.

Only the arguments are kept for the backward pass. It sweeps again for the states, `t / 64 * k * v` numbers a head in
the 16-bit type of products, and the values, and from the last chunk to the first for the gradients of both. The
gradients within chunks are products of these, also 16-bit, and otherwise left to JAX.

Decays multiply numbers before these are rounded for a product: in float16 a number that decays below 6e-8 becomes zero,
and a state above 65504 overflows.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels import tiling, tuning
from pallas_kernels.delta_rule import erasing, vjp
from pallas_kernels.delta_rule.mosaic_gpu.solve import Steps, solve
from pallas_kernels.diagonal_low_rank.mosaic_gpu.passes import form as diagonal_low_rank
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
    """The reason why the call cannot be served, or `None`; `others` are multiplied too."""
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
def form(here: Target) -> Callable[..., vjp.Outputs]:
    """The differentiable form for a device."""
    return vjp.differentiable(functools.partial(_forward, here), functools.partial(_backward, here))


@functools.lru_cache
def with_erase(here: Target) -> Callable[..., vjp.Outputs]:
    """The differentiable form with erase keys of their own."""
    return erasing.by_kernels(diagonal_low_rank(here))


def _forward(here: Target, arrays: vjp.Arrays, scale: float, keep: bool) -> tuple[vjp.Outputs, None]:
    steps, documents = _inputs(arrays)
    steps = steps._replace(q=solving.scaled(scale, steps.q))
    solved = solve(here, documents, steps)
    states, values, final = solving.forward(here, solved, fill(arrays.state))
    if arrays.log_decay is not None and arrays.log_decay.shape[3] > 1:
        among, q = join(solved.among), join(solved.q)
        o = reads.read_weighed(here, reads.FORWARD, among, values, q, states, values.dtype)
    else:
        o = reads.read(here, reads.FORWARD, steps.q, steps.k, values, states, documents.rows, values.dtype)
    t, (key_size, value_size) = arrays.q.shape[2], arrays.state.shape[2:]
    return (o[:, :, :t, :value_size], final[:, :, :key_size, :value_size]), None


def _backward(here: Target, arrays: vjp.Arrays, scale: float, kept: None, gradients: vjp.Outputs) -> vjp.Arrays:
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
        beta=join(found.beta)[:, :, :t, 0],
        log_decay=solving.decay_gradient(found.log_decay, t, key_size),
        state=dstate[:, :, :key_size, :value_size],
        starts=None,
    )


def _inputs(arrays: vjp.Arrays) -> tuple[Steps, solving.Documents]:
    b, h = arrays.state.shape[:2]
    sizes = b, h, arrays.q.shape[2]
    beta, decay = solving.numbers(arrays.beta[..., None]), solving.decays_of(arrays.log_decay, sizes)
    steps = Steps(fill(arrays.q), fill(arrays.k), fill(arrays.v), beta, decay)
    return steps, solving.documents(arrays.log_decay, arrays.starts, sizes)
