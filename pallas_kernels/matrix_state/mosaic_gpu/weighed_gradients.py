"""The kernels of gradients of weights of chunks that are in memory, for all chunks at once, on Hopper GPUs.

Queries, `do` their gradients, read values and the state S before the chunk; values are added under keys to the state
after it, of which dS is the gradient. Weights, and what their gradients are written as, are `b h t k`.
"""

from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.cost import Cost
from pallas_kernels.matrix_state.mosaic_gpu.reads import GRID
from pallas_kernels.matrix_state.mosaic_gpu.tiles import (
    HEADS_FIRST,
    NAMED_LAYOUTS,
    SLOTS,
    TILE,
    Layout,
    along,
    along_channels,
    load,
    shared_tile,
    write,
    zeros,
    zeros_of_rows,
)
from pallas_kernels.mosaic_gpu import launch
from pallas_kernels.mosaic_gpu.products_sm90 import accumulate
from pallas_kernels.target import Target


class Erasing(NamedTuple):
    """What steps that erase have besides, where they write `beta (V - K S)` after an inverse.

    Attributes:
      keys: K, the keys that read the state, `b h t k`.
      dmissing: the gradients of what is written before the inverse, `b h t v`.
      beta: `b h l 1 c`, float32.
    """

    keys: jax.Array
    dmissing: jax.Array
    beta: jax.Array


class StateGradients(NamedTuple):
    """Gradients of what steps read of the state before their chunk and write to that after it.

    Attributes:
      q: of the queries that read it, `dO S^T`, `b h t k`, 16-bit.
      writes: of the keys under which values are in the state after the chunk, `V dS^T`, likewise.
      held: products of S with dS, `b h l k`, float32.
      k: of other keys that read it, `dW S^T`, with dW the gradients of what they read; where they erase `-beta dW S^T`.
        Or `None`.
      by_beta: products of the keys that erase with `dW S^T`, `b h t`, float32; or `None`.
      others: of the keys under which other values are in the state after the chunk; one, or none.
    """

    q: jax.Array
    writes: jax.Array
    held: jax.Array
    k: jax.Array | None = None
    by_beta: jax.Array | None = None
    others: tuple[jax.Array, ...] = ()


class Term(NamedTuple):
    """A gradient of keys: the product of what is read or written of values with the state before the chunk, or dS.

    Attributes:
      values: of every head, or, where heads share them, of groups.
      layout: of the values.
      of_state: whether it is the state.
    """

    values: jax.Array
    layout: Layout
    of_state: bool


