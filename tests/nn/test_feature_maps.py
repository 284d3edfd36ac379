import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnlab.config import build, from_plain, plain, spec
from attnlab.errors import UserError
from attnlab.mixers.linear.attention import LinearAttention
from attnlab.nn.feature_maps import (
    CosFormer,
    EluPlusOne,
    HeadSquaredProduct,
    JointHedgehog,
    NormAware,
    PositiveRandomFeatures,
    SignedExponentials,
    SiluQueries,
    SquaredProduct,
    SumNorm,
    UnitNorm,
    orthogonal_normals,
)
from attnlab.testing.contract import compare_with_differences
from attnlab.testing.noise import noise, perturbed


def features(*values: float) -> jax.Array:
    return EluPlusOne().apply(jnp.asarray(values)[None, None, None])[0, 0, 0]


def test_elu_plus_one():
    np.testing.assert_allclose(features(2.0, 0.0, -1.0), [3.0, 1.0, np.exp(-1)], rtol=1e-6)


def test_elu_plus_one_stays_positive_and_differentiable():
    assert (features(-30.0, -80.0) > 0).all()
    slope = jax.grad(lambda x: EluPlusOne().apply(x).sum())(jnp.asarray([2.0, -1.0, 200.0, -200.0])[None, None, None])
    np.testing.assert_allclose(slope[0, 0, 0], [1.0, np.exp(-1), 1.0, 0.0], rtol=1e-6, atol=1e-30)


def test_unit_norm_has_length_one_and_a_gradient_at_zero():
    x = jnp.asarray([[3.0, 4.0], [0.0, 0.0]])[None, None]
    np.testing.assert_allclose(UnitNorm().apply(x)[0, 0], [[0.6, 0.8], [0.0, 0.0]], rtol=1e-6)
    assert jnp.isfinite(jax.grad(lambda x: UnitNorm().apply(x).sum())(x)).all()


def test_sum_norm_has_sum_one():
    x = jnp.asarray([2.0, 0.0, -1.0])[None, None, None]
    np.testing.assert_allclose(
        SumNorm().apply(x)[0, 0, 0], np.asarray([3, 1, np.exp(-1)]) / (4 + np.exp(-1)), rtol=1e-6
    )


@pytest.mark.parametrize('of', [CosFormer(span=12), NormAware(), SiluQueries()])
def test_sum_norm_refuses_maps_of_which_it_would_leave_a_part_out(of):
    """The span of one, the powers of queries of another."""
    with pytest.raises(UserError, match=rf'^of SumNorm is {type(of).__name__}\(\), which maps queries apart from keys'):
        SumNorm(of)


def test_a_map_without_parameters_is_its_own_factory():
    made = SumNorm()(4, heads=2, rngs=nnx.Rngs(0))
    q, k = jnp.ones((1, 1, 2, 4)), jnp.zeros((1, 1, 2, 4))
    assert (
        made == SumNorm()
        and build(from_plain(plain(spec(LinearAttention, feature_map=made)))).kwargs['feature_map'] == made
    )
    np.testing.assert_allclose(made.features(q, k, jnp.zeros((1, 1), jnp.int32)), 0.25)


def test_random_features_are_those_of_the_softmax_kernel_in_the_mean():
    made = PositiveRandomFeatures(4, heads=1, count=1 << 14, rngs=nnx.Rngs(0))
    q, k = noise(1, 3, 1, 4), noise(1, 3, 1, 4, seed=1)
    features, of_keys = made.features(q, k, jnp.zeros((1, 3), jnp.int32))
    ratios = jnp.einsum('btgm,bsgm->ts', features, of_keys) / jnp.exp(jnp.einsum('btgk,bsgk->ts', q, k) / 2)
    # What a query's weights share is taken off.
    np.testing.assert_allclose(ratios / ratios[:, :1], 1.0, rtol=0.1)


def test_random_directions_are_normal_and_orthogonal():
    directions = orthogonal_normals(jax.random.key(0), 4094, 4)
    assert directions.shape == (4094, 4)
    products = jnp.einsum('bik,bjk->bij', *(directions[:4092].reshape(-1, 4, 4),) * 2)
    assert jnp.abs(products * (1 - jnp.eye(4))[None]).max() < 1e-4
    np.testing.assert_allclose(directions.T @ directions / 4094, jnp.eye(4), atol=0.05)
    assert abs(float((directions**4).mean()) - 3) < 0.3


def test_queries_of_larger_norm_are_more_selective():
    """What a sum of positive homogeneous features would cancel."""
    q, k = noise(1, 1, 1, 8), jnp.abs(noise(1, 9, 1, 8, seed=1))

    def largest(factor: float) -> float:
        of_query, of_key = NormAware().features(factor * q, k, jnp.zeros((1, 1), jnp.int32))
        weights = jnp.einsum('btgm,bsgm->s', of_query, of_key)
        return float(weights.max() / weights.sum())

    assert largest(0.05) < largest(0.2) < largest(1.0)


def test_norm_aware_has_gradients_where_channels_are_zero():
    def features(q, k):
        return sum(jnp.sum(each) for each in NormAware().features(q, k, jnp.zeros((1, 2), jnp.int32)))

    x = jnp.asarray([[0.0, 0.5, -0.5, 0.0], [0.0] * 4])[None, :, None]
    assert all(jnp.isfinite(each).all() for each in jax.grad(features, (0, 1))(x, x))


@pytest.mark.parametrize('feature_map', [SignedExponentials, JointHedgehog, SquaredProduct, HeadSquaredProduct])
def test_gradients_of_learned_maps_are_differences(feature_map: type):
    """Of weights that are divided by their sum, for parameters, queries and keys."""
    with jax.enable_x64(True):
        graphdef, params = nnx.split(perturbed(feature_map(4, heads=2, rngs=nnx.Rngs(0))))
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), params)
        q, k, w = (noise(1, 3, 2, 4, seed=seed, dtype=jnp.float64) for seed in range(3))

        def loss(inputs):
            params, q, k = inputs
            of_query, of_key = nnx.merge(graphdef, params).features(q, k, jnp.zeros((1, 3), jnp.int32))
            weights = jnp.einsum('bthm,bshm->bhts', of_query, of_key)
            return jnp.sum(w * jnp.einsum('bhts,bshk->bthk', weights / weights.sum(-1, keepdims=True), k))

        compare_with_differences(feature_map.__name__, loss, (params, q, k))
