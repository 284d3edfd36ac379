"""The kernels of `attention` for Hopper that form gradients: those of queries, and those of keys and values."""

from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import mosaic_gpu
from pallas_kernels.attention import hopper
from pallas_kernels.attention.hopper import DOWN, PAD, ROWS, TILE, Arrays, Call, Place, Scored


class Known(NamedTuple):
    """What is known of every query, vectors `b h t`.

    Attributes:
      statistics: those of the weight map.
      delta: `sum_j weights_j dweights_j`.
      companion_delta: the same with the second weights, or `None`.
    """

    statistics: tuple[Any, ...]
    delta: Any
    companion_delta: Any


class QueryGradients(NamedTuple):
    """Gradients of what belongs to the queries.

    Attributes:
      q: `b t h k`.
      sums: over the keys, of the gradients of the scores, `b h t`; or `None`.
      distances: the same, weighted with the distances of queries and keys; or `None`.
      scores: the gradients of the scores themselves, `b h t s`; or `None`.
    """

    q: Any
    sums: Any
    distances: Any
    scores: Any


class KeyGradients(NamedTuple):
    """Gradients of what belongs to the keys; those that were not asked for are `None`.

    Attributes:
      k: `b s g k`.
      v: `b s g v`.
      sums: over the queries, of the gradients of the scores, `b h s`.
    """

    k: Any
    v: Any
    sums: Any


