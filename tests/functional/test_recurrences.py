import jax.numpy as jnp
import numpy as np

from attnlab.functional.recurrences import carried, document_starts, no_segment


def test_document_starts():
    segments = jnp.asarray([[1, 1, 2, 0], [0, 0, 1, 1]])
    np.testing.assert_array_equal(document_starts(segments), [[1, 0, 1, 1], [1, 0, 1, 0]])
    np.testing.assert_array_equal(document_starts(segments, no_segment(2)), document_starts(segments))
    np.testing.assert_array_equal(document_starts(segments, jnp.asarray([1, 1])), [[0, 0, 1, 1], [1, 0, 1, 0]])
    np.testing.assert_array_equal(document_starts(segments[:, :1], jnp.asarray([1, 0])), [[0], [0]])


def test_a_state_is_carried_within_a_document_only():
    state = jnp.arange(1.0, 7.0).reshape(3, 2, 1)
    segments = jnp.asarray([[1, 2], [2, 2], [0, 0]])
    after = carried(state, segments, jnp.asarray([1, 1, -1]))
    np.testing.assert_array_equal(after[:, :, 0], [[1.0, 2.0], [0.0, 0.0], [0.0, 0.0]])
