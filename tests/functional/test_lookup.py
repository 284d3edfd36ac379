import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from attnlab.functional import cores
from attnlab.functional.lookup import lookup, sum_by_row, taken
from attnlab.train.partition import Axes
from pallas_kernels import target

ROWS, D = 11, 5


def drawn(*shape):
    """Few of the rows often, some never, some that are not there."""
    key = np.random.default_rng(0)
    index = np.minimum(key.geometric(0.3, shape) - 1, ROWS - 3)
    index.flat[::7], index.flat[3::7], index.flat[5::11] = -2, ROWS, -ROWS - 1
    return jnp.asarray(index, jnp.int32)


@pytest.mark.parametrize('shape', [(1,), (2,), (3, 7), (4, 33)])
def test_the_gradient_on_a_gpu_is_that_of_take(shape):
    table = jnp.asarray(np.random.default_rng(1).normal(size=(ROWS, D)), jnp.float32)
    index, upstream = drawn(*shape), jnp.asarray(np.random.default_rng(2).normal(size=(*shape, D)), jnp.float32)

    def found(platform):
        with target.compiling_for(platform):
            value, pull = jax.vjp(lambda table: lookup(table, index), table)
            return value, pull(upstream)[0]

    (value, gradient), (expected, summed) = found(target.H100), found(target.Target('cpu', 'cpu'))
    np.testing.assert_array_equal(value, expected)
    np.testing.assert_array_equal(np.isnan(value).all(axis=-1), (index < 0) | (index >= ROWS))
    np.testing.assert_allclose(gradient, summed, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(('axis', 'summed'), [('data', True), ('fsdp', False)])
def test_devices_with_the_whole_table_sum_what_their_own_rows_looked_up(axis, summed):
    mesh = Axes(**({'data': 1} | {axis: 2})).make(jax.devices()[:2])
    table = jnp.asarray(np.random.default_rng(1).normal(size=(ROWS, D)), jnp.float32)
    index, upstream = drawn(4, 7), jnp.asarray(np.random.default_rng(2).normal(size=(4, 7, D)), jnp.float32)

    def loss(table, index):
        return jnp.sum(lookup(table, index) * upstream, where=(index >= 0)[..., None] & (index < ROWS)[..., None])

    expected = jax.grad(loss)(table, index)
    rows = NamedSharding(mesh, PartitionSpec(axis))
    with target.compiling_for(target.H100):
        gradient = jax.jit(cores.on(mesh, jax.grad(loss)))
        given = jax.device_put(table, NamedSharding(mesh, PartitionSpec())), jax.device_put(index, rows)
        assert ('scatter-add' not in str(jax.make_jaxpr(gradient)(*given))) == summed
        np.testing.assert_allclose(gradient(*given), expected, rtol=1e-6, atol=1e-6)


def test_sums_are_those_of_a_loop():
    index = drawn(200)
    values = np.random.default_rng(3).normal(size=(200, D)).astype(np.float32)
    expected = np.zeros((ROWS, D))
    for place, value in zip(np.asarray(index), values, strict=True):
        if 0 <= place < ROWS:
            expected[place] += value
    np.testing.assert_allclose(jax.jit(sum_by_row, static_argnums=2)(values, index, ROWS), expected, atol=1e-5)


def test_sums_of_nothing_are_zeros():
    found = jax.jit(sum_by_row, static_argnums=2)(jnp.ones((0, 3)), jnp.zeros(0, jnp.int32), ROWS)
    np.testing.assert_array_equal(found, np.zeros((ROWS, 3)))


def test_no_numbers_are_scattered_to_one_place_on_a_gpu():
    def gradient(table, index):
        return jax.grad(lambda table: jnp.sum(lookup(table, index)))(table)

    arguments = jnp.zeros((ROWS, D)), drawn(4, 8)
    with target.compiling_for(target.H100):
        assert 'scatter-add' not in str(jax.make_jaxpr(gradient)(*arguments))
    jax.clear_caches()
    with target.compiling_for(target.Target('cpu', 'cpu')):
        assert 'scatter-add' in str(jax.make_jaxpr(gradient)(*arguments))


@pytest.mark.parametrize(
    ('shape', 'axis', 'index'),
    [
        ((2, 9, 3), 1, np.random.default_rng(4).permutation(9)),
        ((2, 9, 3), 1, np.array([[0, 0, 8], [8, 0, 2]])),
        ((4, 5), -1, np.triu_indices(5)[1]),
    ],
)
def test_known_places_are_gathered_back_on_a_gpu(shape, axis, index):
    x = jnp.asarray(np.random.default_rng(5).normal(size=shape), jnp.float32)

    def found(platform):
        with target.compiling_for(platform):
            value, pull = jax.vjp(lambda x: taken(x, index, axis), x)
            upstream = jnp.asarray(np.random.default_rng(6).normal(size=value.shape), jnp.float32)
            return value, pull(upstream)[0], str(jax.make_jaxpr(pull)(upstream))

    (value, gradient, program), (expected, summed, scattered) = (
        found(platform) for platform in (target.H100, target.Target('cpu', 'cpu'))
    )
    np.testing.assert_array_equal(value, expected)
    np.testing.assert_allclose(gradient, summed, rtol=1e-6, atol=1e-6)
    assert 'scatter' not in program and 'scatter' in scattered


@pytest.mark.parametrize('platform', [target.H100, target.Target('cpu', 'cpu')], ids=['gpu', 'cpu'])
def test_numbers_of_16_bits_are_gathered_back_in_float32(platform):
    """Of 169 in a window every sum in bfloat16 would lose a percent."""
    index = np.tile(np.arange(9), (169, 1))
    upstream = jnp.asarray(1 + np.random.default_rng(7).normal(size=(2, *index.shape, 3)), jnp.bfloat16)
    with target.compiling_for(platform):
        value, pull = jax.vjp(lambda x: taken(x, index, 1), jnp.ones((2, 9, 3), jnp.bfloat16))
        (gradient,) = pull(upstream)
    assert value.dtype == gradient.dtype == jnp.bfloat16 and value.shape == upstream.shape
    np.testing.assert_allclose(gradient.astype(jnp.float32), upstream.astype(jnp.float32).sum(1), rtol=2**-8)


@pytest.mark.parametrize('platform', [target.H100, target.Target('cpu', 'cpu')], ids=['gpu', 'cpu'])
def test_places_are_known_in_a_loop_over_layers(platform):
    index = np.arange(6).reshape(3, 2) % 4

    def loss(x):
        def layer(x, _):
            return x + jnp.sum(taken(x, index, 0)), None

        return jnp.sum(jax.lax.scan(layer, x, length=2)[0].astype(jnp.float32))

    with target.compiling_for(platform):
        gradient = jax.jit(jax.grad(loss))(jnp.ones(4, jnp.bfloat16))
    taken_times = np.array([2, 2, 1, 1])
    last = 1 + 4 * taken_times
    np.testing.assert_allclose(gradient.astype(jnp.float32), last + last.sum() * taken_times, rtol=2**-7)
