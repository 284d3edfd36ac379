"""`linear_scan` on a Hopper GPU: tiles of time streamed through shared memory, the carry in registers.

A program is one sequence and 128 channels, one per thread, over all of time; copies run ahead of the arithmetic. Only
the minimum is moved, x and decay in and the outputs out: at b 4, t 8192, d 2048 in bfloat16 384 MiB, which takes an
H100 at least 0.12 ms, by 64 programs with 48 KiB in flight each. Where b d / 128 is less than
about 40 they would not fill the device: time is then split into spans, each run twice, first only for the product of
its decays and its result from a carry of zero, then with the carry from the spans before it; that is 5/3 of the
traffic, by as many more programs. Complex numbers are passed as two real arrays.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp

from pallas_kernels import tiling, tuning
from pallas_kernels.linear_scan import kernels, parts, vjp, xla
from pallas_kernels.linear_scan.parts import Numbers
from pallas_kernels.linear_scan.vjp import Step
from pallas_kernels.mosaic_gpu import launch
from pallas_kernels.mosaic_gpu.stream import Tiles, stream
from pallas_kernels.target import Target

TYPES = (jnp.bfloat16, jnp.float16, jnp.float32)

CHANNELS = launch.WARPGROUP

STAGES = 4

GROUP = 8
"""Unrolled steps, so that all of them are loaded before the first is computed."""


@functools.lru_cache
def form(here: Target) -> Callable[[jax.Array, jax.Array, jax.Array, bool], vjp.Outputs]:
    """The differentiable form for a device."""
    return kernels.serving(functools.partial(_scan, here), TYPES)


def refusal(here: Target, x: jax.Array, decay: jax.Array, state: jax.Array) -> str | None:
    """The reason why the call cannot be served, or `None`."""
    b, _, d = x.shape
    return (
        launch.capability_refusal(here)
        or launch.grid_refusal(b=b, channels=pl.cdiv(d, CHANNELS))
        or kernels.refusal(x, decay, state)
    )


def tiled_by(here: Target, x: jax.Array, decay: jax.Array, state: jax.Array) -> str:
    """Where the tile of a call is from, see `tuning.source`."""
    return tuning.source(here, tiling.linear_scan_gpu, *_sizes(x, decay))


def _sizes(x: jax.Array, decay: jax.Array) -> tuple[int, int, int, int]:
    """The arguments of the rule, of a call or of one that was padded."""
    b, t, d = x.shape
    return b, -(-t // GROUP) * GROUP, pl.cdiv(d, CHANNELS), CHANNELS * (x.dtype.itemsize + decay.dtype.itemsize)


def _scan(here: Target, x: jax.Array, decay: jax.Array, state: jax.Array, reverse: bool, step: Step) -> vjp.Outputs:
    b, t, d = x.shape
    dtype = kernels.type_of_outputs(x, decay)
    x, decay, state = _filled(x, decay, state)
    tile = tuning.tile(here, tiling.linear_scan_gpu, *_sizes(x, decay))
    x, decay = (_cut(array, tile.spans) for array in (x, decay))
    run = functools.partial(_run, here, x, decay, reverse=reverse, rows=tile.rows)
    state = jnp.repeat(state, tile.spans, axis=0)
    if tile.spans > 1:
        summary = (jnp.zeros_like(state), jnp.ones_like(state))
        _, summary = run(summary, step=_summarise(step), dtype=None)
        written, product = (array.reshape(b, tile.spans, -1) for array in summary)
        first = state[:: tile.spans]
        carries, _ = xla.forward(written, product, first, reverse, vjp.advance)
        state = vjp.shifted(carries, first, reverse).reshape(state.shape)
    outputs, final = run(state, step=step, dtype=dtype)
    last = 0 if reverse else -1
    return outputs.reshape(b, -1, outputs.shape[2])[:, :t, :d], final.reshape(b, tile.spans, -1)[:, last, :d]


def _filled(x: jax.Array, decay: jax.Array, state: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Pads channels to a warpgroup, and time with steps that do not change the carry."""
    _, t, d = x.shape
    time, channels = (0, -t % GROUP), (0, -d % CHANNELS)
    if time[1]:
        decay = jnp.broadcast_to(decay, (decay.shape[0], t, d))
    return (
        jnp.pad(x, ((0, 0), time, channels)),
        jnp.pad(decay, ((0, 0), time, channels), constant_values=1),
        jnp.pad(state, ((0, 0), channels)),
    )


