"""Matrix products of one warpgroup by Hopper's `wgmma`."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.target import Target


def multiply(
    here: Target, left: Any, right: Any, onto: jax.Array | None = None, *, meanwhile: Callable[[], None] | None = None
) -> jax.Array:
    """Returns `left @ right`, or `onto + left @ right`, accumulated in float32, by one warpgroup.

    `left` is a tile `m k` in shared memory or in registers, `right` a tile `k n` in shared memory; 16-bit types.
    `meanwhile` is called between its start and the wait for it.
    """
    if here.interpret:
        product = _multiply_interpreted(left, right, onto)
        if meanwhile is not None:
            meanwhile()
        return product
    if onto is None:
        product = pl.run_scoped(
            lambda sums: _multiply_into(sums, left, right, meanwhile), plgpu.ACC((left.shape[0], right.shape[1]))
        )
    else:
        product = pl.run_state(lambda sums: _issue(sums, left, right, meanwhile))(plgpu.ACC.init(onto))
    return arrived(product)


def accumulate(here: Target, *sums: tuple[jax.Array | None, Sequence[tuple[Any, Any]]]) -> tuple[jax.Array, ...]:
    """Returns every `onto + sum of left @ right` of pairs `(onto, [(left, right), ...])`, or without onto.

    All products are in flight at once, those of a sum in order, and waited for once. Factors are as in `multiply`.
    """
    if here.interpret:
        return tuple(_accumulate_interpreted(onto, factors) for onto, factors in sums)

    def issue(refs: Any) -> None:
        for ref, (_, factors) in zip(refs, sums, strict=True):
            for left, right in factors:
                plgpu.wgmma(ref, left, right)

    start = [_zeros(factors[0]) if onto is None else onto for onto, factors in sums]
    return tuple(arrived(part) for part in pl.run_state(issue)([plgpu.ACC.init(part) for part in start]))


def _zeros(factors: tuple[Any, Any]) -> jax.Array:
    left, right = factors
    return plgpu.layout_cast(jnp.zeros((left.shape[0], right.shape[1]), jnp.float32), plgpu.Layout.WGMMA)


def _accumulate_interpreted(onto: jax.Array | None, factors: Sequence[tuple[Any, Any]]) -> jax.Array:
    for left, right in factors:
        onto = _multiply_interpreted(left, right, onto)
    assert onto is not None
    return onto


def arrived(sums: jax.Array) -> jax.Array:
    """Values read from an accumulator, which may be used only after the wait for its product.

    The wait names no registers, so the compiler could otherwise move arithmetic on them before it.
    """
    return jax.lax.optimization_barrier(sums)


def _multiply_into(sums: Any, left: Any, right: Any, meanwhile: Callable[[], None] | None = None) -> jax.Array:
    _issue(sums, left, right, meanwhile)
    return sums[...]


def _issue(sums: Any, left: Any, right: Any, meanwhile: Callable[[], None] | None) -> None:
    plgpu.wgmma(sums, left, right)
    if meanwhile is not None:
        meanwhile()


def _multiply_interpreted(left: Any, right: Any, onto: jax.Array | None) -> jax.Array:
    """The interpreter supports neither accumulators with an initial value nor left factors in registers."""
    if isinstance(left, jax.Array):
        product = jnp.dot(left, right[...], preferred_element_type=jnp.float32)
    else:
        product = pl.run_scoped(
            lambda sums: _multiply_into(sums, left, right), plgpu.ACC((left.shape[0], right.shape[1]))
        )
    return product if onto is None else onto + product
