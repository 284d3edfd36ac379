"""The metrics of a source, summed over all of its rows."""

import jax
import numpy as np
from flax import nnx

from attnlab.data.pipeline import Source, ordered_batches
from attnlab.metrics import Average
from attnlab.train.partition import batch_shards, feed
from attnlab.train.setup import Setup


def totals(setup: Setup, variables: nnx.State, source: Source, length: int) -> dict[str, Average]:
    """The task's metrics over every row of `source`, of `length` tokens each, in float64."""
    index, count = feed(setup.mesh)
    total: dict[str, Average] = {}
    with ordered_batches(source, batch_size=_rows(setup, length), process_index=index, process_count=count) as batches:
        for batch in batches:
            averages = jax.device_get(setup.measure(variables, setup.place(batch)))
            found = jax.tree.map(lambda x: np.asarray(x, np.float64), averages)
            total = {name: average.merge(total[name]) if total else average for name, average in found.items()}
    return total


def curve(average: Average) -> np.ndarray:
    """The mean by position, NaN where nothing was counted."""
    empty = np.full(average.total.shape, np.nan)
    return np.divide(average.total, average.count, out=empty, where=average.count > 0)


def _rows(setup: Setup, length: int) -> int:
    """Rows of an evaluation batch: as many tokens as training computes at a time, as what fits is known of those alone.

    A multiple of the batch shards of the mesh.
    """
    shards = batch_shards(setup.mesh)
    return max(1, setup.rows_of_part * setup.length // length // shards) * shards
