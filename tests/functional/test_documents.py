"""Sums over the documents of a row, and slots for their tokens."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.errors import UserError
from attnlab.functional.documents import (
    block_slots,
    document_means,
    document_membership,
    document_places,
    document_sizes,
    document_slots,
    local_sum,
)
from attnlab.nn.convolutions import CentredConv
from attnlab.testing.noise import noise

ROW = [0, 0, 1, 1, 1, 2, 3, 3, 3, 0]
SEGMENTS = jnp.asarray([ROW, [1] * 10], jnp.int32)
SAME = np.asarray([[a == b and (a > 0 or (i < 2) == (j < 2)) for j, b in enumerate(ROW)] for i, a in enumerate(ROW)])
"""Which tokens of the first row are of one run."""


def test_means_sizes_and_places():
    x = noise(2, 10, 3)
    means = np.asarray(document_means(x, SEGMENTS))
    np.testing.assert_allclose(means[0], SAME / SAME.sum(1, keepdims=True) @ np.asarray(x[0]), atol=1e-6)
    np.testing.assert_allclose(means[1], np.broadcast_to(x[1].mean(0), (10, 3)), atol=1e-6)
    assert document_means(x, None).shape == (2, 1, 3)
    assert document_sizes(SEGMENTS, 2, 10)[0].tolist() == SAME.sum(1).tolist()
    assert document_places(SEGMENTS, 2, 10)[0].tolist() == [0, 1, 0, 1, 2, 0, 0, 1, 2, 0]
    assert document_places(None, 1, 4).tolist() == [[0, 1, 2, 3]]


def test_documents_are_counted_without_padding():
    own = np.asarray(document_membership(SEGMENTS, 2, 10, 2))[0]
    assert own[:, 0].tolist() == [each == 1 for each in ROW] and own[:, 1].tolist() == [each == 2 for each in ROW]
    slots = document_slots(SEGMENTS, 2, 10, 2)
    assert slots.index[0].tolist() == [20, 20, 0, 1, 2, 10, 20, 20, 20, 20]
    y = slots.collected(slots.spread(jnp.ones((2, 10, 1))))[0, :, 0]
    np.testing.assert_array_equal(y, [0, 0, 1, 1, 1, 1, np.nan, np.nan, np.nan, 0])


def test_blocks_begin_with_documents():
    slots = block_slots(SEGMENTS, 2, 10, 2, 3)
    assert slots.count == 14
    assert slots.index[0].tolist() == [14, 14, 0, 1, 2, 4, 6, 7, 8, 14]


@pytest.mark.parametrize('width', [1, 3, 4])
def test_a_local_sum_stays_within_the_document(width):
    x, taps = noise(2, 10, 3), noise(width, 1, 1, 3, seed=1)
    found = np.asarray(local_sum(x, taps, SEGMENTS))[0]
    for t in range(10):
        near = [(i, t + i - width // 2) for i in range(width) if 0 <= t + i - width // 2 < 10]
        expected = sum(np.asarray(taps)[i, 0, 0] * np.asarray(x)[0, s] * SAME[t, s] for i, s in near)
        np.testing.assert_allclose(found[t], expected, atol=1e-6)


def test_sizes_of_a_convolution_are_checked():
    for sizes, message in (({'width': 2}, 'it must be odd'), ({'kernels': 3}, 'it must divide dim, which is 4')):
        with pytest.raises(UserError, match=message):
            CentredConv(4, **sizes, rngs=nnx.Rngs(0))