def query_gradients(call: Call, arrays: Arrays, known: Known, doutput: jax.Array) -> QueryGradients:
    """Returns the gradients of what belongs to the queries; `doutput` is `b t h v`."""
    b, t, h, k = arrays.q.shape
    s, g, v = arrays.v.shape[1:]
    dtype = arrays.q.dtype
    vector = jax.ShapeDtypeStruct((b, h, t), jnp.float32)
    wanted = QueryGradients(
        q=jax.ShapeDtypeStruct((b, t, h, k), dtype),
        sums=vector if {'forget', 'bias'} & set(arrays.queries) else None,
        distances=None if arrays.slopes is None else vector,
        scores=None if arrays.bias is None else jax.ShapeDtypeStruct((b, h, t, s), jnp.float32),
    )

    def body(operands: Arrays, given: Known, doutput: Any, results: QueryGradients, scratch: Any) -> None:
        batch, head, turn, warpgroup = (jax.lax.axis_index(name) for name in hopper.AXES)
        group = head // (h // g)
        first = call.first(turn)
        mine = hopper.rows_from(first + warpgroup * ROWS)
        steps, column = hopper.steps_of(call, operands, batch, first)
        q, do, places, copied = scratch
        places = jax.tree.map(lambda place: place.at[warpgroup], places)

        def around(loop: Any) -> None:
            plgpu.copy_gmem_to_smem(operands.q.at[batch, mine, head], q.at[warpgroup], copied.at[warpgroup])
            plgpu.copy_gmem_to_smem(doutput.at[batch, mine, head], do.at[warpgroup], copied.at[warpgroup])
            parts = hopper.row_parts(call, operands, batch, head, mine)
            known = jax.tree.map(lambda ref: call.load(ref.at[batch, head, mine], 0), given)
            plgpu.barrier_wait(copied.at[warpgroup])
            zero = hopper.zeros((ROWS,), DOWN)
            sums = QueryGradients(
                q=hopper.zeros((ROWS, k), TILE),
                sums=None if wanted.sums is None else zero,
                distances=None if wanted.distances is None else zero,
                scores=None,
            )
            _, sums = loop(((parts, known), sums))
            hopper.give((call.rule.scale * sums.q).astype(dtype), q.at[warpgroup], results.q.at[batch, mine, head])
            for array, place, result in zip(sums[1:3], places[1:3], results[1:3], strict=True):
                if array is not None:
                    hopper.give(array, place, result.at[batch, head, mine])
            plgpu.wait_smem_to_gmem(0)

        def step(indices: Any, keys: Any, values: Any, vectors: Any, carry: Any) -> Any:
            (parts, known), sums = carry
            place = Place(first + warpgroup * ROWS, column(indices[0]) * call.step)
            products = mosaic_gpu.multiply(call.here, q.at[warpgroup], keys.transpose((1, 0)))
            dweights = mosaic_gpu.multiply(call.here, do.at[warpgroup], values.transpose((1, 0)))
            parts = hopper.column_parts(call, operands, batch, head, parts, vectors, place)

            def pull(products: jax.Array, dweights: jax.Array, *, masked: bool) -> Any:
                scored = hopper.score(call, products, parts, place, masked=masked)
                dscores = _score_gradient(call, scored, known, _weights(call, scored, known), dweights)
                return QueryGradients(
                    q=scored.pull(dscores).astype(dtype),
                    sums=None if sums.sums is None else sums.sums + jnp.sum(dscores, axis=1),
                    distances=None
                    if sums.distances is None
                    else sums.distances + jnp.sum(dscores * scored.distance.astype(jnp.float32), axis=1),
                    scores=None if wanted.scores is None else dscores,
                )

            found = hopper.where_needed(call, place, pull, products, dweights)
            if found.scores is not None:
                columns = hopper.rows_from(place.key, call.step)
                hopper.give(found.scores, places.scores, results.scores.at[batch, head, mine, columns])
                plgpu.wait_smem_to_gmem(0)
            dq = mosaic_gpu.multiply(call.here, found.q, keys, sums.q)
            return carry[0], found._replace(q=dq, scores=None)

        loop = hopper.over_columns(
            step,
            around,
            (steps,),
            (
                hopper.matrix(call, k, column),
                hopper.matrix(call, v, column),
                hopper.vectors(operands.keys, call.step, column),
            ),
        )
        loop(
            operands.k.at[batch, :, group],
            operands.v.at[batch, :, group],
            {name: hopper.at(ref, batch, head) for name, ref in operands.keys.items()},
        )

    rows = (hopper.WARPGROUPS, ROWS)
    places = QueryGradients(
        q=None,
        sums=None if wanted.sums is None else plgpu.SMEM(rows, jnp.float32),
        distances=None if wanted.distances is None else plgpu.SMEM(rows, jnp.float32),
        scores=None
        if wanted.scores is None
        else plgpu.SMEM((*rows, call.step), jnp.float32, transforms=call.swizzled(4)),
    )
    (gradients,) = hopper.kernel(
        call,
        body,
        name='attention_query_gradients',
        out_type=(wanted,),
        grid=(b, h, t // PAD),
        scratch_types=(
            (
                plgpu.SMEM((*rows, k), dtype, transforms=call.swizzled()),
                plgpu.SMEM((*rows, v), dtype, transforms=call.swizzled()),
                places,
                plgpu.Barrier(num_arrivals=2, num_barriers=hopper.WARPGROUPS),
            ),
        ),
    )(arrays, known, doutput)
    return gradients


def key_gradients(
    call: Call, arrays: Arrays, known: Known, doutput: jax.Array, *, of_keys: bool, of_values: bool
) -> KeyGradients:
    """Returns the gradients of what belongs to the keys, summed over the query heads of a group."""
    b, s, g, k = arrays.k.shape
    v, h = arrays.v.shape[3], arrays.q.shape[2]
    r = h // g
    dtype = arrays.q.dtype
    summed = of_keys and bool({'forget', 'bias'} & set(arrays.keys))
    wanted = KeyGradients(
        k=jax.ShapeDtypeStruct((b, s, g, k), dtype) if of_keys else None,
        v=jax.ShapeDtypeStruct((b, s, g, v), dtype) if of_values else None,
        sums=jax.ShapeDtypeStruct((b, h, s), jnp.float32) if summed else None,
    )

    def body(operands: Arrays, given: Known, doutput: Any, results: KeyGradients, scratch: Any) -> None:
        batch, group, turn, warpgroup = (jax.lax.axis_index(name) for name in hopper.AXES)
        first = call.first(turn)
        mine = hopper.rows_from(first + warpgroup * ROWS)
        steps, column = hopper.steps_of(call, operands, batch, first)
        keys, values, totals, copied = scratch

        def around(loop: Any) -> None:
            plgpu.copy_gmem_to_smem(operands.k.at[batch, mine, group], keys.at[warpgroup], copied.at[warpgroup])
            if of_keys:
                plgpu.copy_gmem_to_smem(operands.v.at[batch, mine, group], values.at[warpgroup], copied.at[warpgroup])
            if summed:
                for member in range(r):
                    totals.at[warpgroup, member][...] = hopper.zeros((ROWS,), DOWN)
            plgpu.barrier_wait(copied.at[warpgroup])
            dk, dv = loop(
                (
                    hopper.zeros((ROWS, k), TILE) if of_keys else None,
                    hopper.zeros((ROWS, v), TILE) if of_values else None,
                )
            )
            if of_keys:
                dk = (call.rule.scale * dk).astype(dtype)
                hopper.give(dk, keys.at[warpgroup], results.k.at[batch, mine, group])
            if of_values:
                hopper.give(dv.astype(dtype), values.at[warpgroup], results.v.at[batch, mine, group])
            if summed:
                for member in range(r):
                    total = results.sums.at[batch, group * r + member, mine]
                    plgpu.copy_smem_to_gmem(totals.at[warpgroup, member], total)
            plgpu.wait_smem_to_gmem(0)

        def step(indices: Any, queries: Any, cotangents: Any, vectors: Any, known: Any, carry: Any) -> Any:
            dk, dv = carry
            member, turn = indices
            head = group * r + member
            place = Place(column(turn) * call.step, first + warpgroup * ROWS)
            parts = hopper.row_parts(call, operands, batch, head, mine)
            parts = hopper.column_parts(call, operands, batch, head, parts, vectors, place)
            products = mosaic_gpu.multiply(call.here, keys.at[warpgroup], queries.transpose((1, 0)))
            dweights = None
            if of_keys:
                dweights = mosaic_gpu.multiply(call.here, values.at[warpgroup], cotangents.transpose((1, 0)))
            known = jax.tree.map(lambda ref: call.load(ref, 0), known)
            hopper.have_read()

            def pull(products: jax.Array, dweights: jax.Array | None, *, masked: bool) -> Any:
                scored = hopper.score(call, products, parts, place, masked=masked)
                weights = _weights(call, scored, known)
                if dweights is None:
                    return weights.astype(dtype), None, None
                dscores = _score_gradient(call, scored, known, weights, dweights)
                sums = jnp.sum(dscores, axis=1) if summed else None
                return weights.astype(dtype), scored.pull(dscores).astype(dtype), sums

            weights, dproducts, sums = hopper.where_needed(call, place, pull, products, dweights)
            if of_values:
                dv = mosaic_gpu.multiply(call.here, weights, cotangents, dv)
            if of_keys:
                dk = mosaic_gpu.multiply(call.here, dproducts, queries, dk)
            if summed:
                total = totals.at[warpgroup, member]
                total[...] = plgpu.load(total, layout=DOWN) + sums
            return dk, dv

        def of_group(array: Any) -> Any:
            """The tiles of a vector, of one head of the group after the other."""
            head = (lambda member: group * r + member) if array.shape[0] > 1 else (lambda member: 0)
            return plgpu.BlockSpec((None, call.step), lambda member, turn: (head(member), column(turn)))

        def matrices(channels: int) -> Any:
            return plgpu.BlockSpec(
                (call.step, None, channels),
                lambda member, turn: (column(turn), group * r + member, 0),
                transforms=call.swizzled(),
            )

        here = {name: ref.at[batch if ref.shape[0] > 1 else 0] for name, ref in operands.queries.items()}
        given = jax.tree.map(lambda ref: ref.at[batch], given)
        specs = (matrices(k), matrices(v), jax.tree.map(of_group, here), jax.tree.map(of_group, given))
        loop = hopper.over_columns(step, around, (r, steps), specs)
        loop(operands.q.at[batch], doutput.at[batch], here, given)

    rows = (hopper.WARPGROUPS, ROWS)
    (gradients,) = hopper.kernel(
        call,
        body,
        name='attention_key_gradients',
        out_type=(wanted,),
        grid=(b, g, s // PAD),
        scratch_types=(
            (
                plgpu.SMEM((*rows, k), dtype, transforms=call.swizzled()),
                plgpu.SMEM((*rows, v), dtype, transforms=call.swizzled()),
                plgpu.SMEM((hopper.WARPGROUPS, r, ROWS), jnp.float32) if summed else None,
                plgpu.Barrier(num_arrivals=1 + of_keys, num_barriers=hopper.WARPGROUPS),
            ),
        ),
    )(arrays, known, doutput)
    return gradients


def _weights(call: Call, scored: Scored, known: Known) -> jax.Array:
    """The weights of a tile, computed again; `known` are its numbers of every query."""
    statistics = tuple(call.spread(vector, 0) for vector in known.statistics)
    return call.rule.weights.recompute(scored.block, statistics)


def _score_gradient(call: Call, scored: Scored, known: Known, weights: jax.Array, dweights: jax.Array) -> jax.Array:
    """The gradients of the scores of a tile."""
    spread = jax.tree.map(lambda vector: call.spread(vector, 0), known)
    return call.rule.weights.score_gradient(
        scored.block, weights, spread.statistics, dweights, spread.delta, spread.companion_delta
    )