def state_gradients(
    here: Target,
    do: jax.Array,
    values: jax.Array,
    states: jax.Array,
    dstates: jax.Array,
    layout: Layout = HEADS_FIRST,
    erasing: Erasing | None = None,
    read: jax.Array | None = None,
    written: tuple[jax.Array, Layout] | None = None,
) -> StateGradients:
    """From dO, of every head, values that heads may share, both in `layout`, and S and dS, `b h l k v`.

    `read`, `b h t v`, are the gradients of what keys read that do not erase; `written` are other values.
    """
    b, h, count, k, width = states.shape
    dtype, columns, erases = states.dtype, k // TILE, erasing is not None
    given = () if erasing is None else (erasing.keys, erasing.beta)
    missing = read if erasing is None else erasing.dmissing
    terms = [Term(do, layout, True), Term(values, layout, False)]
    terms += [] if missing is None else [Term(missing, HEADS_FIRST, True)]
    terms += [] if written is None else [Term(*written, False)]

    def body(*refs: Any) -> None:
        term_refs, (states_ref, dstates_ref, *others) = refs[: len(terms)], refs[len(terms) :]
        erasing_refs, (*gradients, sums_ref) = others[: len(given)], others[len(given) :]
        at, head, chunk, column = (jax.lax.axis_index(name) for name in GRID)
        steps, channels = pl.ds(chunk * TILE, TILE), pl.ds(column * TILE, TILE)

        def step(_: Any, *tiles: Any) -> tuple[Any, ...]:
            *sources, state, dstate, (held, *sums) = tiles
            held = held + jnp.sum(load(state) * load(dstate), axis=1)
            if width // TILE > SLOTS:
                plgpu.commit_smem()
            pairs = [
                (source, (state if term.of_state else dstate).transpose((1, 0)))
                for source, term in zip(sources, terms, strict=True)
            ]
            return held, *accumulate(here, *((onto, [pair]) for onto, pair in zip(sums, pairs, strict=True)))

        def run(key: Any, betas: Any, tiles: Any, totals: Any, arrived: Any) -> None:
            if erases:
                keys_ref, beta_ref = erasing_refs
                plgpu.copy_gmem_to_smem(keys_ref.at[at, head, steps, channels], key, arrived)
                plgpu.copy_gmem_to_smem(beta_ref.at[at, head, chunk], betas, arrived)
            sources = [
                *(
                    (term.layout.of_group(ref, at, head, h, term.values), lambda part: (chunk, part))
                    for ref, term in zip(term_refs, terms, strict=True)
                ),
                *((ref.at[at, head, chunk], lambda part: (column, part)) for ref in (states_ref, dstates_ref)),
            ]
            held, *found = along_channels(step, width // TILE, (zeros_of_rows(), *[zeros()] * len(terms)), *sources)
            sums = [held]
            if erases:
                plgpu.barrier_wait(arrived)
                sums.append(jnp.sum(load(key) * found[2], axis=1))
                found[2] = -found[2] * along(betas, 0, 0)
            for place, total in enumerate(sums):
                totals[place, :] = total
            # One in the place of the keys, which have been read; so two programs share a multiprocessor.
            places = [*tiles, key] if erases else tiles
            for first in range(0, len(terms), len(places)):
                if first:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                for tile, gradient in zip(places, found[first:], strict=False):
                    tile[...] = gradient.astype(dtype)
                plgpu.commit_smem()
                for tile, ref in zip(places, gradients[first:], strict=False):
                    plgpu.copy_smem_to_gmem(tile, ref.at[at, head, steps, channels])
            write(totals, sums_ref.at[at, head, chunk, column])

        pl.run_scoped(
            run,
            shared_tile(dtype) if erases else None,
            plgpu.SMEM((1, TILE), jnp.float32) if erases else None,
            [shared_tile(dtype)] * (1 if len(terms) > 3 else len(terms) - erases),
            plgpu.SMEM((1 + erases, TILE), jnp.float32),
            plgpu.Barrier(num_arrivals=2) if erases else None,
        )

    of_keys = jax.ShapeDtypeStruct((b, h, count * TILE, k), dtype)
    *gradients, sums = launch.kernel(
        body,
        here,
        out_type=(
            *[of_keys] * len(terms),
            jax.ShapeDtypeStruct((b, h, count, columns, 1 + erases, TILE), jnp.float32),
        ),
        name='matrix_state_state_gradients',
        cost=Cost(len(terms) * 2 * b * h * count * TILE * k * width),
        grid=(b, h, count, columns),
        grid_names=GRID,
        compiler_params=NAMED_LAYOUTS,
    )(*(term.values for term in terms), states, dstates, *given)
    q, writes, *keys = gradients
    return StateGradients(
        q=q,
        writes=writes,
        held=sums[:, :, :, :, 0].reshape(b, h, count, k),
        k=None if missing is None else keys[0],
        by_beta=jnp.sum(sums[:, :, :, :, 1], axis=3).reshape(b, h, count * TILE) if erases else None,
        others=() if written is None else (keys[-1],),
    )


def score_gradients(here: Target, do: jax.Array, values: jax.Array, layout: Layout) -> jax.Array:
    """The gradients of the weights among steps, `dO V^T`, `b h t c`; where nothing is read, any.

    From dO, of every head, and values that heads may share.
    """
    b, h, t, width = layout.sizes(do)
    dtype = do.dtype

    def body(do_ref: Any, values_ref: Any, out_ref: Any) -> None:
        at, head, chunk = (jax.lax.axis_index(name) for name in GRID[:3])

        def step(_: Any, asked: Any, value: Any, sums: tuple[Any]) -> tuple[jax.Array, ...]:
            return accumulate(here, (sums[0], [(asked, value.transpose((1, 0)))]))

        def run(out: Any) -> None:
            (found,) = along_channels(
                step,
                width // TILE,
                (zeros(),),
                (layout.of_head(do_ref, at, head), lambda part: (chunk, part)),
                (layout.of_group(values_ref, at, head, h, values), lambda part: (chunk, part)),
            )
            out[...] = found.astype(dtype)
            write(out, out_ref.at[at, head, pl.ds(chunk * TILE, TILE)])

        pl.run_scoped(run, shared_tile(dtype))

    return launch.kernel(
        body,
        here,
        out_type=jax.ShapeDtypeStruct((b, h, t, TILE), dtype),
        name='matrix_state_score_gradients',
        cost=Cost(2 * b * h * t * TILE * width),
        grid=(b, h, t // TILE),
        grid_names=GRID[:3],
        compiler_params=NAMED_LAYOUTS,
    )(do, values)
