"""Matrix products of one warpgroup by Hopper's `wgmma`."""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.target import Target


def multiply(here: Target, left: Any, right: Any, onto: jax.Array | None = None) -> jax.Array:
    """Returns `left @ right`, or `onto + left @ right`, accumulated in float32, by one warpgroup.

    `left` is a tile `m k` in shared memory or in registers, `right` a tile `k n` in shared memory; 16-bit types.
    """
    if here.interpret:
        return _multiply_interpreted(left, right, onto)
    if onto is None:
        product = pl.run_scoped(
            lambda sums: _multiply_into(sums, left, right), plgpu.ACC((left.shape[0], right.shape[1]))
        )
    else:
        product = pl.run_state(lambda sums: plgpu.wgmma(sums, left, right))(plgpu.ACC.init(onto))
    return arrived(product)


def arrived(sums: jax.Array) -> jax.Array:
    """Values read from an accumulator, which may be used only after the wait for its product.

    The wait names no registers, so the compiler could otherwise move arithmetic on them before it.
    """
    return jax.lax.optimization_barrier(sums)


def _multiply_into(sums: Any, left: Any, right: Any) -> jax.Array:
    plgpu.wgmma(sums, left, right)
    return sums[...]


def _multiply_interpreted(left: Any, right: Any, onto: jax.Array | None) -> jax.Array:
    """The interpreter supports neither accumulators with an initial value nor left factors in registers."""
    if isinstance(left, jax.Array):
        product = jnp.dot(left, right[...], preferred_element_type=jnp.float32)
    else:
        product = pl.run_scoped(
            lambda sums: _multiply_into(sums, left, right), plgpu.ACC((left.shape[0], right.shape[1]))
        )
    return product if onto is None else onto + product
