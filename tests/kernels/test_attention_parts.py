"""Attention to the keys in two parts, merged, is attention to all of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnlab.testing.tolerances import assert_close
from pallas_kernels import (
    PowerSoftmax,
    Softmax,
    Softpick,
    Sparsemax,
    StableMax,
    attention,
    attention_part,
    counting,
    dispatch,
)
from tests.functional.divided import noise

Q, K, V = noise('q', 2, 6, 4, 8), noise('k', 2, 10, 2, 8), noise('v', 2, 10, 2, 4)
SEGMENTS = np.repeat(np.array([[1], [2]], np.int32), 6, axis=1), np.array([[1] * 4 + [2] * 6, [1] * 10], np.int32)


@pytest.mark.parametrize(
    'weights', [Softmax(), PowerSoftmax(), PowerSoftmax(epsilon=0.0), Softpick(), StableMax()], ids=repr
)
def test_two_parts_are_the_whole(weights):
    """The first row sees keys of the first part alone, the second row none at all."""
    whole = attention(Q, K, V, weights=weights, causal=False, segments=SEGMENTS, implementation='reference')
    with jax.default_matmul_precision('highest'):
        parts = [
            attention_part(
                Q, K[:, keys], V[:, keys], weights=weights, causal=False, segments=(SEGMENTS[0], SEGMENTS[1][:, keys])
            )
            for keys in (slice(0, 5), slice(5, 10))
        ]
    _, first, second = weights.merge(parts[0].statistics, parts[1].statistics)
    merged = first[..., None] * parts[0].output + second[..., None] * parts[1].output
    assert_close(np.asarray(merged), np.asarray(whole), dtype=Q.dtype, reduction=10, what=repr(weights))


def test_weights_that_do_not_merge_are_refused():
    with pytest.raises(ValueError, match='the rows of Sparsemax over some of the keys do not combine'):
        attention_part(Q, K, V, weights=Sparsemax(), causal=False)


def test_parts_are_not_counted():
    with (
        counting.counting(),
        pytest.raises(dispatch.Unserved, match='attention: a call without a reference form is not'),
    ):
        attention_part(Q, K, V, weights=Softmax(), causal=False)


def test_arguments_of_parts_are_checked():
    q = jnp.ones((1, 4, 2, 8))
    with pytest.raises(ValueError, match='query_terms were given without key_terms; expected both, or neither'):
        attention_part(q, q, q, weights=Softmax(), causal=True, query_terms=jnp.zeros((1, 4, 2)))
    with pytest.raises(ValueError, match='key_terms were given without query_terms; expected both, or neither'):
        attention_part(q, q, q, weights=Softmax(), causal=True, key_terms=jnp.zeros((1, 4, 2)))
    with pytest.raises(ValueError, match=r'segments\[1\] has shape \(1, 3\)'):
        attention_part(q, q, q, weights=Softmax(), causal=True, segments=(jnp.ones((1, 4), int), jnp.ones((1, 3), int)))
    terms = jnp.zeros((1, 4, 2))
    with pytest.raises(ValueError, match=r'rests\[1\] has shape \(1, 3, 2\)'):
        given = {'query_terms': terms, 'key_terms': terms, 'rests': (terms, terms[:, 1:])}
        attention_part(q, q, q, weights=Softmax(), causal=True, **given)
    with pytest.raises(ValueError, match='q and k have 0 channels; expected at least 1'):
        attention_part(q[..., :0], q[..., :0], q, weights=Softmax(), causal=True)
