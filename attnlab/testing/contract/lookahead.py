"""A causal mixer does not look ahead."""

import jax.numpy as jnp
import numpy as np

from attnlab.testing.contract.subject import FEWEST, LENGTH, Subject, full, require
from attnlab.testing.tolerances import assert_close


def check_no_lookahead(subject: Subject) -> None:
    """No output depends on a later input, to the last bit, and every output depends on the input just before it."""
    later = np.arange(1, LENGTH)
    wanted = np.zeros((2, LENGTH, 2, LENGTH), bool)
    wanted[0, later, 0, later - 1] = True
    reach = subject.influence(full(), wanted)
    for t in range(LENGTH):
        ahead = np.flatnonzero(reach[0, t, 0, t + 1 :])
        require(not ahead.size, f'no look-ahead: the output at {t} depends on the input at {t + 1 + ahead[:1]}')
        require(t == 0 or reach[0, t, 0, t - 1] > 0, f'no look-ahead: the output at {t} ignores the input at {t - 1}')
    _check_exchanged(subject)


def _check_exchanged(subject: Subject) -> None:
    """The same of values, up to rounding: choices among tokens, and what is held fixed, have no derivative.

    By which of two equal forms a core computes a chunk may depend on all of its tokens.
    """
    middle = LENGTH // 2
    for seed in range(FEWEST):
        x, other = (np.asarray(subject.x(seed=each)) for each in (seed, seed + FEWEST))
        moved = np.where(np.arange(LENGTH)[:, None] < middle, x, other)
        before, after = (
            np.asarray(subject.apply(subject.params, jnp.asarray(each), full())[0])[:, :middle] for each in (x, moved)
        )
        what = f'no look-ahead: outputs before {middle}, of other inputs from there on'
        assert_close(after, before, dtype=x.dtype, reduction=LENGTH * subject.dim, what=what)
