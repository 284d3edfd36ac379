"""A state can be donated."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from attnlab.testing.contract.subject import LENGTH, Subject, cut, full, piece, require
from attnlab.testing.tolerances import assert_close


def check_donation(subject: Subject) -> None:
    """Every array of a new state has a buffer of its own, and a step that is given the state donated equals one pass.

    What decodes donates the state, so that a step writes over it: a buffer cannot be donated twice, nor one that the
    mixer still needs. The program is the one that the other checks of streaming run.
    """
    state = subject.mixer.init_state(2, LENGTH, jnp.float32)
    variables = jax.tree.leaves_with_path(nnx.state(subject.mixer))
    named = [(f'the variable {jax.tree_util.keystr(path)}', leaf) for path, leaf in variables]
    for path, leaf in jax.tree.leaves_with_path(state):
        name = f'the array {jax.tree_util.keystr(path) or "of the state"}'
        for other, taken in named:
            require(
                not _shared(leaf, taken),
                f'donation: in the state of init_state {name} is {other} itself; every array of a state must have a '
                'buffer of its own, such as jnp.zeros makes each time, or jnp.copy',
            )
        named.append((name, leaf))
    x, ctx = subject.x(), full()
    expected = np.asarray(subject.apply(subject.params, x, ctx)[0][:, :1])
    y, _ = subject.apply(subject.params, cut(x, 0, 1), piece(ctx, 0, 1), state)
    assert_close(y, expected, dtype=x.dtype, reduction=LENGTH * subject.dim, what='donation: the first step, y')


def _shared(one: Any, other: Any) -> bool:
    """Whether two arrays are one buffer; empty ones have none."""
    return one is other or (one.size > 0 < other.size and one.unsafe_buffer_pointer() == other.unsafe_buffer_pointer())
