"""A causal mixer does not look ahead."""

import numpy as np

from attnlab.testing.contract.subject import LENGTH, Subject, full, require


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
