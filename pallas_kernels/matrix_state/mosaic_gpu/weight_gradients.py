"""The kernel that computes the gradients of `weights`."""

import functools
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.cost import Cost, halved_products
from pallas_kernels.matrix_state.decays import COUNT, KEPT, RUN
from pallas_kernels.matrix_state.mosaic_gpu.channel_decays import (
    HALVES,
    Steps,
    Weights,
    decay_over,
    halves_of,
    level_of,
    levels,
    ones_where,
    put_decays,
    same_block,
    to_ends,
    within_blocks,
)
from pallas_kernels.matrix_state.mosaic_gpu.tiles import (
    HEADS_FIRST,
    NAMED_LAYOUTS,
    TILE,
    Layout,
    along,
    hidden_zero,
    iota,
    load,
    shared_tile,
    write,
)
from pallas_kernels.mosaic_gpu import launch
from pallas_kernels.mosaic_gpu.products_sm90 import accumulate, multiply
from pallas_kernels.target import Target


class Tiles(NamedTuple):
    """What a program holds in shared memory, `64 64` except for the last three.

    Attributes:
      q, k: of the steps.
      coarse, fine: their log decays, as two numbers of bfloat16; once these are no longer needed, terms of `_summed`.
      gradients: those of the weights.
      scores, factors: of the next product, in the type of q.
      wide: float32, the log decays, then the gradients of erasing keys, then what is written.
      numbers: the rows of decays, `8 64`.
      levels: see `channel_decays.levels`, `1 64`.
      ends: the gradients of the log of the decay over the chunk, `1 64`; empty without them.
    """

    q: Any
    k: Any
    coarse: Any
    fine: Any
    gradients: Weights
    scores: Any
    factors: Any
    wide: Any
    numbers: Any
    levels: Any
    ends: list[Any]

    @property
    def erases(self) -> bool:
        return self.gradients.erased is not None

    def put_factors(self, factors: jax.Array) -> None:
        self.factors[...] = factors.astype(self.factors.dtype)
        plgpu.commit_smem()

    def put_scores(self, scores: jax.Array) -> None:
        self.scores[...] = scores.astype(self.scores.dtype)
        plgpu.commit_smem()


class Pairs(NamedTuple):
    """Pairs of steps: of a row and of a column of a tile, from `origin`; and the level of the smallest blocks."""

    origin: Any
    step: jax.Array
    other: jax.Array
    level: Any

    def of_one_document(self, numbers: Any) -> jax.Array:
        return along(numbers, RUN, 0) == along(numbers, RUN, 1)


