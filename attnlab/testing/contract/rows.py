"""Rows of a batch are independent."""

import jax.numpy as jnp
import numpy as np

from attnlab.testing.contract.subject import Subject, full, require


def check_rows_apart(subject: Subject) -> None:
    """No row of a batch depends on another, to the last bit."""
    x, other = np.asarray(subject.x()), np.asarray(subject.x(rows=1, seed=1))
    y, _ = subject.apply(subject.params, jnp.asarray(x), full())
    for row in range(2):
        mixed = np.where(np.arange(2)[:, None, None] == row, x, other)
        changed, _ = subject.apply(subject.params, jnp.asarray(mixed), full())
        require(np.array_equal(y[row], changed[row]), f'rows apart: row {row} of the batch depends on the other')
