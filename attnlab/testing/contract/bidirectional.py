"""What reads both ways."""

import jax.numpy as jnp
import numpy as np

from attnlab.testing.contract.documents import check_packing, check_padding
from attnlab.testing.contract.gradients import check_float64, check_gradients
from attnlab.testing.contract.narrow import check_bfloat16
from attnlab.testing.contract.rows import check_rows_apart
from attnlab.testing.contract.subject import FEWEST, LENGTH, Subject, full, noted, require


def check_bidirectional(subject: Subject, *, packed: bool) -> None:
    """Outputs depend on inputs on both sides; with `causal=False` gradients, types and documents are right.

    These have checks of their own where the mixer is bidirectional as it is made.
    """
    both = subject.bidirectional
    before = np.arange(LENGTH - 1)
    wanted = np.zeros((2, LENGTH, 2, LENGTH), bool)
    wanted[0, before, 0, before + 1] = wanted[0, before + 1, 0, before] = True
    with noted('bidirectional'):
        reach = both.influence(full(), wanted)
        for t in range(LENGTH - 1):
            require(reach[0, t, 0, t + 1] > 0, f'the output at {t} ignores the input at {t + 1}')
            require(reach[0, t + 1, 0, t] > 0, f'the output at {t + 1} ignores the input at {t}')
        checks = (check_gradients, check_bfloat16, check_float64, check_rows_apart)
        for check in checks if subject.causal else ():
            check(both)
        if packed and subject.causal:
            check_packing(both, causal=False)
            check_padding(both, causal=False)


def check_two_sided(subject: Subject) -> None:
    """`make` takes `causal=False`, and what it then makes looks ahead: what `check_bidirectional` asks first of all."""
    instead = 'take causal=False in make, or claim bidirectional=False'
    form, how = ('', 'as it is made') if not subject.causal else (', causal=False', 'with causal=False')
    with noted(f'bidirectional: make(dim, rngs=rngs{form}) fails ({instead})', (Exception,)):
        both = subject.bidirectional
        params = both.params
    middle = LENGTH // 2
    for seed in range(FEWEST):
        x = np.array(both.x(seed=seed))
        before = np.asarray(both.apply(params, jnp.asarray(x), full())[0])
        x[:, middle] += 1
        after = np.asarray(both.apply(params, jnp.asarray(x), full())[0])
        if (before[:, :middle] != after[:, :middle]).any():
            return
    raise AssertionError(
        f'bidirectional: {how} the outputs before token {middle} are the same whatever that token is: '
        f'the mixer does not look ahead ({instead})'
    )


def is_mirrored(subject: Subject) -> bool:
    """Whether the bidirectional form gives reversed outputs for a reversed sequence."""
    both = subject.bidirectional
    x = np.asarray(both.x())
    forwards, backwards = (
        np.asarray(both.apply(both.params, jnp.asarray(each), full())[0]) for each in (x, x[:, ::-1])
    )
    return bool(np.max(np.abs(forwards - backwards[:, ::-1])) < 1e-4 * np.max(np.abs(forwards)))