def _cut(array: jax.Array, spans: int) -> jax.Array:
    """`b t d` as `(b spans) (t / spans) d`; what is constant over time is repeated."""
    b, t, d = array.shape
    return jnp.repeat(array, spans, axis=0) if t == 1 else array.reshape(b * spans, t // spans, d)


def _summarise(step: Step) -> Step:
    """The step that carries the result so far and the product of the decays."""

    def both(carry: tuple[Numbers, Numbers], decay: Numbers, x: Numbers) -> tuple[tuple[Numbers, Numbers], None]:
        written, product = carry
        written, _ = step(written, decay, x)
        return (written, decay * product), None

    return both


def _run(
    here: Target, x: jax.Array, decay: jax.Array, carry: Any, *, reverse: bool, step: Step, dtype: Any, rows: int
) -> tuple[jax.Array, Any]:
    """Returns the outputs, in a type that is not `None`, and the last carry, of the structure of the first, `b d`.

    The rows of decay are used for those of x in rotation.
    """
    b, t, d = x.shape
    tiles = t // rows
    arrays = jax.tree.map(parts.split, (x, decay, carry))

    def place(k: Any) -> Any:
        return tiles - 1 - k if reverse else k

    def body(x_ref: Any, decay_ref: Any, carry_ref: Any, output_ref: Any, final_ref: Any) -> None:
        i, c = jax.lax.axis_index('b'), jax.lax.axis_index('d')
        lanes = pl.ds(c * CHANNELS, CHANNELS)

        def of_row(row: Any) -> Callable[[Any], Tiles]:
            return lambda ref: Tiles(ref, (1, rows, CHANNELS), lambda k: (row, place(k), c))

        shared = i % decay.shape[0]
        constant = jax.tree.map(lambda ref: ref[shared, 0, lanes].astype(jnp.float32), decay_ref)
        inputs = {'x': jax.tree.map(of_row(i), x_ref)}
        if decay.shape[1] > 1:
            inputs['decay'] = jax.tree.map(of_row(shared), decay_ref)

        def of_tile(_: Any, tiles: Any, results: Any, carry: Any) -> Any:
            def of_group(j: Any, carry: Any) -> Any:
                start = (rows // GROUP - 1 - j if reverse else j) * GROUP
                order = [start + row for row in (range(GROUP)[::-1] if reverse else range(GROUP))]
                read = [jax.tree.map(lambda ref, row=row: ref[0, row].astype(jnp.float32), tiles) for row in order]
                for row, at in zip(order, read, strict=True):
                    carry, output = step(carry, at.get('decay', constant), at['x'])
                    jax.tree.map(functools.partial(_write, row), results, output)
                return carry

            return jax.lax.fori_loop(0, rows // GROUP, of_group, carry)

        carry = jax.tree.map(lambda ref: ref[i, lanes], carry_ref)
        outputs = jax.tree.map(of_row(i), output_ref)
        carry = stream(of_tile, tiles, inputs, outputs, carry, stages=STAGES)
        jax.tree.map(lambda ref, value: ref.__setitem__((i, lanes), value), final_ref, carry)

    outputs = None if dtype is None else jax.tree.map(lambda _: jax.ShapeDtypeStruct((b, t, d), dtype), arrays[0])
    final = jax.tree.map(lambda part: jax.ShapeDtypeStruct(part.shape, part.dtype), arrays[2])
    name = 'linear_scan_summary' if dtype is None else 'linear_scan'
    run = launch.kernel(
        body,
        here,
        name=name,
        cost=kernels.cost(b, t, d, x.dtype),
        out_type=(outputs, final),
        grid=(b, d // CHANNELS),
        grid_names=('b', 'd'),
    )
    return jax.tree.map(parts.whole, run(*arrays), is_leaf=lambda numbers: isinstance(numbers, parts.Pair))


def _write(row: Any, ref: Any, output: jax.Array) -> None:
    ref[0, row] = output.astype(ref.dtype)
