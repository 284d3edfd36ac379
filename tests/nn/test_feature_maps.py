import jax
import jax.numpy as jnp
import numpy as np

from attnlab.nn.feature_maps import EluPlusOne


def features(*values: float) -> jax.Array:
    return EluPlusOne()(jnp.asarray(values)[None, None, None])[0, 0, 0]


def test_elu_plus_one():
    np.testing.assert_allclose(features(2.0, 0.0, -1.0), [3.0, 1.0, np.exp(-1)], rtol=1e-6)


def test_elu_plus_one_stays_positive_and_differentiable():
    assert (features(-30.0, -80.0) > 0).all()
    slope = jax.grad(lambda x: EluPlusOne()(x).sum())(jnp.asarray([2.0, -1.0, 200.0, -200.0])[None, None, None])
    np.testing.assert_allclose(slope[0, 0, 0], [1.0, np.exp(-1), 1.0, 0.0], rtol=1e-6, atol=1e-30)
