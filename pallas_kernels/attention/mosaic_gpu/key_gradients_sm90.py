"""The kernel of `attention` for Hopper that forms the gradients of keys and values, sums over queries."""

from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.attention.mosaic_gpu import sm90
from pallas_kernels.attention.mosaic_gpu.known import Known, score_gradient, weights_of
from pallas_kernels.attention.mosaic_gpu.sm90 import DOWN, PAD, ROWS, TILE, Arrays, Call, Place
from pallas_kernels.mosaic_gpu.products_sm90 import accumulate, multiply


class KeyGradients(NamedTuple):
    """Gradients of the operands along keys; those not requested are `None`.

    Attributes:
      k: `b s g k`.
      v: `b s g v`.
      sums: over the queries, of the gradients of the scores, `b h s`.
    """

    k: Any
    v: Any
    sums: Any


def key_gradients(
    call: Call, arrays: Arrays, known: Known, doutput: jax.Array, *, of_keys: bool, of_values: bool
) -> KeyGradients:
    """Returns the gradients of operands along keys, summed over the query heads of a group."""
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
        batch, group, turn, warpgroup = (jax.lax.axis_index(name) for name in sm90.AXES)
        first = call.first(turn)
        mine = sm90.rows_from(first + warpgroup * ROWS)
        steps = sm90.steps_of(call, operands, batch, group, first)
        keys, values, totals, copied = scratch

        def around(loop: Any) -> None:
            plgpu.copy_gmem_to_smem(operands.k.at[batch, mine, group], keys.at[warpgroup], copied.at[warpgroup])
            if of_keys:
                plgpu.copy_gmem_to_smem(operands.v.at[batch, mine, group], values.at[warpgroup], copied.at[warpgroup])
            if summed:
                for member in range(r):
                    totals.at[warpgroup, member][...] = sm90.zeros((ROWS,), DOWN)
            plgpu.barrier_wait(copied.at[warpgroup])
            dk, dv = loop(
                (
                    sm90.zeros((ROWS, k), TILE) if of_keys else None,
                    sm90.zeros((ROWS, v), TILE) if of_values else None,
                )
            )
            if of_keys:
                dk = (call.rule.scale * dk).astype(dtype)
                sm90.give(dk, keys.at[warpgroup], results.k.at[batch, mine, group])
            if of_values:
                sm90.give(dv.astype(dtype), values.at[warpgroup], results.v.at[batch, mine, group])
            if summed:
                # The commit of dk, which sums are never without, is theirs too.
                for member in range(r):
                    total = results.sums.at[batch, group * r + member, mine]
                    plgpu.copy_smem_to_gmem(totals.at[warpgroup, member], total)
            plgpu.wait_smem_to_gmem(0)

        def step(indices: Any, queries: Any, cotangents: Any, vectors: Any, known: Any, carry: Any) -> Any:
            dk, dv = carry
            member, turn = indices
            head = group * r + member
            tile = steps.column(turn)
            place = Place(tile * call.step, first + warpgroup * ROWS)
            parts = sm90.row_parts(call, operands, batch, head, mine)
            factors = [(keys.at[warpgroup], queries), *([(values.at[warpgroup], cotangents)] if of_keys else [])]
            products, *dweights = (multiply(call.here, left, right.transpose((1, 0))) for left, right in factors)
            known = jax.tree.map(lambda ref: call.load(ref, 0), known)
            sm90.have_read()

            def pull(products: jax.Array, *dweights: jax.Array, masked: bool) -> Any:
                every = sm90.column_parts(call, operands, batch, head, parts, vectors, place, masked=masked)
                scored = sm90.score(call, products, every, place, masked=masked)
                weights = weights_of(call, scored, known)
                if not dweights:
                    return weights.astype(dtype), None, None
                dscores = score_gradient(call, scored, known, weights, *dweights)
                sums = jnp.sum(dscores, axis=1) if summed else None
                return weights.astype(dtype), scored.pull(dscores).astype(dtype), sums

            weights, dproducts, sums = sm90.where_needed(call, place, steps.alike(tile), pull, products, *dweights)
            dk, dv = _added(call, (dk, dv), dproducts, queries, weights, cotangents)
            if summed:
                total = totals.at[warpgroup, member]
                total[...] = plgpu.load(total, layout=DOWN) + sums
            return dk, dv

        def of_group(array: Any) -> Any:
            """The tiles of a vector, head by head of the group."""
            head = (lambda member: group * r + member) if array.shape[0] > 1 else (lambda member: 0)
            return plgpu.BlockSpec((None, call.step), lambda member, turn: (head(member), steps.column(turn)))

        def matrices(channels: int) -> Any:
            return plgpu.BlockSpec(
                (call.step, None, channels),
                lambda member, turn: (steps.column(turn), group * r + member, 0),
                transforms=call.swizzled(),
            )

        of_queries = {name: ref.at[batch if ref.shape[0] > 1 else 0] for name, ref in operands.queries.items()}
        vectors = jax.tree.map(of_group, of_queries)
        if operands.words is not None:
            of_queries['words'] = operands.words.at[batch, group]
            vectors['words'] = plgpu.BlockSpec(
                (None, call.step), lambda member, turn: (first // PAD, steps.column(turn))
            )
        given = jax.tree.map(lambda ref: ref.at[batch], given)
        specs = (matrices(k), matrices(v), vectors, jax.tree.map(of_group, given))
        loop = sm90.over_columns(step, around, (r, steps.count), specs)
        loop(operands.q.at[batch], doutput.at[batch], of_queries, given)

    rows = (sm90.WARPGROUPS, ROWS)
    (gradients,) = sm90.kernel(
        call,
        body,
        name='attention_key_gradients',
        products=k + of_keys * (k + v) + of_values * v,
        heads=b * h,
        out_type=(wanted,),
        grid=(b, g, s // PAD),
        scratch_types=(
            (
                plgpu.SMEM((*rows, k), dtype, transforms=call.swizzled()),
                plgpu.SMEM((*rows, v), dtype, transforms=call.swizzled()),
                plgpu.SMEM((sm90.WARPGROUPS, r, ROWS), jnp.float32) if summed else None,
                plgpu.Barrier(num_arrivals=1 + of_keys, num_barriers=sm90.WARPGROUPS),
            ),
        ),
    )(arrays, known, doutput)
    return gradients


def _added(
    call: Call, sums: tuple[Any, Any], dproducts: Any, queries: Any, weights: jax.Array, cotangents: Any
) -> tuple[Any, Any]:
    """The sums `(dk, dv)`, of which one may be `None`, with what a tile of queries gives."""
    dk, dv = sums
    if dk is None:
        return None, multiply(call.here, weights, cotangents, dv)
    if dv is None:
        return multiply(call.here, dproducts, queries, dk), None
    dv, dk = accumulate(call.here, (dv, [(weights, cotangents)]), (dk, [(dproducts, queries)]))
    return dk, dv
