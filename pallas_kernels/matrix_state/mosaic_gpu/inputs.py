"""The arguments of a call as the kernels for Hopper take them, but for decays of key channels."""

from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp

from pallas_kernels.matrix_state import decays
from pallas_kernels.matrix_state.differentiation import Arrays
from pallas_kernels.matrix_state.mosaic_gpu.tiles import TILE, TIME_FIRST, fill


class Inputs(NamedTuple):
    """A call in whole chunks and tiles.

    Attributes:
      q: `b t hq k`.
      k: `b t hk k`.
      v: `b t hv v`.
      rows: `b h l 8 c`, see `matrix_state.decays`.
      state: `b h k v`.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    rows: jax.Array
    state: jax.Array

    def type_of_gradient(self, argument: jax.Array) -> Any:
        """That of every head's: gradients of what heads share, `b t h k`, are summed before they are rounded."""
        return self.v.dtype if argument.shape[2] == self.state.shape[1] else jnp.float32


def inputs_of(arrays: Arrays) -> Inputs:
    """Fills the arrays, heads after time, and computes the rows, of documents alone where key channels decay apart."""
    b, h = arrays.state.shape[:2]
    t = pl.cdiv(arrays.q.shape[1], TILE) * TILE
    decay = arrays.log_decay
    one = None if decay is None or decay.shape[3] > 1 else TIME_FIRST.heads_first(decay)
    rows = decays.rows(one, arrays.starts, t, TILE)
    return Inputs(
        q=TIME_FIRST.fill(arrays.q),
        k=TIME_FIRST.fill(arrays.k),
        v=TIME_FIRST.fill(arrays.v),
        rows=jnp.broadcast_to(rows, (b, h, *rows.shape[2:])),
        state=fill(arrays.state),
    )


def strengths(arrays: Arrays, inputs: Inputs) -> jax.Array:
    """The number that a rule has of every step of a chunk, `b h l 1 c`, zero in padding."""
    (beta,) = arrays.numbers
    b, h, l, _, c = inputs.rows.shape
    filled = jnp.pad(beta, ((0, 0), (0, l * c - beta.shape[1]), (0, 0)))
    return jnp.moveaxis(filled, 2, 1).reshape(b, h, l, 1, c)


def of_steps(array: jax.Array, t: int) -> jax.Array:
    """`b h t` without padding, `b t h`."""
    return jnp.moveaxis(array, 1, 2)[:, :t]
