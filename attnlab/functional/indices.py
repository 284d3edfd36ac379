"""Whole numbers that choose from a table: labels and tokens."""

import jax
import numpy as np
from jax import Array
from jaxtyping import Int

from attnlab.errors import UserError


def check_indices(what: str, indices: Int[Array | np.ndarray, '...'], size: int, of: str, lowest: int = 0) -> None:
    """Raises `UserError` for entries that are not from `lowest` to `size - 1`: a table of that size has no such row.

    Args:
      what: what the entries are, for the message, such as 'labels'.
      indices: the entries. Under `jax.jit` their values are not at hand, and nothing is checked; of an array over
        several processes, each checks its own part.
      size: how many rows the table has.
      of: what the rows are, for the message, such as 'classes'.
      lowest: below 0 where entries from there to -1 stand for none.
    """
    if isinstance(indices, jax.core.Tracer) or indices.size == 0:
        return
    # By numpy: inside of a trace, JAX would trace the minimum even of an array whose values are at hand.
    shards = [shard.data for shard in indices.addressable_shards] if isinstance(indices, Array) else [indices]
    here = [np.asarray(shard) for shard in shards]
    least, most = min(int(part.min()) for part in here), max(int(part.max()) for part in here)
    if least < lowest or most >= size:
        raise UserError(
            f'{what} are from {least} to {most}; there are {size} {of}, so they must be from {lowest} to {size - 1}'
        )
