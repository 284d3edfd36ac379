import jax.numpy as jnp
import numpy as np

from attnlab.nn.pools import MeanPool


def test_pooling_is_the_mean_of_what_is_there():
    hidden = jnp.asarray(np.arange(24).reshape(2, 4, 3), jnp.bfloat16)
    where = jnp.asarray([[True, True, False, False], [False] * 4])
    found = MeanPool()(hidden, where)
    assert found.tolist() == [[1.5, 2.5, 3.5], [0, 0, 0]] and found.dtype == jnp.float32
