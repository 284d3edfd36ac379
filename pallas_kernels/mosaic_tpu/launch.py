"""How Mosaic TPU kernels are started."""

from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.cost import Cost
from pallas_kernels.target import Target

OLDER = ('TPU v2', 'TPU v3', 'TPU v4', 'TPU v4 lite')
"""JAX's names of the kinds before v5e: they have 16 MiB of VMEM, and up to v3 no products of bfloat16 in kernels."""


def generation_refusal(here: Target) -> str | None:
    """The reason why a device is too old for kernels, or `None`."""
    return f'the device is a {here.kind}; expected TPU v5e or later' if here.kind in OLDER else None


def factor_type(*arrays: jax.Array) -> jnp.dtype:
    """The type of the factors of a product: there is no matrix unit for other 16-bit numbers than bfloat16."""
    dtype = jnp.result_type(*arrays)
    return dtype if dtype == jnp.bfloat16 else jnp.dtype(jnp.float32)


def widened(array: jax.Array) -> jax.Array:
    """The array as a kernel can load it: TPUs have no vectors of float16, which becomes float32."""
    return array.astype(jnp.float32) if array.dtype == jnp.float16 else array


def call(
    body: Callable[..., None],
    here: Target,
    *,
    name: str,
    cost: Cost,
    out_shape: Any,
    compiler_params: pltpu.CompilerParams | None = None,
    **options: Any,
) -> Callable[..., Any]:
    """`pl.pallas_call`, interpreted where `here` says so; memory not yet written then holds NaN.

    `name` is shown by profilers, `cost` is the estimate for the compiler.
    """

    def run(*operands: Any) -> Any:
        if here.interpret:
            # The interpreter ignores compiler parameters, and fails with them under vmap.
            how: dict[str, Any] = {'interpret': pltpu.InterpretParams()}
        else:
            estimate = cost.estimate(operands, out_shape)
            how = {'compiler_params': compiler_params, 'cost_estimate': estimate}
        return pl.pallas_call(body, name=name, out_shape=out_shape, **how, **options)(*operands)

    return run
