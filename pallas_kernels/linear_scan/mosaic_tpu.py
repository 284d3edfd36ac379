"""`linear_scan` on a TPU: tiles of time in order, the carry between them in VMEM.

A tile is `rows` steps by `channels` lanes. Within it groups of eight steps, the sublanes of a register, are merged in
three rounds (Kogge and Stone, 1973), at a third of the cost of eight sequential steps, each using an eighth of a
register. x and decay are read once and the outputs written once. Complex numbers are passed as two real arrays.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import tiling
from pallas_kernels.linear_scan import kernels, parts, vjp
from pallas_kernels.linear_scan.parts import Numbers
from pallas_kernels.linear_scan.vjp import Step
from pallas_kernels.mosaic_tpu import launch
from pallas_kernels.target import Target
from pallas_kernels.tiling import SUBLANES

TYPES = (jnp.bfloat16, jnp.float32)

GROUP = 16
"""The steps loaded at once: the sublanes of a register of 16-bit numbers."""


@functools.lru_cache
def form(here: Target) -> Callable[[jax.Array, jax.Array, jax.Array, bool], vjp.Outputs]:
    """The differentiable form for a device."""
    return kernels.serving(functools.partial(_scan, here), TYPES)


def refusal(here: Target, x: jax.Array, decay: jax.Array, state: jax.Array) -> str | None:
    """The reason why the call cannot be served, or `None`."""
    return launch.generation_refusal(here) or kernels.refusal(x, decay, state)


def _scan(here: Target, x: jax.Array, decay: jax.Array, state: jax.Array, reverse: bool, step: Step) -> vjp.Outputs:
    b, t, d = x.shape
    arrays = tuple(parts.split(array) for array in (x, decay, state[:, None]))
    tile = tiling.linear_scan_tpu(t, d, numbers=len(jax.tree.leaves(arrays[0])))
    tiles = pl.cdiv(t, tile.rows)

    def by_time(i: Any, c: Any, k: Any) -> tuple[Any, Any, Any]:
        return i, tiles - 1 - k if reverse else k, c

    def of_decay(i: Any, c: Any, k: Any) -> tuple[Any, Any, Any]:
        batch, time, channels = by_time(i, c, k)
        return batch if decay.shape[0] > 1 else 0, time if decay.shape[1] > 1 else 0, channels

    steps = pl.BlockSpec((1, tile.rows, tile.channels), by_time)
    decays = pl.BlockSpec((1, tile.rows if decay.shape[1] > 1 else 1, tile.channels), of_decay)
    carry = pl.BlockSpec((1, 1, tile.channels), lambda i, c, k: (i, 0, c))

    def for_parts(*each: Any) -> tuple[Any, ...]:
        return tuple(jax.tree.map(lambda _, one=one: one, arrays[0]) for one in each)

    outputs, final = launch.call(
        functools.partial(_kernel, step=step, reverse=reverse, t=t),
        here,
        name='linear_scan',
        cost=kernels.cost(b, t, d, x.dtype),
        grid=(b, pl.cdiv(d, tile.channels), tiles),
        in_specs=for_parts(steps, decays, carry),
        out_specs=for_parts(steps, carry),
        out_shape=for_parts(
            jax.ShapeDtypeStruct(x.shape, kernels.type_of_outputs(x, decay)),
            jax.ShapeDtypeStruct((b, 1, d), jnp.float32),
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=('parallel', 'parallel', 'arbitrary')),
    )(*arrays)
    return parts.whole(outputs), parts.whole(final)[:, 0]


def _kernel(
    x_ref: Any, decay_ref: Any, state_ref: Any, output_ref: Any, carry_ref: Any, *, step: Step, reverse: bool, t: int
) -> None:
    """One tile. The carry is kept in the block of the last output, where its final value is needed."""

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        _write(carry_ref, 0, _read(state_ref, 0, 1))

    rows = jax.tree.leaves(output_ref)[0].shape[1]
    tile = pl.num_programs(2) - 1 - pl.program_id(2) if reverse else pl.program_id(2)
    groups = rows // GROUP

    def group(i: Any, carry: Numbers) -> Numbers:
        start = pl.multiple_of((groups - 1 - i if reverse else i) * GROUP, GROUP)
        x, decay = _read(x_ref, start, GROUP), _read(decay_ref, start, GROUP)
        if t % rows:  # Steps after the last one do not change the carry.
            inside = tile * rows + start + jax.lax.broadcasted_iota(jnp.int32, (GROUP, 1), 0) < t
            x = parts.where(inside, x, jax.tree.map(jnp.zeros_like, x))
            decay = parts.where(inside, decay, parts.ones_like(decay))
        found = {}
        for first in (SUBLANES, 0) if reverse else (0, SUBLANES):
            decays, xs = jax.tree.map(lambda part, first=first: part[first : first + SUBLANES], (decay, x))
            carry, found[first] = _eight(carry, decays, xs, step, reverse)
        _write(output_ref, start, jax.tree.map(lambda *both: jnp.concatenate(both), found[0], found[SUBLANES]))
        return carry

    _write(carry_ref, 0, jax.lax.fori_loop(0, groups, group, _read(carry_ref, 0, 1)))


def _eight(carry: Numbers, decay: Numbers, x: Numbers, step: Step, reverse: bool) -> tuple[Numbers, Numbers]:
    """Eight steps at once, `8 d`, from the carry before the first of them, `1 d`."""

    def later(numbers: Numbers, by: int) -> Numbers:
        return jax.tree.map(lambda part: pltpu.roll(part, SUBLANES - by if reverse else by, 0), numbers)

    row = jax.lax.broadcasted_iota(jnp.int32, jax.tree.leaves(x)[0].shape, 0)
    order = SUBLANES - 1 - row if reverse else row
    written, _ = step(jax.tree.map(jnp.zeros_like, x), decay, x)
    decays = decay
    for by in (1, 2, 4):
        merged = decays * later(written, by) + written, decays * later(decays, by)
        written, decays = parts.where(order >= by, merged, (written, decays))
    carry = jax.tree.map(lambda part, like: jnp.broadcast_to(part, like.shape), carry, x)
    carries = decays * carry + written
    _, outputs = step(parts.where(order == 0, carry, later(carries, 1)), decay, x)
    last = 0 if reverse else SUBLANES - 1
    return jax.tree.map(lambda part: part[last : last + 1], carries), outputs


def _read(refs: Any, start: Any, rows: int) -> Numbers:
    """Rows of a block, in float32; the row of a one-row block is repeated."""

    def read(ref: Any) -> jax.Array:
        found = ref[0] if ref.shape[1] == 1 else ref[0, pl.ds(start, rows)]
        return jnp.broadcast_to(found.astype(jnp.float32), (rows, ref.shape[2]))

    return jax.tree.map(read, refs)


def _write(refs: Any, start: Any, numbers: Numbers) -> None:
    def write(ref: Any, part: jax.Array) -> None:
        ref[0, pl.ds(start, part.shape[0])] = part.astype(ref.dtype)

    jax.tree.map(write, refs, numbers)
