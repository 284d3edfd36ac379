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
import jax.experimental.pallas as pl
import jax.numpy as jnp

from pallas_kernels import tiling, tuning
from pallas_kernels.delta_rule import vjp
from pallas_kernels.delta_rule.mosaic_gpu.solve import Documents, Solved, Steps, cut, join, solve
from pallas_kernels.delta_rule.mosaic_gpu.sweep import Sweep, sweep
from pallas_kernels.matrix_state import decays
from pallas_kernels.matrix_state.mosaic_gpu import reads
from pallas_kernels.matrix_state.mosaic_gpu import refusal as shared
from pallas_kernels.matrix_state.mosaic_gpu.tiles import TILE, fill
from pallas_kernels.target import Target


def refusal(
    here: Target, q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array | None, state: jax.Array
) -> str | None:
    """The reason why the call cannot be served, or `None`."""
    if tiling.delta_rule_hopper(state.shape[2]) is None:
        return f'q and k have {state.shape[2]} channels; expected at most 256, as one program holds a whole column'
    return shared.refusal(here, q, k, v, log_decay, state)


def tiled_by(
    here: Target, q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array | None, state: jax.Array
) -> str:
    """Where the tile of a call is from, see `tuning.source`."""
    return tuning.source(here, tiling.delta_rule_hopper, -(-state.shape[2] // TILE) * TILE)


@functools.lru_cache
def form(here: Target) -> Callable[..., vjp.Outputs]:
    """The differentiable form for a device."""
    return vjp.differentiable(functools.partial(_forward, here), functools.partial(_backward, here))


def _forward(here: Target, arrays: vjp.Arrays, scale: float, keep: bool) -> tuple[vjp.Outputs, None]:
    steps, documents = _inputs(arrays)
    steps = steps._replace(q=(scale * steps.q.astype(jnp.float32)).astype(steps.q.dtype))
    solved = solve(here, documents, steps)
    states, values, final = _forward_sweep(here, arrays, solved)
    if arrays.log_decay is not None and arrays.log_decay.shape[3] > 1:
        among, q = join(solved.among), join(solved.q)
        o = reads.read_weighed(here, reads.FORWARD, among, values, q, states, values.dtype)
    else:
        o = reads.read(here, reads.FORWARD, steps.q, steps.k, values, states, documents.rows, values.dtype)
    t, (key_size, value_size) = arrays.q.shape[2], arrays.state.shape[2:]
    return (o[:, :, :t, :value_size], final[:, :, :key_size, :value_size]), None


def _backward(here: Target, arrays: vjp.Arrays, scale: float, kept: None, gradients: vjp.Outputs) -> vjp.Arrays:
    steps, documents = _inputs(arrays)
    dtype = arrays.q.dtype
    do = cut((scale * fill(gradients[0]).astype(jnp.float32)).astype(dtype))
    solved, pull = jax.vjp(functools.partial(solve, here, documents), steps)
    states, values, _ = _forward_sweep(here, arrays, solved)

    def product(letters: str, left: jax.Array, right: jax.Array) -> jax.Array:
        return jnp.einsum(letters, left, right, preferred_element_type=dtype)

    dstates, dvalues, dstate = sweep(
        here,
        Sweep(
            reads=join(solved.writes),
            adds=join(-solved.erases),
            values=join(product('bhlts,bhltv->bhlsv', solved.among, do)),
            more=(join(solved.q), join(do)),
        ),
        solved.factor,
        fill(gradients[1]),
        backward=True,
    )
    values, dvalues = cut(values), cut(dvalues)
    held = jnp.einsum('bhlkv,bhlkv->bhlk', states, dstates, preferred_element_type=jnp.float32)[:, :, :, None]
    dsolved = Solved(
        among=product('bhltv,bhlsv->bhlts', do, values),
        q=product('bhltv,bhlkv->bhltk', do, states),
        writes=product('bhlsv,bhlkv->bhlsk', values, dstates),
        factor=held if solved.factor.shape == held.shape else jnp.sum(held, axis=-1, keepdims=True),
        written=dvalues,
        erases=-product('bhlsv,bhlkv->bhlsk', dvalues, states),
    )
    (found,) = pull(dsolved)
    b, h, t, (key_size, value_size) = *arrays.state.shape[:2], arrays.q.shape[2], arrays.state.shape[2:]

    def cropped(gradient: jax.Array, channels: int) -> jax.Array:
        return gradient[:, :, :t, :channels]

    dlog_decay = found.log_decay
    if dlog_decay is not None:
        channels = key_size if dlog_decay.ndim == 4 else 1
        dlog_decay = cropped(dlog_decay.reshape(b, h, -1, dlog_decay.shape[-1]), channels)
    return vjp.Arrays(
        q=cropped(found.q, key_size),
        k=cropped(found.k, key_size),
        v=cropped(found.v, value_size),
        beta=found.beta.reshape(b, h, -1)[:, :, :t],
        log_decay=dlog_decay,
        state=dstate[:, :, :key_size, :value_size],
        starts=None,
    )


def _inputs(arrays: vjp.Arrays) -> tuple[Steps, Documents]:
    b, h = arrays.state.shape[:2]
    t = arrays.q.shape[2]

    def numbers(array: jax.Array) -> jax.Array:
        return cut(jnp.pad(array, ((0, 0), (0, 0), (0, -t % TILE), (0, 0))))

    decay, starts = arrays.log_decay, arrays.starts
    shared = decay is not None and decay.shape[3] == 1
    if decay is not None:
        decay = jnp.broadcast_to(decay, (b, h, t, decay.shape[3]))
        decay = numbers(decay) if shared else fill(decay)
    steps = Steps(fill(arrays.q), fill(arrays.k), fill(arrays.v), numbers(arrays.beta[..., None]), decay)
    found = decays.rows(arrays.log_decay if shared else None, starts, pl.cdiv(t, TILE) * TILE, TILE)
    return steps, Documents(
        runs=None if starts is None else jnp.cumsum(numbers(starts[:, None, :, None]), axis=3, dtype=jnp.int32),
        rows=jnp.broadcast_to(found, (b, h, *found.shape[2:])),
    )


def _forward_sweep(here: Target, arrays: vjp.Arrays, solved: Solved) -> tuple[jax.Array, jax.Array, jax.Array]:
    given = Sweep(reads=join(-solved.erases), adds=join(solved.writes), values=join(solved.written), more=())
    return sweep(here, given, solved.factor, fill(arrays.state), backward=False)