def weight_gradients(
    here: Target, steps: Steps, gradients: Weights, layout: Layout = HEADS_FIRST, ends: jax.Array | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """dq, dk and those of the log decays of every head, as `steps` lie; in float32 where heads share the argument.

    `ends`, `b h l k`, float32, are those of the log of `channel_decays.factor`, where they are to be in these too.

    The decay of step t is in the reads by queries, or erasing keys, from t on of writes before t and of the state
    before the chunk, and in the writes of earlier keys to the state after it, so its gradient is a sum of `q dq` and `k
    dk`. A query's own key, whose parts would cancel, is left out.
    """
    b, h, t, size = layout.sizes(steps.log_decay)
    dtype, erases = steps.q.dtype, gradients.erased is not None
    gradients = jax.tree.map(lambda array: array.astype(dtype), gradients)
    arrays = jax.tree.leaves(gradients)
    over_chunks = [] if ends is None else [ends.reshape(b, h, t // TILE, size // TILE, TILE)]
    types = [dtype if array.shape[layout.heads] == h else jnp.float32 for array in (steps.q, steps.k)]

    def body(q_ref: Any, k_ref: Any, decay_ref: Any, levels_ref: Any, rows_ref: Any, *others: Any) -> None:
        gradient_refs, rest = others[: len(arrays)], others[len(arrays) :]
        ends_ref, out_refs = rest[:-3], rest[-3:]
        at, head, chunk, part = (jax.lax.axis_index(name) for name in ('b', 'h', 'chunk', 'part'))
        time, channels = pl.ds(chunk * TILE, TILE), pl.ds(part * TILE, TILE)

        def run(tiles: Tiles, arrived: Any) -> None:
            sources = (
                layout.of_group(q_ref, at, head, h, steps.q),
                layout.of_group(k_ref, at, head, h, steps.k),
                layout.of_head(decay_ref, at, head),
            )
            for ref, tile in zip(sources, (tiles.q, tiles.k, tiles.wide), strict=True):
                plgpu.copy_gmem_to_smem(ref.at[time, channels], tile, arrived)
            for ref, array, tile in zip(gradient_refs, arrays, jax.tree.leaves(tiles.gradients), strict=True):
                columns = channels if array.shape[3] == size else slice(None)
                plgpu.copy_gmem_to_smem(ref.at[at, head, time, columns], tile, arrived)
            plgpu.copy_gmem_to_smem(rows_ref.at[at, head, chunk], tiles.numbers, arrived)
            plgpu.copy_gmem_to_smem(levels_ref.at[at, head, chunk], tiles.levels, arrived)
            for ref, tile in zip(ends_ref, tiles.ends, strict=True):
                plgpu.copy_gmem_to_smem(ref.at[at, head, chunk, pl.ds(part, 1)], tile, arrived)
            plgpu.barrier_wait(arrived)
            put_decays((tiles.coarse, tiles.fine), tiles.wide)
            origin = hidden_zero(tiles.numbers)
            pairs = Pairs(origin, iota(0, origin), iota(1), level_of(tiles.levels, part))
            dq, dk = jax.lax.fori_loop(
                pairs.level,
                HALVES,
                functools.partial(_of_halves, here, tiles, pairs),
                _of_blocks(here, tiles, pairs),
            )
            reach, writes = (
                decay_over(here, tiles.coarse, tiles.fine, steps) * along(tiles.numbers, row, 0)
                for steps, row in to_ends(origin)
            )
            dq = dq + reach * load(tiles.gradients.q)
            later = load(tiles.q) * dq - load(tiles.k) * dk
            if erases:
                erasing = load(tiles.wide) + reach * load(tiles.gradients.k)
                later = later + load(tiles.k) * erasing
                dk = dk + erasing
            writes = writes * load(tiles.gradients.writes)
            tiles.wide[...] = _of_log_decays(here, tiles, pairs, writes, later)
            outs = [layout.of_head(ref, at, head).at[time, channels] for ref in out_refs]
            write(tiles.wide, outs[2])
            own = jnp.where(pairs.step == pairs.other, load(tiles.gradients.among), 0).astype(dtype)
            for total, factor, ref in ((dq, tiles.k, outs[0]), (dk + writes, tiles.q, outs[1])):
                tile = tiles.factors if ref.dtype == dtype else tiles.wide
                tile[...] = multiply(here, own, factor, total).astype(ref.dtype)
                write(tile, ref)

        pl.run_scoped(
            run,
            Tiles(
                q=shared_tile(dtype),
                k=shared_tile(dtype),
                coarse=shared_tile(jnp.bfloat16),
                fine=shared_tile(jnp.bfloat16),
                gradients=jax.tree.map(lambda array: shared_tile(array.dtype), gradients),
                scores=shared_tile(dtype),
                factors=shared_tile(dtype),
                wide=shared_tile(jnp.float32),
                numbers=plgpu.SMEM((COUNT, TILE), jnp.float32),
                levels=plgpu.SMEM((1, TILE), jnp.float32),
                ends=[plgpu.SMEM((1, TILE), jnp.float32)] * len(over_chunks),
            ),
            plgpu.Barrier(num_arrivals=5 + len(arrays) + len(over_chunks)),
        )

    return launch.kernel(
        body,
        here,
        out_type=tuple(jax.ShapeDtypeStruct(layout.shape(b, h, t, size), dtype) for dtype in (*types, jnp.float32)),
        name='matrix_state_weight_gradients',
        cost=Cost(
            flops=2 * b * h * t * size * TILE * halved_products(erases=erases)[1],
            exponentials=b * h * t * size * (HALVES + 4),
        ),
        grid=(b, h, t // TILE, size // TILE),
        grid_names=('b', 'h', 'chunk', 'part'),
        compiler_params=NAMED_LAYOUTS,
    )(steps.q, steps.k, steps.log_decay, levels(steps.log_decay, dtype, layout), steps.rows, *arrays, *over_chunks)


def _of_blocks(here: Target, tiles: Tiles, pairs: Pairs) -> tuple[jax.Array, jax.Array]:
    """What the smallest blocks give to dq and dk; that of erasing keys is left in `wide`."""
    to, back = within_blocks(here, tiles.coarse, tiles.fine, pairs.level, pairs.origin)
    seen = same_block(pairs.level, pairs.origin) & (pairs.step > pairs.other) & pairs.of_one_document(tiles.numbers)
    tiles.factors[...] = (load(tiles.k) * back).astype(tiles.factors.dtype)
    if tiles.erases:
        tiles.put_scores(jnp.where(seen, load(tiles.gradients.erased), 0))
        tiles.wide[...] = to * multiply(here, tiles.scores, tiles.factors)
    tiles.put_scores(jnp.where(seen, load(tiles.gradients.among), 0))
    dq = to * multiply(here, tiles.scores, tiles.factors)
    tiles.put_factors(load(tiles.q) * to)
    dk = back * multiply(here, tiles.scores.transpose((1, 0)), tiles.factors)
    if tiles.erases:
        tiles.scores[...] = jnp.where(seen, load(tiles.gradients.erased), 0).astype(tiles.scores.dtype)
        tiles.put_factors(load(tiles.k) * to)
        dk = dk + back * multiply(here, tiles.scores.transpose((1, 0)), tiles.factors)
    return dq, dk


def _of_halves(
    here: Target, tiles: Tiles, pairs: Pairs, turn: Any, sums: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Adds to dq and dk, and to `wide`, what halves of `2^turn` steps give, the first read by the second."""
    dq, dk = sums
    between, reads = halves_of(jax.lax.shift_left(jnp.int32(1), turn), pairs.origin)
    decayed = decay_over(here, tiles.coarse, tiles.fine, between)
    seen = reads & pairs.of_one_document(tiles.numbers)
    tiles.factors[...] = (load(tiles.k) * decayed).astype(tiles.factors.dtype)
    if tiles.erases:
        tiles.put_scores(jnp.where(seen, load(tiles.gradients.erased), 0))
        written, read = accumulate(
            here,
            (None, [(tiles.scores.transpose((1, 0)), tiles.factors)]),
            (None, [(tiles.scores, tiles.factors)]),
        )
        dk = dk + decayed * written
        # No registers are left to hold it.
        tiles.wide[...] = load(tiles.wide) + decayed * read
    tiles.put_scores(jnp.where(seen, load(tiles.gradients.among), 0))
    dq = dq + decayed * multiply(here, tiles.scores, tiles.factors)
    tiles.put_factors(load(tiles.q) * decayed)
    return dq, dk + decayed * multiply(here, tiles.scores.transpose((1, 0)), tiles.factors)


def _of_log_decays(here: Target, tiles: Tiles, pairs: Pairs, writes: jax.Array, later: jax.Array) -> jax.Array:
    """The gradients of log decays: sums of what steps before write to the state, and of `later` from a step on."""
    before = _summed(here, tiles, pairs.step > pairs.other, load(tiles.k) * writes, None)
    from_now = (pairs.step <= pairs.other) & pairs.of_one_document(tiles.numbers)
    of_steps = _summed(here, tiles, from_now, later, before) * along(tiles.numbers, KEPT, 0)
    return sum((along(tile, 0, 1) for tile in tiles.ends), of_steps)


def _summed(here: Target, tiles: Tiles, steps: jax.Array, terms: jax.Array, onto: jax.Array | None) -> jax.Array:
    """The terms of the marked steps, summed for every step of a tile."""
    # In two parts, in place of the decays, which are no longer needed.
    tiles.coarse[...] = terms.astype(jnp.bfloat16)
    tiles.fine[...] = (terms - load(tiles.coarse)).astype(jnp.bfloat16)
    plgpu.commit_smem()
    ones = ones_where(steps)
    (found,) = accumulate(here, (onto, [(ones, tiles.coarse), (ones, tiles.fine)]))
    return found
