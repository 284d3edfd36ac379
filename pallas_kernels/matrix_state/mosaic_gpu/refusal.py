"""Which calls the kernels for Hopper cannot serve."""

import jax
import jax.numpy as jnp

from pallas_kernels import tiling
from pallas_kernels.matrix_state.mosaic_gpu.tiles import TILE
from pallas_kernels.mosaic_gpu import launch
from pallas_kernels.target import Target

MOST = TILE**2
"""The most key channels with decays of their own: of 64 each, the levels of a chunk are in a row of 64 numbers."""


def refusal(
    here: Target,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array | None,
    state: jax.Array,
    *others: jax.Array,
) -> str | None:
    """The reason why the call cannot be served, or `None`; `others` are multiplied too."""
    operands = jnp.result_type(q, k, v, *others)
    given = 'operands' if others else 'q, k and v'
    if operands.itemsize != 2 or state.dtype != jnp.float32:
        return (
            f'{given} have type {operands}, the state {state.dtype}; expected bfloat16 or float16, and float32: '
            'products of float32 would be rounded to the 10 bits of tf32'
        )
    b, h, channels, columns = state.shape
    if log_decay is not None and log_decay.shape[3] > 1 and channels > MOST:
        return f'q and k have {channels} channels; expected at most {MOST} with decays of their own'
    grid = launch.grid_refusal(b=b, h=h, chunks=-(-q.shape[1] // TILE), columns=-(-columns // TILE))
    return grid or launch.capability_refusal(here)


def of_columns(
    here: Target,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    log_decay: jax.Array | None,
    state: jax.Array,
    *others: jax.Array,
) -> str | None:
    """The reason why the call cannot be served where one program sweeps over all key channels, or `None`."""
    if tiling.delta_rule_hopper(state.shape[2], 3) is None:
        return f'q and k have {state.shape[2]} channels; expected at most 256, as one program holds a whole column'
    return refusal(here, q, k, v, log_decay, state, *others)
