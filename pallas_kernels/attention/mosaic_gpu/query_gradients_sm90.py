"""The kernel of `attention` for Hopper that forms the gradients of operands along queries, sums over keys."""

from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.attention.mosaic_gpu import sm90
from pallas_kernels.attention.mosaic_gpu.known import Known, score_gradient, weights_of
from pallas_kernels.attention.mosaic_gpu.sm90 import DOWN, PAD, ROWS, TILE, Arrays, Call, Place
from pallas_kernels.mosaic_gpu.products_sm90 import accumulate, multiply


class QueryGradients(NamedTuple):
    """Gradients of operands along queries.

    Attributes:
      q: `b t h k`.
      sums: over the keys, of the gradients of the scores, `b h t`; or `None`.
      distances: the same, weighted by the distances of queries and keys; or `None`.
      scores: the gradients of the scores themselves, `b h t s`; or `None`.
    """

    q: Any
    sums: Any
    distances: Any
    scores: Any


def query_gradients(call: Call, arrays: Arrays, known: Known, doutput: jax.Array) -> QueryGradients:
    """Returns the gradients of operands along queries; `doutput` is `b t h v`."""
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
        batch, head, turn, warpgroup = (jax.lax.axis_index(name) for name in sm90.AXES)
        group = head // (h // g)
        first = call.first(turn)
        mine = sm90.rows_from(first + warpgroup * ROWS)
        steps = sm90.steps_of(call, operands, batch, group, first)
        q, do, places, copied = scratch
        places = jax.tree.map(lambda place: place.at[warpgroup], places)

        def around(loop: Any) -> None:
            plgpu.copy_gmem_to_smem(operands.q.at[batch, mine, head], q.at[warpgroup], copied.at[warpgroup])
            plgpu.copy_gmem_to_smem(doutput.at[batch, mine, head], do.at[warpgroup], copied.at[warpgroup])
            parts = sm90.row_parts(call, operands, batch, head, mine)
            known = jax.tree.map(lambda ref: call.load(ref.at[batch, head, mine], 0), given)
            plgpu.barrier_wait(copied.at[warpgroup])
            zero = sm90.zeros((ROWS,), DOWN)
            sums = QueryGradients(
                q=sm90.zeros((ROWS, k), TILE),
                sums=None if wanted.sums is None else zero,
                distances=None if wanted.distances is None else zero,
                scores=None,
            )
            _, sums = loop(((parts, known), sums))
            sm90.give((call.rule.scale * sums.q).astype(dtype), q.at[warpgroup], results.q.at[batch, mine, head])
            for array, place, result in zip(sums[1:3], places[1:3], results[1:3], strict=True):
                if array is not None:
                    sm90.give(array, place, result.at[batch, head, mine])
            plgpu.wait_smem_to_gmem(0)

        def step(indices: Any, keys: Any, values: Any, vectors: Any, carry: Any) -> Any:
            (parts, known), sums = carry
            tile = steps.column(indices[0])
            place = Place(first + warpgroup * ROWS, tile * call.step)
            products, dweights = accumulate(
                call.here,
                (None, [(q.at[warpgroup], keys.transpose((1, 0)))]),
                (None, [(do.at[warpgroup], values.transpose((1, 0)))]),
            )

            def pull(products: jax.Array, dweights: jax.Array, *, masked: bool) -> Any:
                every = sm90.column_parts(call, operands, batch, head, parts, vectors, place, masked=masked)
                scored = sm90.score(call, products, every, place, masked=masked)
                dscores = score_gradient(call, scored, known, weights_of(call, scored, known), dweights)
                return QueryGradients(
                    q=scored.pull(dscores).astype(dtype),
                    sums=None if sums.sums is None else sums.sums + jnp.sum(dscores, axis=1),
                    distances=None
                    if sums.distances is None
                    else sums.distances + jnp.sum(dscores * scored.distance.astype(jnp.float32), axis=1),
                    scores=None if wanted.scores is None else dscores,
                )

            found = sm90.where_needed(call, place, steps.alike(tile), pull, products, dweights)
            if found.scores is not None:
                columns = sm90.rows_from(place.key, call.step)
                sm90.give(found.scores, places.scores, results.scores.at[batch, head, mine, columns])
                plgpu.wait_smem_to_gmem(0)
            dq = multiply(call.here, found.q, keys, sums.q)
            return carry[0], found._replace(q=dq, scores=None)

        sm90.over_keys(step, around, call, operands, steps, batch, head, group, first)

    rows = (sm90.WARPGROUPS, ROWS)
    places = QueryGradients(
        q=None,
        sums=None if wanted.sums is None else plgpu.SMEM(rows, jnp.float32),
        distances=None if wanted.distances is None else plgpu.SMEM(rows, jnp.float32),
        scores=None
        if wanted.scores is None
        else plgpu.SMEM((*rows, call.step), jnp.float32, transforms=call.swizzled(4)),
    )
    (gradients,) = sm90.kernel(
        call,
        body,
        name='attention_query_gradients',
        products=2 * k + v,
        heads=b * h,
        out_type=(wanted,),
        grid=(b, h, t // PAD),
        scratch_types=(
            (
                plgpu.SMEM((*rows, k), dtype, transforms=call.swizzled()),
                plgpu.SMEM((*rows, v), dtype, transforms=call.swizzled()),
                places,
                plgpu.Barrier(num_arrivals=2, num_barriers=sm90.WARPGROUPS),
            ),
        ),
    )(arrays, known, doutput)
    return gradients
