"""Which keys a query sees: as the core has it, whatever asks."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from attnlab.errors import UserError
from attnlab.functional.reach import Placed, Reach
from attnlab.testing.contract import context

T = 7
REACHES = [
    Reach(causal, window, sinks)
    for causal, (window, sinks) in itertools.product(
        (True, False), ((None, 0), (1, 0), (3, 0), (2, 1), (2, 5), (1, 7), (9, 2))
    )
]


@pytest.mark.parametrize('packed', [False, True])
def test_it_is_that_of_the_core(packed: bool):
    """Queries of zero weigh what they see equally, and values that are the identity read the weights."""
    ctx = context(((1, 3), (2, 4)))
    here = Placed(jnp.arange(T, dtype=jnp.int32), ctx.segments if packed else jnp.ones((1, T), jnp.int32))
    zeros, identity = jnp.zeros((1, T, 1, 1)), jnp.eye(T)[None, :, None]
    for reach in REACHES:
        if packed and reach.sinks:
            continue
        weights = pallas_kernels.attention(
            zeros,
            zeros,
            identity,
            causal=reach.causal,
            window=reach.window,
            sinks=reach.sinks,
            segments=ctx.segments if packed else None,
            implementation='reference',
        )
        seen = np.asarray(weights)[:, :, 0] > 0
        np.testing.assert_array_equal(reach.visible(here, here), seen, err_msg=str(reach))
        positions = ctx.positions if packed else here.places[None]
        counts = reach.counts(positions, ctx.segments if packed else None)
        np.testing.assert_array_equal(counts, seen.sum(axis=-1), err_msg=str(reach))


def test_a_negative_place_is_no_token():
    seen = Reach(causal=False).within(jnp.array([-1, 0, 3]), jnp.array([-1, 2, 5]))
    np.testing.assert_array_equal(seen, [[False] * 3, [False, True, True], [False, True, True]])


def test_a_ring_holds_what_later_queries_see():
    assert Reach().ring is None and Reach(window=4, sinks=2).ring == 6


@pytest.mark.parametrize(
    ('kwargs', 'message'),
    [
        ({'window': 0}, 'window is 0; it counts the query itself'),
        ({'sinks': 1}, 'sinks is 1 without a window'),
        ({'window': 2, 'sinks': -1}, 'sinks is -1'),
    ],
)
def test_what_is_refused(kwargs: dict, message: str):
    with pytest.raises(UserError, match=message):
        Reach(**kwargs)
