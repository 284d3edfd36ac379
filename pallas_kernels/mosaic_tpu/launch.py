"""How Mosaic TPU kernels are started."""

from collections.abc import Callable
from typing import Any

import jax.experimental.pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.target import Target

LANES = 128
"""The last dimension of a register: that of a block is a multiple of it, or the whole."""


def call(
    body: Callable[..., None],
    here: Target,
    *,
    name: str,
    compiler_params: pltpu.CompilerParams | None = None,
    **options: Any,
) -> Callable[..., Any]:
    """`pl.pallas_call`, interpreted where `here` says so; memory nobody wrote then holds NaN.

    `name` is what profilers show.
    """
    if here.interpret:
        # The interpreter has no use for the compiler's parameters, and under vmap takes offence at them.
        return pl.pallas_call(body, name=name, interpret=pltpu.InterpretParams(), **options)
    return pl.pallas_call(body, name=name, compiler_params=compiler_params, **options)
