"""Numbers as characters, against Python's own."""

import jax
import jax.numpy as jnp
import numpy as np

from attnlab.functional.written import written, written_statistics


def text(characters):
    return bytes(np.asarray(characters, np.uint8)).decode()


def test_numbers_are_written_as_python_writes_them():
    for number in (0.0, 1.25, -0.375, 9.99, -3.14159, 0.004, -0.004, 7.0):
        expected = f'{number:+.2f}'.replace('-0.00', '+0.00')
        assert text(jax.jit(written)(jnp.float32(number))) == expected
    assert text(written(jnp.float32(123.0))) == '+9.99' and text(written(jnp.float32(-50.0))) == '-9.99'
    assert text(written(jnp.float32(jnp.nan))) == '  nan'


def test_statistics_of_segments():
    segments = jnp.asarray([[1.0, 2.0, 4.5, 0.5], [-1.0, -1.0, -1.0, -1.0]])
    found = [text(row) for row in written_statistics(segments)]
    assert found == ['mean +2.00 deviation +1.54 change -0.50', 'mean -1.00 deviation +0.00 change +0.00']
