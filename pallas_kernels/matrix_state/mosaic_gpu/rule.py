"""The forms on Hopper GPUs of cores whose chunks are solved by a triangular inverse: what they say, and both passes.

The computation within chunks of 64 steps is done for all chunks at once, in float32, whose products have the 10 bits of
tf32 on a GPU, but for the inverse, a kernel of its own, and for what depends on decays per key channel, which the
kernels of `weights` compute. `sweep` then runs over the chunks of a sequence in order and writes the state at each and
the values that its steps write; these are read as in `linear_attention`.

Only the arguments are kept for the backward pass. It sweeps again for the states, `t / 64 * k * v` numbers a head in
the 16-bit type of products, and the values, and from the last chunk to the first for the gradients of both. The
gradients within chunks are products of these, also 16-bit, and otherwise left to JAX.

Decays multiply numbers before these are rounded for a product: in float16 a number that decays below 6e-8 becomes zero,
and a state above 65504 overflows.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import tiling, tuning
from pallas_kernels.matrix_state.differentiation import Arrays, Outputs, Passes, scaled
from pallas_kernels.matrix_state.mosaic_gpu import refusal as shared
from pallas_kernels.matrix_state.mosaic_gpu import solving
from pallas_kernels.matrix_state.mosaic_gpu.reads import FORWARD, read_weighed
from pallas_kernels.matrix_state.mosaic_gpu.solving import Documents, Solved, cut, join
from pallas_kernels.matrix_state.mosaic_gpu.tiles import TILE, fill
from pallas_kernels.target import Target


class Steps(NamedTuple):
    """A call in whole chunks and tiles.

    Attributes:
      q: `b hq t k`.
      k: `b hk t k`.
      v: `b hv t v`.
      vectors: what the rule has besides of key channels, each `b hn t k`.
      log_decay: float32, zero in padding: `b h l c 1`, or `b h t k` where key channels have their own; or `None`.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    vectors: tuple[jax.Array, ...]
    log_decay: jax.Array | None


def read_solved(here: Target, solved: Solved, states: jax.Array, values: jax.Array) -> jax.Array:
    """What queries read, `b h t v`, through the weights in memory: of states and values, and of what else is written.

    `states`, `b h l k v`, are those before chunks, and `values`, `b h t v`, what steps write.
    """
    o = read_weighed(here, FORWARD, join(solved.among), values, join(solved.q), states, values.dtype)
    if solved.more is None:
        return o
    within = jnp.einsum('bhlts,bhlsv->bhltv', solved.more.among, solved.more.values, preferred_element_type=jnp.float32)
    return (o.astype(jnp.float32) + join(within)).astype(o.dtype)


Solve = Callable[[Target, Documents, Steps], Solved]
"""From documents and steps to what chunks do after applying their inverse; differentiable in the steps."""


def passes(here: Target, solve: Solve) -> Passes:
    """Both passes for a device, of what a core does within chunks."""
    return Passes(functools.partial(_forward, here, solve), functools.partial(_backward, here, solve))


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
    if tiling.delta_rule_hopper(state.shape[2], 3) is None:
        return f'q and k have {state.shape[2]} channels; expected at most 256, as one program holds a whole column'
    return shared.refusal(here, q, k, v, log_decay, state, *others)


def tiled_by(
    here: Target, q: jax.Array, k: jax.Array, v: jax.Array, log_decay: jax.Array | None, state: jax.Array, *_: jax.Array
) -> str:
    """Where the tiles of a call are from, see `tuning.source`: a table if those of either direction are."""
    channels = -(-state.shape[2] // TILE) * TILE
    found = [tuning.source(here, tiling.delta_rule_hopper, channels, keys) for keys in (2, 3)]
    return tuning.TABLE if tuning.TABLE in found else tuning.HEURISTIC


def _forward(here: Target, solve: Solve, arrays: Arrays, scale: float, keep: bool) -> tuple[Outputs, None]:
    steps, documents = _inputs(arrays)
    steps = steps._replace(q=scaled(scale, steps.q))
    solved = solve(here, documents, steps)
    states, values, final = solving.forward(here, solved, fill(arrays.state))
    o = read_solved(here, solved, states, values)
    t, (key_size, value_size) = arrays.q.shape[2], arrays.state.shape[2:]
    return (o[:, :, :t, :value_size], final[:, :, :key_size, :value_size]), None


def _backward(here: Target, solve: Solve, arrays: Arrays, scale: float, kept: None, gradients: Outputs) -> Arrays:
    steps, documents = _inputs(arrays)
    do = cut(scaled(scale, fill(gradients[0]).astype(jnp.float32)).astype(arrays.q.dtype))
    solved, pull = jax.vjp(functools.partial(solve, here, documents), steps)
    states, values, _ = solving.forward(here, solved, fill(arrays.state))
    dsolved, dstate = solving.backward(here, solved, states, values, do, fill(gradients[1]))
    (found,) = pull(dsolved)
    t, (key_size, value_size) = arrays.q.shape[2], arrays.state.shape[2:]
    return Arrays(
        q=found.q[:, :, :t, :key_size],
        k=found.k[:, :, :t, :key_size],
        v=found.v[:, :, :t, :value_size],
        vectors=tuple(vector[:, :, :t, :key_size] for vector in found.vectors),
        numbers=(),
        log_decay=solving.decay_gradient(found.log_decay, t, key_size),
        state=dstate[:, :, :key_size, :value_size],
        starts=None,
    )


def _inputs(arrays: Arrays) -> tuple[Steps, Documents]:
    b, h = arrays.state.shape[:2]
    sizes = b, h, arrays.q.shape[2]
    steps = Steps(
        q=fill(arrays.q),
        k=fill(arrays.k),
        v=fill(arrays.v),
        vectors=tuple(fill(vector) for vector in arrays.vectors),
        log_decay=solving.decays_of(arrays.log_decay, sizes),
    )
    return steps, solving.documents(arrays.log_decay, arrays.starts, sizes)
