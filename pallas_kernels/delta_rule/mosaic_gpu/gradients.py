"""The kernel for gradients of keys of `delta_rule` on Hopper GPUs, with one decay a head and step, or none.

A key is read by queries, is written under, and reads what is stored for it: with R the values that steps write, dW the
gradients of what they write before the inverse (see `chunks.missing`), S the state before a chunk and dS the gradient
of that after it,

    dK = (D * dO R^T)^T Q + writes (R dS^T) - beta ((D * dW R^T) K + reach (dW S^T)) - (beta D * dW R^T)^T K

where products of steps with themselves count only for queries.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.cost import Cost
from pallas_kernels.matrix_state.decays import COUNT, REACH, WRITE
from pallas_kernels.matrix_state.mosaic_gpu.reads import BACKWARD, FORWARD, GRID, decays_between, times
from pallas_kernels.matrix_state.mosaic_gpu.tiles import (
    NAMED_LAYOUTS,
    SLOTS,
    TILE,
    TIME_FIRST,
    along,
    along_channels,
    hidden_zero,
    iota,
    load,
    shared_tile,
    write,
    zeros,
    zeros_of_rows,
)
from pallas_kernels.mosaic_gpu import launch
from pallas_kernels.mosaic_gpu.products_sm90 import accumulate, multiply
from pallas_kernels.target import Target


class Sums(NamedTuple):
    """Products of keys with parts of their gradients, summed over channels, each `b h l c`; and of states.

    Attributes:
      written: of what steps write, read by later steps of the chunk.
      kept: of what steps write to the state after the chunk.
      within: of the reads of earlier steps of the chunk, without beta.
      across: of the reads of the state before it, without beta.
      held: of the state before the chunk with the gradient of that after it, `b h l`.
    """

    written: jax.Array
    kept: jax.Array
    within: jax.Array
    across: jax.Array
    held: jax.Array


def delta_key_gradients(
    here: Target,
    q: jax.Array,
    k: jax.Array,
    do: jax.Array,
    values: jax.Array,
    dmissing: jax.Array,
    states: jax.Array,
    dstates: jax.Array,
    beta: jax.Array,
    rows: jax.Array,
    out_dtype: Any,
    scale: float,
) -> tuple[jax.Array, Sums]:
    """dk, `b t h k`, and its sums; arguments of steps are `b t h k`, states `b h l k v`, beta `b h l 1 c`.

    What queries read is multiplied by `scale`.
    """
    b, h, count, width, v = states.shape
    dtype, columns = k.dtype, width // TILE

    def body(
        q_ref: Any,
        k_ref: Any,
        do_ref: Any,
        values_ref: Any,
        dmissing_ref: Any,
        states_ref: Any,
        dstates_ref: Any,
        beta_ref: Any,
        rows_ref: Any,
        dk_ref: Any,
        sums_ref: Any,
    ) -> None:
        at, head, chunk, column = (jax.lax.axis_index(name) for name in GRID)
        steps, channels = pl.ds(chunk * TILE, TILE), pl.ds(column * TILE, TILE)

        def run(
            query: Any, key: Any, numbers: Any, betas: Any, among: Any, wide: Any, totals: Any, arrived: Any
        ) -> None:
            plgpu.copy_gmem_to_smem(TIME_FIRST.of_group(q_ref, at, head, h, q).at[steps, channels], query, arrived)
            plgpu.copy_gmem_to_smem(TIME_FIRST.of_group(k_ref, at, head, h, k).at[steps, channels], key, arrived)
            plgpu.copy_gmem_to_smem(rows_ref.at[at, head, chunk], numbers, arrived)
            plgpu.copy_gmem_to_smem(beta_ref.at[at, head, chunk], betas, arrived)
            dscores, derased, kept, across, held = along_channels(
                functools.partial(_over_values, here, v // TILE > SLOTS),
                v // TILE,
                (*[zeros()] * 4, zeros_of_rows()),
                *(
                    (TIME_FIRST.of_head(ref, at, head), lambda part: (chunk, part))
                    for ref in (do_ref, values_ref, dmissing_ref)
                ),
                *((ref.at[at, head, chunk], lambda part: (column, part)) for ref in (states_ref, dstates_ref)),
            )
            plgpu.barrier_wait(arrived)

            derased = jnp.where(
                iota(0, hidden_zero(numbers)) > iota(1), derased * decays_between(numbers, FORWARD), 0.0
            )
            among[...] = (derased * along(betas, 0, 0)).astype(dtype)
            plgpu.commit_smem()
            within = multiply(here, derased.astype(dtype), key)
            across = across * along(numbers, REACH, 0)
            kept = kept * along(numbers, WRITE, 0)
            by_others = multiply(here, among.transpose((1, 0)), key)
            dscores = times(scale, dscores * decays_between(numbers, BACKWARD))
            scores = jnp.where(iota(0) != iota(1), multiply(here, key, query.transpose((1, 0))) * dscores, 0)
            written = jnp.sum(scores, axis=1) - jnp.sum(load(key) * by_others, axis=1)
            found = kept - (within + across) * along(betas, 0, 0)
            products = (jnp.sum(load(key) * part, axis=1) for part in (kept, within, across))
            for place, total in enumerate((written, *products, held)):
                totals[place, :] = total
            # `among` has been read; reuse it if the output has its type.
            dk = wide[0] if wide else among
            dk[...] = multiply(here, dscores.astype(dtype), query, found - by_others).astype(out_dtype)
            write(dk, TIME_FIRST.of_head(dk_ref, at, head).at[steps, channels])
            write(totals, sums_ref.at[at, head, chunk, column])

        pl.run_scoped(
            run,
            shared_tile(dtype),
            shared_tile(dtype),
            plgpu.SMEM((COUNT, TILE), jnp.float32),
            plgpu.SMEM((1, TILE), jnp.float32),
            shared_tile(dtype),
            [shared_tile(out_dtype)] * (out_dtype != dtype),
            plgpu.SMEM((len(Sums._fields), TILE), jnp.float32),
            plgpu.Barrier(num_arrivals=4),
        )

    dk, sums = launch.kernel(
        body,
        here,
        out_type=(
            jax.ShapeDtypeStruct(TIME_FIRST.shape(b, h, count * TILE, width), out_dtype),
            jax.ShapeDtypeStruct((b, h, count, columns, len(Sums._fields), TILE), jnp.float32),
        ),
        name='delta_rule_key_gradients',
        cost=Cost(
            flops=2 * b * h * count * TILE * (2 * columns * TILE * v + 2 * width * v + 4 * TILE * width),
            exponentials=2 * b * h * count * TILE * TILE * columns,
        ),
        grid=(b, h, count, columns),
        grid_names=GRID,
        compiler_params=NAMED_LAYOUTS,
    )(q, k, do, values, dmissing, states, dstates, beta, rows)
    found = Sums(*(jnp.sum(sums[:, :, :, :, place], axis=3) for place in range(len(Sums._fields))))
    return dk, found._replace(held=jnp.sum(found.held, axis=3))


def _over_values(
    here: Target,
    refilled: bool,
    _: Any,
    given: Any,
    value: Any,
    missed: Any,
    state: Any,
    dstate: Any,
    sums: tuple[Any, ...],
) -> tuple[Any, ...]:
    """Adds the products of a tile of value channels, whose slot a copy may refill."""
    dscores, derased, written, read, held = sums
    held = held + jnp.sum(load(state) * load(dstate), axis=1)
    if refilled:
        plgpu.commit_smem()
    found = accumulate(
        here,
        (dscores, [(value, given.transpose((1, 0)))]),
        (derased, [(missed, value.transpose((1, 0)))]),
        (written, [(value, dstate.transpose((1, 0)))]),
        (read, [(missed, state.transpose((1, 0)))]),
    )
    return *found, held
