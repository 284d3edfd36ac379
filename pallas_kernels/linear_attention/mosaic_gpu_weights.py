"""What the steps of a chunk read and write where key channels have decays of their own, on Hopper GPUs.

With G the log decays summed, a step i reads a step j through `sum_k q_ik k_jk exp(G_ik - G_jk)`. A chunk is cut in
halves, these in halves, and so on down to single steps: the second half of a block reads the first through a product of
`q exp(G - M)` and `k exp(M - G)`, with M the decays up to the middle (the secondary chunking of Yang et al., 2024,
arXiv 2312.06635, all the way down). So a score is in one of seven products of a whole chunk, no exponent is above 0,
and a number has one exponential for each of the six sizes of halves, being in the first or in the second.

Log decays are summed over the very steps between, as products with zeros and ones of two bfloat16 parts. What these
leave out of a sum G, `2^-17 G`, is less than a product loses by rounding its factors, `2^-12`, where `exp(G)` counts.

Kept for the gradients are the arguments alone; the exponentials are taken again.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import mosaic_gpu
from pallas_kernels.linear_attention.mosaic_gpu_tiles import (
    NAMED_LAYOUTS,
    TILE,
    along,
    group,
    iota,
    load,
    shared_tile,
    swizzled,
    write,
    zeros,
)
from pallas_kernels.linear_attention.rows import COUNT, DARKEST, KEPT, REACH, RUN, WRITE
from pallas_kernels.target import Target

HALVES = 6
"""The sizes of halves that a chunk is cut into: 1, 2, 4, ... steps."""


class Steps(NamedTuple):
    """What the steps of a call bring, in whole chunks and tiles.

    Attributes:
      q: `b hq t k`, 16-bit.
      k: `b hk t k`, 16-bit.
      log_decay: `b h t k`, float32.
      rows: `b h l 8 c`, of documents alone, see `rows`.
    """

    q: jax.Array
    k: jax.Array
    log_decay: jax.Array
    rows: jax.Array


class Weights(NamedTuple):
    """What the steps of chunks do, in the type of q but for `erased`.

    Attributes:
      among: what a step reads for its query of what a step of its chunk writes, `b h t c`.
      q: what queries read of the state before the chunk, `b h t k`.
      writes: the keys under which values are in the state after the chunk, `b h t k`.
      erased: what a step reads for its key of what an earlier one of its chunk writes, `b h t c`, float32; or `None`.
      k: what keys read of the state before the chunk, `b h t k`; or `None`.
    """

    among: Any
    q: Any
    writes: Any
    erased: Any = None
    k: Any = None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def weights(here: Target, erases: bool, steps: Steps) -> Weights:
    """Returns the weights of all chunks; what keys read only where they erase."""
    return _find(here, erases, steps)


def _save(here: Target, erases: bool, steps: Steps) -> tuple[Weights, Steps]:
    return weights(here, erases, steps), steps


def _pull(here: Target, erases: bool, steps: Steps, gradients: Weights) -> tuple[Steps]:
    dq, dk, dlog_decay = _find_gradients(here, steps, gradients)
    return (Steps(_shared(steps.q, dq), _shared(steps.k, dk), dlog_decay, jnp.zeros_like(steps.rows)),)


weights.defvjp(_save, _pull)


def factor(steps: Steps) -> jax.Array:
    """What the state before each chunk counts in the one after it, `b h l k`."""
    b, h, t, k = steps.log_decay.shape
    total = jnp.sum(steps.log_decay.reshape(b, h, t // TILE, TILE, k), axis=3)
    return jnp.where(steps.rows[..., RUN, -1:] == 0, jnp.exp(total), 0)


def _find(here: Target, erases: bool, steps: Steps) -> Weights:
    b, h, t, k = steps.log_decay.shape
    dtype, parts = steps.q.dtype, k // TILE

    def out(channels: int, dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((b, h, t, channels), dtype)

    outs = Weights(among=out(TILE, dtype), q=out(k, dtype), writes=out(k, dtype))
    if erases:
        outs = outs._replace(erased=out(TILE, jnp.float32), k=out(k, dtype))
    arrays, structure = jax.tree.flatten(outs)

    def body(q_ref: Any, k_ref: Any, coarse_ref: Any, fine_ref: Any, rows_ref: Any, *out_refs: Any) -> None:
        at, head, chunk = (jax.lax.axis_index(name) for name in ('b', 'h', 'chunk'))
        found = jax.tree.unflatten(structure, [ref.at[at, head, pl.ds(chunk * TILE, TILE)] for ref in out_refs])

        def run(tiles: Weights, keys: Any, numbers: Any, arrived: Any) -> None:
            plgpu.copy_gmem_to_smem(rows_ref.at[at, head, chunk], numbers, arrived)
            plgpu.barrier_wait(arrived)

            def step(turn: Any, q_tile: Any, k_tile: Any, coarse: Any, fine: Any, scores: Any) -> Any:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                decay = functools.partial(_decay, here, coarse, fine)
                own = mosaic_gpu.multiply(here, q_tile, k_tile.transpose((1, 0)))

                def halves(turn: Any, scores: Any) -> Any:
                    by_q, by_k = scores
                    between, pairs = _halves(turn)
                    decayed = decay(between)
                    keys[...] = (load(k_tile) * decayed).astype(dtype)
                    plgpu.commit_smem()
                    read, queries = keys.transpose((1, 0)), (load(q_tile) * decayed).astype(dtype)
                    by_q = by_q + jnp.where(pairs, mosaic_gpu.multiply(here, queries, read), 0)
                    if erases:
                        by_k = by_k + jnp.where(pairs, mosaic_gpu.multiply(here, keys, read), 0)
                    return by_q, by_k

                by_q, by_k = scores
                scores = by_q + jnp.where(iota(0) == iota(1), own, 0), by_k
                scores = jax.lax.fori_loop(0, HALVES, halves, scores)
                reach, writes = (decay(steps) * along(numbers, row, 0) for steps, row in _to_ends())
                tiles.q[...] = (load(q_tile) * reach).astype(dtype)
                if erases:
                    tiles.k[...] = (load(k_tile) * reach).astype(dtype)
                tiles.writes[...] = (load(k_tile) * writes).astype(dtype)
                plgpu.commit_smem()
                channels = pl.ds(turn[0] * TILE, TILE)
                for tile, ref in ((tiles.q, found.q), (tiles.k, found.k), (tiles.writes, found.writes)):
                    if ref is not None:
                        plgpu.copy_smem_to_gmem(tile, ref.at[:, channels])
                return scores

            sources = (
                q_ref.at[at, group(head, h, steps.q)],
                k_ref.at[at, group(head, h, steps.k)],
                coarse_ref.at[at, head],
                fine_ref.at[at, head],
            )
            sums = plgpu.emit_pipeline(
                step,
                grid=(parts,),
                in_specs=[
                    plgpu.BlockSpec((TILE, TILE), lambda part: (chunk, part), transforms=swizzled(ref.dtype))
                    for ref in sources
                ],
                # More would keep a second program out of shared memory.
                max_concurrent_steps=1,
                init_carry=(zeros(), zeros() if erases else None),
            )(*sources)
            one_run = along(numbers, RUN, 0) == along(numbers, RUN, 1)
            for scores, tile, ref in zip(sums, (tiles.among, tiles.erased), (found.among, found.erased), strict=True):
                if ref is not None:
                    tile[...] = jnp.where(one_run, scores, 0).astype(ref.dtype)
                    write(tile, ref)

        pl.run_scoped(
            run,
            jax.tree.map(lambda array: shared_tile(array.dtype), outs),
            shared_tile(dtype),
            plgpu.SMEM((COUNT, TILE), jnp.float32),
            plgpu.Barrier(num_arrivals=1),
        )

    found = mosaic_gpu.kernel(
        body,
        here,
        out_type=tuple(arrays),
        grid=(b, h, t // TILE),
        grid_names=('b', 'h', 'chunk'),
        compiler_params=NAMED_LAYOUTS,
    )(steps.q, steps.k, *_parts(steps.log_decay), steps.rows)
    return jax.tree.unflatten(structure, found)


def _find_gradients(here: Target, steps: Steps, gradients: Weights) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dq, dk and those of the log decays, `b h t k`, of every head; in float32 where heads share the argument.

    The decay of step t is in what queries, or keys that erase, from t on read of what keys before t write, and of the
    state before the chunk, and in what those keys write to the state after it: so it gets sums of `q dq` and `k dk`. A
    query's own key, whose parts would cancel, is left out.
    """
    b, h, t, size = steps.log_decay.shape
    dtype, erases = steps.q.dtype, gradients.erased is not None
    if erases:
        gradients = gradients._replace(erased=gradients.erased.astype(dtype))
    arrays = jax.tree.leaves(gradients)
    types = [dtype if array.shape[1] == h else jnp.float32 for array in (steps.q, steps.k)]

    def body(q_ref: Any, k_ref: Any, coarse_ref: Any, fine_ref: Any, rows_ref: Any, *others: Any) -> None:
        gradient_refs, out_refs = others[: len(arrays)], others[len(arrays) :]
        at, head, chunk, part = (jax.lax.axis_index(name) for name in ('b', 'h', 'chunk', 'part'))
        time, channels = pl.ds(chunk * TILE, TILE), pl.ds(part * TILE, TILE)

        def run(
            given: Any, gradients: Weights, scores: Any, factors: Any, wide: Any, numbers: Any, arrived: Any
        ) -> None:
            groups = (group(head, h, steps.q), group(head, h, steps.k), head, head)
            for ref, index, tile in zip((q_ref, k_ref, coarse_ref, fine_ref), groups, given, strict=True):
                plgpu.copy_gmem_to_smem(ref.at[at, index, time, channels], tile, arrived)
            for ref, array, tile in zip(gradient_refs, arrays, jax.tree.leaves(gradients), strict=True):
                columns = channels if array.shape[3] == size else slice(None)
                plgpu.copy_gmem_to_smem(ref.at[at, head, time, columns], tile, arrived)
            plgpu.copy_gmem_to_smem(rows_ref.at[at, head, chunk], numbers, arrived)
            plgpu.barrier_wait(arrived)
            q_tile, k_tile, coarse, fine = given
            decay = functools.partial(_decay, here, coarse, fine)

            def one_run() -> jax.Array:
                return along(numbers, RUN, 0) == along(numbers, RUN, 1)

            def halves(turn: Any, sums: Any) -> Any:
                dq, dk = sums
                between, pairs = _halves(turn)
                decayed, seen = decay(between), pairs & one_run()
                factors[...] = (load(k_tile) * decayed).astype(dtype)
                if erases:
                    scores[...] = jnp.where(seen, load(gradients.erased), 0).astype(dtype)
                    plgpu.commit_smem()
                    dk = dk + decayed * mosaic_gpu.multiply(here, scores.transpose((1, 0)), factors)
                    # There are no registers left to hold it.
                    wide[...] = load(wide) + decayed * mosaic_gpu.multiply(here, scores, factors)
                scores[...] = jnp.where(seen, load(gradients.among), 0).astype(dtype)
                plgpu.commit_smem()
                dq = dq + decayed * mosaic_gpu.multiply(here, scores, factors)
                factors[...] = (load(q_tile) * decayed).astype(dtype)
                plgpu.commit_smem()
                return dq, dk + decayed * mosaic_gpu.multiply(here, scores.transpose((1, 0)), factors)

            if erases:
                wide[...] = zeros()
            dq, dk = jax.lax.fori_loop(0, HALVES, halves, (zeros(), zeros()))
            reach, writes = (decay(steps) * along(numbers, row, 0) for steps, row in _to_ends())
            dq = dq + reach * load(gradients.q)
            later = load(q_tile) * dq - load(k_tile) * dk
            if erases:
                erasing = load(wide) + reach * load(gradients.k)
                later = later + load(k_tile) * erasing
                dk = dk + erasing
            writes = writes * load(gradients.writes)

            def total(steps: jax.Array, terms: jax.Array, onto: jax.Array | None) -> jax.Array:
                # In two parts, as the decays, which are not needed any more.
                coarse[...] = terms.astype(jnp.bfloat16)
                fine[...] = (terms - load(coarse)).astype(jnp.bfloat16)
                plgpu.commit_smem()
                ones = _ones(steps)
                return mosaic_gpu.multiply(here, ones, fine, mosaic_gpu.multiply(here, ones, coarse, onto))

            before = total(iota(0) > iota(1), load(k_tile) * writes, None)
            wide[...] = total((iota(0) <= iota(1)) & one_run(), later, before) * along(numbers, KEPT, 0)
            write(wide, out_refs[2].at[at, head, time, channels])
            own = jnp.where(iota(0) == iota(1), load(gradients.among), 0).astype(dtype)
            for total_of, other, ref in ((dq, k_tile, out_refs[0]), (dk + writes, q_tile, out_refs[1])):
                tile = factors if ref.dtype == dtype else wide
                tile[...] = mosaic_gpu.multiply(here, own, other, total_of).astype(ref.dtype)
                write(tile, ref.at[at, head, time, channels])

        pl.run_scoped(
            run,
            [shared_tile(dtype)] * 2 + [shared_tile(jnp.bfloat16)] * 2,
            jax.tree.map(lambda array: shared_tile(array.dtype), gradients),
            shared_tile(dtype),
            shared_tile(dtype),
            shared_tile(jnp.float32),
            plgpu.SMEM((COUNT, TILE), jnp.float32),
            plgpu.Barrier(num_arrivals=5 + len(arrays)),
        )

    return mosaic_gpu.kernel(
        body,
        here,
        out_type=tuple(jax.ShapeDtypeStruct((b, h, t, size), dtype) for dtype in (*types, jnp.float32)),
        grid=(b, h, t // TILE, size // TILE),
        grid_names=('b', 'h', 'chunk', 'part'),
        compiler_params=NAMED_LAYOUTS,
    )(steps.q, steps.k, *_parts(steps.log_decay), steps.rows, *arrays)


def _parts(log_decay: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two bfloat16 numbers that add up to a log decay, but for its last 8 bits."""
    dark = jnp.maximum(log_decay, DARKEST)
    coarse = jax.lax.reduce_precision(dark, exponent_bits=8, mantissa_bits=7)
    return coarse.astype(jnp.bfloat16), (dark - coarse).astype(jnp.bfloat16)


def _halves(turn: Any) -> tuple[jax.Array, jax.Array]:
    """The steps that decay between a step and the middle of its block, for one size of blocks, and who reads whom.

    A step of a second half has decayed since the middle, its own decay included; one of a first half decays until then.
    """
    size = jax.lax.shift_left(jnp.int32(1), turn)
    step, other = iota(0), iota(1)
    apart, second = step ^ other, (step & size) != 0
    between = (apart < size) & ((second & (other <= step)) | (~second & (other > step)))
    return between, (step > other) & (apart >= size) & (apart < 2 * size)


def _to_ends() -> tuple[tuple[jax.Array, int], tuple[jax.Array, int]]:
    """The steps that decay from the start of the chunk up to a step, and after it; and the rows that say who counts."""
    return (iota(0) >= iota(1), REACH), (iota(0) < iota(1), WRITE)


def _ones(steps: jax.Array) -> jax.Array:
    return jnp.where(steps, 1.0, 0.0).astype(jnp.bfloat16)


def _decay(here: Target, coarse: Any, fine: Any, steps: jax.Array) -> jax.Array:
    """What is left after the decays of so many steps, marked for every step of a tile."""
    ones = _ones(steps)
    return jnp.exp(mosaic_gpu.multiply(here, ones, fine, mosaic_gpu.multiply(here, ones, coarse)))


def _shared(argument: jax.Array, gradient: jax.Array) -> jax.Array:
    """The gradient of an argument, summed over the heads that share it."""
    b, h, *rest = argument.shape
    return jnp.sum(gradient.reshape(b, h, -1, *rest), axis=2).astype(argument.dtype)
